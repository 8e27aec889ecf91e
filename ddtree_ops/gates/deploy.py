"""The gates as a step of ``deploy``, and the baseline that a tree needs before it can be judged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ddtree_ops.events import Kind
from ddtree_ops.gates import baseline
from ddtree_ops.gates.result import GateError
from ddtree_ops.gates.run import Call, Subject, prove
from ddtree_ops.model import GateSettings, Mode, Settings
from ddtree_ops.plan import StepName

if TYPE_CHECKING:
    from ddtree_ops.steps import Work

COMPARED = ("lossless", "throughput")


@dataclass(frozen=True)
class Gatekeeper:
    """Takes the release of one deploy through its gates. ``skips`` are waived for the whole run, with a reason."""

    skips: Mapping[str, str] = field(default_factory=dict)

    def __call__(self, work: Work) -> dict[str, Any]:
        """Every gate's result by name, as it is recorded. Raises GateError."""
        try:
            results = prove(subject_of(work, work.host.gates.get(work.instance), self.skips))
        except GateError as failure:  # what was shown until then belongs to the record of the failure too
            work.evidence.update(failure.data["gates"])
            raise
        return {name: result.data() for name, result in results.items()}

    def lacks_baseline(self, settings: Settings, engine: str, gates: GateSettings | None, call: Call) -> bool:
        """Whether a gate would have nothing to compare with: then linear must be measured first."""
        if gates is None or not settings.mode.builds_trees or all(name in self.skips for name in COMPARED):
            return False
        key = baseline.baseline_key(settings, engine, gates, Mode.LINEAR)
        return baseline.unpack(call("baseline", {"key": key})["value"], gates) is None


def subject_of(work: Work, gates: GateSettings | None, skips: Mapping[str, str]) -> Subject:
    """The instance that a deploy has just started, as the gates look at it."""
    settings = work.release.settings
    return Subject(
        target=work.target,
        settings=settings,
        release=work.release.id,
        engine=work.release.engine,
        gates=gates,
        probe=work.probe(settings),
        call=work.helper.call,
        clock=work.clock,
        check=work.alive,
        say=lambda line: work.tell(Kind.PROGRESS, StepName.GATES, line),
        skips=skips,
        headers=work.secrets.headers,
    )


def as_linear(settings: Settings) -> Settings:
    """The same instance in linear mode: what is measured as its baseline."""
    return settings.model_copy(update={"mode": Mode.LINEAR, "allow_hybrid_unsafe": False, "unsafe_reason": None})
