"""``smoke``: deploy one instance, take it through its gates, put back what was there; a report for CI.

Nothing stays: a release that passed is rolled back to the one before (or to nothing), one that failed was taken back by
the deploy itself. The host's own switch stays armed from the deploy's first change until that is done, so the host puts
back what was there if we are killed, also once the release is proven.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from ddtree_ops import operate, wiring
from ddtree_ops.clock import Clock
from ddtree_ops.connection import Connection
from ddtree_ops.errors import DdtreeError, ExitCode
from ddtree_ops.events import Event, Kind, Report
from ddtree_ops.operate import How, Wanted
from ddtree_ops.outcome import Outcome, Status, worst
from ddtree_ops.release import short
from ddtree_ops.targets import Target

REASON = "smoke test over"


class Verdict(StrEnum):
    """How a case ended, in the words of test reports."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True)
class Case:
    """One line of the report: a step of the deploy, a gate, or the way back."""

    group: str
    name: str
    verdict: Verdict
    line: str = ""
    seconds: float = 0.0
    details: tuple[str, ...] = ()


@dataclass(frozen=True)
class Smoke:
    """What came of it."""

    target: str
    cases: tuple[Case, ...]
    seconds: float
    code: ExitCode
    release: str | None = None
    before: str | None = None

    def count(self, verdict: Verdict) -> int:
        return sum(1 for case in self.cases if case.verdict is verdict)


@dataclass
class Recorder:
    """Passes events on, and keeps what each step came to and how long it took."""

    clock: Clock
    report: Report
    cases: dict[str, Case] = field(default_factory=dict)
    _began: dict[str, float] = field(default_factory=dict)

    def __call__(self, event: Event) -> None:
        self.report(event)
        if event.kind is Kind.START:
            self._began[event.step] = self.clock.monotonic()
        verdict = {Kind.OK: Verdict.PASSED, Kind.SKIP: Verdict.SKIPPED, Kind.FAIL: Verdict.FAILED}.get(event.kind)
        if verdict is not None:
            seconds = self.clock.monotonic() - self._began.get(event.step, self.clock.monotonic())
            self.cases[event.step] = Case("deploy", event.step, verdict, event.line, seconds)


def smoke(wanted: Wanted, how: How, report: Report, clock: Clock) -> Smoke:
    """The whole of it, for the one target that is wanted. Ctrl-C between its parts does not leave the release there."""
    began = clock.monotonic()
    target = wanted.targets[0]
    before = current(target)[0]
    steps = Recorder(clock, report)
    undone: list[Outcome] = []
    with operate.tidily(report) as token:
        outcome = operate.deploy(wanted, replace(how, hold=True), steps)[-1]
        now, recorded, blind = look_again(target)
        gates = gate_cases(outcome, recorded if outcome.status.good else {})
        if blind:
            back = Case("rollback", "put back", Verdict.FAILED, blind)
        else:
            back, undone = put_back(wanted, how, outcome, (before, now), report, clock)
    code = worst([outcome, *undone])
    if code is ExitCode.DONE and back.verdict is Verdict.FAILED:
        code = ExitCode.NOT_ROLLED_BACK
    if code is ExitCode.DONE and token.is_set:
        code = ExitCode.INTERRUPTED
    return Smoke(
        target=target.name,
        cases=(*steps.cases.values(), deployed(outcome), *gates, back),
        seconds=clock.monotonic() - began,
        code=code,
        release=outcome.release,
        before=before,
    )


def look_again(target: Target) -> tuple[str | None, Mapping[str, Any], str]:
    """What is there after the deploy, and why that cannot be said."""
    try:
        now, recorded = current(target)
    except DdtreeError as error:
        return None, {}, f"what is there now is not known: {error.found}"
    return now, recorded, ""


def current(target: Target) -> tuple[str | None, Mapping[str, Any]]:
    """The release that is there, and what its gates said."""
    connection = wiring.connect(target.host)
    try:
        there = connection.facts([target.settings]).instance(target.settings.instance)
    finally:
        connection.close()
    on_disk = there.releases.get(there.current or "")
    recorded = (on_disk.gates if on_disk else None) or {}
    return there.current, recorded.get("gates") or {}


def deployed(outcome: Outcome) -> Case:
    """The deploy as a whole."""
    verdict = Verdict.PASSED if outcome.status.good else Verdict.FAILED
    error = outcome.error
    details = (error.why, f"next: {error.next}") if error is not None else ()
    return Case("deploy", "as a whole", verdict, outcome.line, outcome.seconds, details)


def gate_cases(outcome: Outcome, recorded: Mapping[str, Any]) -> list[Case]:
    """Every gate that ran: as recorded on the host, or as the failure brought it."""
    said = recorded if outcome.error is None else outcome.error.data.get("gates") or {}
    words = {"passed": Verdict.PASSED, "skipped": Verdict.SKIPPED}
    return [
        Case(
            "gates",
            name,
            words.get(str(gate.get("verdict")), Verdict.FAILED),
            str(gate.get("line", "")),
            details=tuple(str(finding) for finding in gate.get("findings") or ()),
        )
        for name, gate in said.items()
        if isinstance(gate, Mapping)
    ]


def put_back(
    wanted: Wanted,
    how: How,
    outcome: Outcome,
    seen: tuple[str | None, str | None],
    report: Report,
    clock: Clock,
) -> tuple[Case, list[Outcome]]:
    """Leave the host as it was; what was done for it counts for the exit code too. ``seen``: before, and now.

    What is there now decides, not how the deploy ended: one that was demoted, or failed after its baseline was
    measured, left another release than was there before.
    """
    began = clock.monotonic()
    target = wanted.targets[0]
    before, now = seen

    def case(verdict: Verdict, line: str) -> Case:
        return Case("rollback", "put back", verdict, line, clock.monotonic() - began)

    if outcome.status is Status.NOT_ROLLED_BACK:
        return case(Verdict.FAILED, "the deploy could not put back what was there"), []
    if outcome.status is Status.LOCKED:
        return case(Verdict.PASSED, "nothing was changed; what is there is somebody else's doing"), []
    if now == before and outcome.release == before:
        stuck = let_go(target) if outcome.status.good else ""
        line = stuck or f"{short(before)} was there before; nothing to put back"
        return case(Verdict.FAILED if stuck else Verdict.SKIPPED, line), []
    if now == before:
        return case(Verdict.PASSED, "the deploy left what was there"), []
    if before is None:
        return case(*to_nothing(target)), []
    undone = operate.rollback(wanted, How(dead_man_s=how.dead_man_s), report, to=before, mode=None, reason=REASON)
    good = all(each.status.good for each in undone)
    return case(Verdict.PASSED if good else Verdict.FAILED, "; ".join(each.line for each in undone)), undone


def to_nothing(target: Target) -> tuple[Verdict, str]:
    """There was no release before: the unit is stopped and there is no current one again."""
    instance = target.settings.instance
    try:
        with under_lock(target) as connection:
            args = {"instance": instance, "to": "none", "mark": False, "reason": REASON, "details": wiring.who()}
            connection.call("take_back", args, deadline_s=120.0 + target.settings.drain_timeout_s)
            connection.call("confirm", {"instance": instance})
    except DdtreeError as error:
        return Verdict.FAILED, error.found
    return Verdict.PASSED, "nothing was there before: the unit is stopped and there is no current release"


def let_go(target: Target) -> str:
    """The release that was there before passed and stays: the host's switch goes off. Says why it could not."""
    try:
        with under_lock(target) as connection:
            connection.call("confirm", {"instance": target.settings.instance})
    except DdtreeError as error:
        return f"the host's own switch could not be turned off: {error.found}"
    return ""


@contextmanager
def under_lock(target: Target) -> Iterator[Connection]:
    """A link to the target's host while we hold its lock. Raises LockedError at once where another holds it."""
    connection = wiring.connect(target.host)
    try:
        with connection.locked(f"smoke {target.settings.instance}", 0.0, lambda _line: None, lambda: None):
            yield connection
    finally:
        connection.close()


def groups(cases: Iterable[Case]) -> dict[str, list[Case]]:
    """The cases by group, in the order in which they came."""
    found: dict[str, list[Case]] = {}
    for case in cases:
        found.setdefault(case.group, []).append(case)
    return found
