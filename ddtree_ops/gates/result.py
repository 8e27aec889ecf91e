"""What a gate says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from ddtree_ops.errors import DdtreeError

NAMES = ("identity", "attest", "completion", "lossless", "throughput", "soak")


class Verdict(StrEnum):
    """How a gate ended. Only a release whose gates all passed or were skipped with a reason is proven."""

    PASSED = "passed"
    FAILED = "failed"
    COULD_NOT_RUN = "could-not-run"
    SKIPPED = "skipped"


@dataclass(frozen=True)
class GateResult:
    """One gate's verdict, its line for a person, each finding by name, and the numbers it rests on."""

    name: str
    verdict: Verdict
    line: str
    findings: tuple[str, ...] = ()
    evidence: Mapping[str, Any] = field(default_factory=dict)

    @property
    def holds(self) -> bool:
        return self.verdict in (Verdict.PASSED, Verdict.SKIPPED)

    def data(self) -> dict[str, Any]:
        """For the record on the host, ``--json`` and evidence."""
        return {
            "verdict": str(self.verdict),
            "line": self.line,
            "findings": list(self.findings),
            "evidence": dict(self.evidence),
        }


def skipped(name: str, reason: str) -> GateResult:
    """A gate that was waived by a person, or that has nothing to show in this mode; the reason stays on record."""
    return GateResult(name, Verdict.SKIPPED, reason)


def could_not_run(name: str, why: str, **evidence: Any) -> GateResult:
    """A gate that found no answer either way."""
    return GateResult(name, Verdict.COULD_NOT_RUN, why, evidence=evidence)


class GateError(DdtreeError):
    """A gate did not hold; caught by ``run``, which takes back what was done. ``data["gate"]`` names it."""
