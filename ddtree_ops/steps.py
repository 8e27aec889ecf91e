"""The steps of a deploy: each has a do, an undo where there is something to undo, and one line for the person.

``build`` makes them of a plan; ``run`` carries them out. Staging has no undo: what it leaves is complete, verified
and unused, and ``prune`` removes it. From ``switch`` on there is one undo, ``take_back``, a single operation of the
helper on the host: the steps after it need none of their own, and the host's own timer can do the same without us.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, BinaryIO, Protocol

from ddtree_ops.clock import Clock
from ddtree_ops.connection import LEASE_S, QUICK_S
from ddtree_ops.errors import DdtreeError, NotRolledBackError
from ddtree_ops.events import Event, Kind, Report
from ddtree_ops.facts.host import InstanceFacts
from ddtree_ops.facts.unit import Condition
from ddtree_ops.health import Before, Probe, Waiting
from ddtree_ops.interrupt import Checks
from ddtree_ops.model import HostSpec, Settings
from ddtree_ops.plan import Plan, StepName
from ddtree_ops.release import Release, pack, short
from ddtree_ops.render.unit import STOP_MARGIN_S
from ddtree_ops.secret import Secrets

UPLOAD_S = 600.0
RENEW_EVERY_S = 40.0
DEAD_MAN_S = 300.0
HEALTHY = "completion"  # the first evidence of a release: it was healthy and completed


class Helper(Protocol):
    """The helper on one host; carries the token of the host's lock once it has it."""

    def call(
        self,
        op: str,
        args: Mapping[str, Any] | None = None,
        payload: bytes | BinaryIO | None = None,
        *,
        deadline_s: float = QUICK_S,
        on_event: Callable[[dict[str, Any]], None] | None = None,
    ) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Step:
    """One step: what it does, what undoes it, and its line for the person. ``do`` and ``undo`` return a short note."""

    name: StepName
    line: str
    do: Callable[[], str]
    undo: Callable[[], str] | None = None


class Draining(Protocol):
    """How a server that people use is stopped, and gets requests again: ``drain.Drain`` in earnest."""

    def do(self) -> str: ...
    def undo(self) -> str: ...
    def put_in(self) -> str: ...
    def take_out(self) -> str: ...


@dataclass
class Work:
    """One instance being deployed: everything its steps need, and what they have done so far.

    ``marks``: why the release that is left counts as taken back from now on; empty if it does not. ``undoing``: nothing
    interrupts the way back.
    """

    host: HostSpec
    release: Release
    plan: Plan
    there: InstanceFacts
    helper: Helper
    probe: Callable[[Settings], Probe]
    stage_engine: Callable[[], str]
    renew: Callable[[float], None]
    clock: Clock
    token: Checks
    report: Report
    gates: Callable[[Work], Mapping[str, Any]] | None = None
    secrets: Secrets = field(default_factory=Secrets)
    draining: Callable[[Work], Draining] | None = None
    health_timeout_s: float | None = None
    who: Mapping[str, Any] = field(default_factory=dict)
    why_back: str = ""
    marks: str = ""
    dead_man_s: float = DEAD_MAN_S
    restarted: bool = False
    armed: bool = False
    armed_to: str = ""
    undoing: bool = False
    alive_at: float = 0.0
    evidence: dict[str, Any] = field(default_factory=dict)
    cut_off: int | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def instance(self) -> str:
        return self.release.instance

    @property
    def target(self) -> str:
        return f"{self.host.name}:{self.instance}"

    @property
    def was_up(self) -> bool:
        """Whether the release before was running or coming up: then taking back means starting it again."""
        return self.there.unit.condition not in (Condition.ABSENT, Condition.DOWN, Condition.FAILED)

    @property
    def start_timeout_s(self) -> float:
        return self.health_timeout_s or float(self.release.settings.start_timeout_s)

    @cached_property
    def drain(self) -> Draining:
        assert self.draining is not None, "the plan has a step that nobody can take"
        return self.draining(self)

    def note(self, line: str) -> None:
        """Something that a person should find in the result."""
        self.notes.append(line)

    def alive(self) -> None:
        """Called while we wait: ends the wait if we were interrupted, and lets the host know that we are still here."""
        if not self.undoing:
            self.token.check()
        self.keep()

    def keep(self) -> None:
        """Hold on to the lock, and move the deadline of an armed switch ahead."""
        now = self.clock.monotonic()
        if not self.plan.has(StepName.LOCK) or now - self.alive_at < min(RENEW_EVERY_S, self.dead_man_s / 3):
            return
        self.hold(self.dead_man_s)

    def hold(self, seconds: float) -> None:
        """Keep lock and armed switch for what may take ``seconds``; we are alive, or neither would move."""
        self.alive_at = self.clock.monotonic()
        self.renew(max(LEASE_S, seconds))
        if self.armed:
            self.helper.call("arm", self.arming(seconds))

    def arming(self, seconds: float) -> dict[str, Any]:
        return {"instance": self.instance, "to": self.plan.back or "none", "within_s": seconds}

    def tell(self, kind: Kind, step: str, line: str, left_s: float | None = None) -> None:
        self.report(Event(kind, self.host.name, self.instance, step, line, left_s))


def build(work: Work) -> list[Step]:
    """The steps of the plan, in its order; ``lock`` and ``check`` are the host's, and ``run`` has taken them."""
    doers: dict[StepName, tuple[Callable[[], str], Callable[[], str] | None]] = {
        StepName.STAGE_ENGINE: (lambda: work.stage_engine(), None),
        StepName.STAGE_RELEASE: (lambda: stage_release(work), None),
        StepName.ARM: (lambda: arm(work), lambda: unarm(work)),
        StepName.DRAIN: (lambda: work.drain.do(), lambda: work.drain.undo()),
        StepName.SWITCH: (lambda: switch(work), lambda: take_back(work)),
        StepName.WRITE_UNIT: (lambda: write_unit(work), None),
        StepName.RELOAD: (lambda: systemctl(work, "daemon-reload"), None),
        StepName.RESET_FAILED: (lambda: systemctl(work, "reset-failed"), None),
        StepName.RESTART: (lambda: restart(work), None),
        StepName.HEALTH: (lambda: wait_health(work), None),
        StepName.GATES: (lambda: prove(work), None),
        StepName.ROUTE: (lambda: work.drain.put_in(), lambda: work.drain.take_out()),
        StepName.CONFIRM: (lambda: disarm(work), None),
        StepName.RECORD: (lambda: record(work), None),
    }
    return [
        Step(step.name, step.line, *doers[step.name])
        for step in work.plan.steps
        if step.name not in (StepName.LOCK, StepName.CHECK)
    ]


def stage_release(work: Work) -> str:
    answer = work.helper.call(
        "stage_release",
        {"instance": work.instance, "release": work.release.id},
        pack(work.release),
        deadline_s=UPLOAD_S,
    )
    return "sent" if answer["staged"] else "was there already"


def deliver(work: Work) -> None:
    """The values of the release's secrets: needed before its unit starts, and by no step after."""
    if work.secrets.values:
        args = {"instance": work.instance}
        changed = work.helper.call("put_secrets", args, work.secrets.payload())["changed"]
        if changed and not work.plan.has(StepName.RESTART):
            line = "secrets changed; the server reads them with its next start: deploy --restart"
            work.tell(Kind.NOTE, StepName.SWITCH, line)


def switch(work: Work) -> str:
    deliver(work)
    args = {"instance": work.instance, "release": work.release.id}
    work.helper.call("switch", args)
    return ""


def write_unit(work: Work) -> str:
    changed = work.helper.call("write_unit", {"instance": work.instance})["changed"]
    return "" if changed else "text unchanged"


def systemctl(work: Work, verb: str) -> str:
    """One verb of systemctl; a refusal is the failure of the step, in systemd's own words."""
    ran = work.helper.call("systemctl", {"verb": verb, "instance": work.instance}, deadline_s=100.0)
    if not ran["ok"]:
        said = (ran["err"] or ran["out"]).strip()
        raise DdtreeError(
            f"systemctl {verb} failed: {said}",
            host=work.target,
            why="systemd did not take the change",
            next=f"ddtree-ops logs {work.target}",
        )
    return ""


def restart(work: Work) -> str:
    """Ask for the restart; do not wait for it. Marked before it is asked: the answer may be lost on the way."""
    if work.there.unit.file_state != "enabled":
        systemctl(work, "enable")
    work.restarted = True
    return systemctl(work, "restart")


def wait_health(work: Work) -> str:
    """Wait for the wanted release; a server that we did not restart is judged as it is."""
    before = Before(work.there.unit.invocation, stop_limit(work.there.settings)) if work.restarted else None
    wait = waiting(work, work.release.settings, work.release.id, work.alive)
    completion = wait.until_healthy(work.start_timeout_s, before)
    work.evidence[HEALTHY] = {"tokens": completion.tokens, "seconds": completion.seconds}
    return f"{completion.tokens} tokens in {completion.seconds:.2f} s"


def waiting(work: Work, settings: Settings, release: str, check: Callable[[], None]) -> Waiting:
    return Waiting(
        probe=work.probe(settings),
        release=release,
        port=settings.port,
        clock=work.clock,
        check=check,
        say=lambda line, left: work.tell(Kind.PROGRESS, StepName.HEALTH, line, left),
    )


def prove(work: Work) -> str:
    if work.gates is not None:
        work.evidence.update(work.gates(work))
    skipped = sum(result.get("verdict") == "skipped" for result in work.evidence.values())
    return f"{len(work.evidence) - skipped} hold" + (f", {skipped} skipped" if skipped else "")


def arm(work: Work) -> str:
    """The host's own timer: if it hears nothing from us for that long, it takes back by itself."""
    work.armed_to = work.helper.call("arm", work.arming(work.dead_man_s))["to"]
    work.armed, work.alive_at = True, work.clock.monotonic()
    return f"if it hears nothing for {work.dead_man_s:.0f} s"


def disarm(work: Work) -> str:
    work.helper.call("confirm", {"instance": work.instance})
    work.armed = False
    return ""


def unarm(work: Work) -> str:
    """Off again; on if it is held by a longer change, which has yet to go back further than this one has gone."""
    if work.armed and not work.plan.has(StepName.CONFIRM) and work.armed_to != (work.plan.back or "none"):
        return f"the host goes on waiting to take back to {short(work.armed_to)}"
    return disarm(work)


def record(work: Work) -> str:
    """Mark the release as proven, with what proved it."""
    before = work.there.releases.get(work.release.id)
    # a rollback takes a release through no gate again: what proved it then still counts
    earlier = (before.gates or {}).get("gates", {}) if before else {}
    gates = {"at": work.clock.time(), "gates": {**earlier, **work.evidence}, "cut_off": work.cut_off}
    details = {**work.who, "from": work.plan.before}
    work.helper.call(
        "record",
        {
            "instance": work.instance,
            "release": work.release.id,
            "outcome": "proven",
            "gates": gates,
            "details": details,
        },
    )
    if work.marks and work.plan.before not in (None, work.release.id):
        mark = {**work.who, "reason": work.marks, "to": work.release.id}
        args = {"instance": work.instance, "release": work.plan.before, "outcome": "taken-back", "details": mark}
        work.helper.call("record", args)
    return ""


def _gates_in_short(work: Work) -> dict[str, Any]:
    """For the history: what each gate said before the release was taken back."""
    shown = {name: result for name, result in work.evidence.items() if "line" in result}
    return {"gates": {name: f"{each['verdict']}: {each['line']}" for name, each in shown.items()}} if shown else {}


def stop_limit(settings: Settings | None) -> float:
    """How long systemd lets a server end, and a little more."""
    return (settings.drain_timeout_s if settings else 0) + STOP_MARGIN_S + 10.0


def kill_unproven(work: Work) -> str:
    """A server that never became healthy has no requests worth waiting for: end it at once. Returns its invocation.

    Left to its drain, one that hangs would hold the GPUs, and the release before back, for minutes.
    """
    seen = work.probe(work.release.settings).observe()
    if HEALTHY not in work.evidence and seen.unit.invocation != work.there.unit.invocation:
        systemctl(work, "kill")
    return seen.unit.invocation


def take_back(work: Work) -> str:
    """Put the host back to the release that was there, or to nothing, and see it healthy if it was up before."""
    back, same = work.plan.back, work.plan.back == work.plan.before
    failed = kill_unproven(work) if work.restarted else ""
    done = work.helper.call(
        "take_back",
        {
            "instance": work.instance,
            "to": back or "none",
            "mark": back != work.release.id,
            "reason": work.why_back,
            "details": {**work.who, **_gates_in_short(work)},
            # a process of the release before that was never restarted is left in peace
            "invocation": work.there.unit.invocation if same and work.there.running == back else None,
        },
        deadline_s=QUICK_S + 90.0 + work.release.settings.drain_timeout_s,
    )
    if back is None:
        return "nothing was there before: the unit is stopped and there is no current release"
    if same and not work.was_up:
        systemctl(work, "stop")
        return f"release {short(back)} is back, and down as it was"
    there = work.there.releases.get(back)
    if not done["restarted"] or there is None or there.settings is None:
        return f"release {short(back)} is back"
    try:
        before = Before(failed, stop_limit(work.release.settings))
        waiting(work, there.settings, back, work.keep).until_healthy(float(there.settings.start_timeout_s), before)
    except DdtreeError as failure:
        raise NotRolledBackError(
            f"release {short(back)} is back, but does not come up: {failure.found}",
            host=work.target,
        ) from failure
    return f"release {short(back)} runs again"
