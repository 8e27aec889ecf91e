"""``sweep``: linear and trees of several sizes on one instance, each started and measured; then what ran before again.

The host's lock is held and its own switch armed from the first change to the last: whatever becomes of us, the host
returns to the release that it ran. A tree that does not start or answers otherwise than linear is a result, not the
end: the release before is put back at once and the next tree is tried.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from ddtree_ops.bench import figures
from ddtree_ops.connection import Connection
from ddtree_ops.deploy import Deploy
from ddtree_ops.drain import Drain
from ddtree_ops.errors import DdtreeError, NotRolledBackError, RefusedError, RolledBackError, UsageError
from ddtree_ops.events import Event, Kind
from ddtree_ops.facts.host import HostFacts, InstanceFacts
from ddtree_ops.facts.unit import Condition
from ddtree_ops.gates import lossless
from ddtree_ops.gates.deploy import subject_of
from ddtree_ops.gates.measure import Measurement
from ddtree_ops.gates.result import GateError
from ddtree_ops.gates.run import measured, prove
from ddtree_ops.health import Before
from ddtree_ops.model import GateSettings, Mode, Settings
from ddtree_ops.plan import StepName
from ddtree_ops.release import short
from ddtree_ops.run import carry_out
from ddtree_ops.steps import Draining, Work, stop_limit, waiting

REASON = "the sweep is over"
# Of a deploy: the sweep arms once for all, no release of it is confirmed or recorded, and no user reaches one.
LEFT_OUT = (StepName.ARM, StepName.ROUTE, StepName.CONFIRM, StepName.RECORD)


LATER = dict.fromkeys(("lossless", "throughput"), "all arms are compared at the end") | {
    "soak": "a sweep does not wait"
}


class Verdict(StrEnum):
    """How one arm ended."""

    MEASURED = "measured"
    WRONG = "other answers"
    FAILED = "failed"
    REFUSED = "refused"


@dataclass(frozen=True)
class Result:
    """One arm: ``runs`` are its figures, one for each concurrency, beside linear's where linear was measured."""

    settings: Settings
    verdict: Verdict
    line: str = ""
    release: str | None = None
    measurement: Measurement | None = None
    runs: tuple[Mapping[str, Any], ...] = ()

    @property
    def name(self) -> str:
        sizes = f" {self.settings.budget} top-{self.settings.topk_cap}" if self.settings.mode.builds_trees else ""
        return f"{self.settings.mode}{sizes}"

    @property
    def speedup(self) -> float:
        """Over linear: the geometric mean over concurrencies."""
        return math.exp(math.fsum(math.log(run["speedup"]) for run in self.runs) / len(self.runs))

    def as_json(self) -> dict[str, Any]:
        sizes = {"budget": self.settings.budget, "topk_cap": self.settings.topk_cap}
        return {
            "name": self.name,
            "mode": str(self.settings.mode),
            **(sizes if self.settings.mode.builds_trees else {}),
            "verdict": str(self.verdict),
            "line": self.line,
            "release": self.release,
            "runs": [dict(run) for run in self.runs],
        }


@dataclass
class Sweep:
    """One sweep of one instance. ``standing``: the arm that runs now; None while it is the release before."""

    run: Deploy
    connection: Connection
    gates: GateSettings
    standing: Work | None = None
    before: InstanceFacts | None = None
    found: Measurement | None = None
    drains: list[Drain] = field(default_factory=list)
    works: list[Work] = field(default_factory=list)

    def all(self, arms: Sequence[Settings]) -> list[Result]:
        """Every arm, then the release before again. Raises what ends the sweep; then too that release is put back."""
        settings = arms[0]
        refused = {arm.model_dump_json(): said for arm in arms if (said := self.refusal(arm))}
        say = self.run.lock_line(self.connection.host, settings)
        purpose = f"sweep {settings.instance}"
        with self.connection.locked(purpose, self.run.lock_wait_s, say, self.run.token.check):
            self.before = before = require_running(self.connection.facts([settings]), settings)
            self._arm(settings.instance, before)
            try:
                results = []
                for arm in arms:
                    no = refused.get(arm.model_dump_json())
                    results.append(Result(arm, Verdict.REFUSED, no) if no else self.one(arm, before))
            except NotRolledBackError:
                raise  # the host is still told to take back by itself
            except BaseException:
                self.put_back(before)
                raise
            self.put_back(before)
        return results

    def refusal(self, arm: Settings) -> str:
        """Why this arm cannot run here, looked at before anything is touched; empty if nothing speaks against it."""
        try:
            self.run.look(self.connection, arm)
            if self.run.examine is not None:
                self.run.examine(self.connection, arm)
        except (RefusedError, UsageError) as error:
            return error.found
        return ""

    def one(self, arm: Settings, before: InstanceFacts) -> Result:
        """Start one arm and measure it; its failure puts the release before back at once."""
        facts, release, plan = self.run.look(self.connection, arm)
        steps = tuple(step for step in plan.steps if step.name not in LEFT_OUT)
        work = self.run.work(
            self.connection, release, plan.model_copy(update={"back": before.current, "steps": steps}), facts
        )
        work.gates, work.armed = self.measure, True
        work.draining = self.draining if self.run.draining is not None else None
        self.works.append(work)
        work.hold(self.run.dead_man_s)  # many short arms must not add up to the host's deadline
        name = Result(arm, Verdict.MEASURED).name
        self.run.report(Event(Kind.NOTE, work.host.name, arm.instance, "sweep", f"{name}: release {release.short}"))
        try:
            carry_out(work, self.run.evidence_dir)
        except RolledBackError as failure:
            if "evidence" not in failure.data:
                raise  # the host took back by itself, and the lock is not ours any more
            self.standing = None
            return Result(arm, Verdict.FAILED, failure.found, release.id)
        self.standing = work
        assert self.found is not None
        return Result(arm, Verdict.MEASURED, "", release.id, self.found)

    def measure(self, work: Work) -> Mapping[str, Any]:
        """Stands where a deploy's gates stand: is it the server that was asked for, and what does it do."""
        prove(subject_of(work, None, LATER))
        self.found = measured(subject_of(work, self.gates, {}))
        if self.found.errors:
            raise GateError(self.found.errors[0], host=work.target, data={"gate": "throughput"})
        return {}

    def draining(self, work: Work) -> Draining:
        """One router for all arms: it knows whether the instance was in it when the sweep began."""
        assert self.run.draining is not None
        made = self.run.draining(work)
        if not isinstance(made, Drain):
            return made
        if self.drains:
            made.router = self.drains[0].router
        self.drains.append(made)
        return ArmDrain(self, made)

    def _arm(self, instance: str, before: InstanceFacts) -> None:
        asked = {"instance": instance, "to": before.current, "within_s": self.run.dead_man_s}
        self.connection.call("arm", asked)

    def put_back(self, before: InstanceFacts) -> None:
        """The release before runs and serves again, and the host's own switch is off."""
        self.leave()
        for drain in self.drains[:1]:
            if drain.router is not None and drain.router.was_in:
                drain.router.put_in()
        self.connection.call("confirm", {"instance": before.name})

    def leave(self) -> None:
        """From the arm that stands, if one does, to the release before."""
        for work in self.works:
            work.undoing = True  # nothing interrupts the way back
        if self.standing is not None:
            assert self.before is not None
            self._return(self.standing, self.before)
            self.standing = None

    def _return(self, work: Work, before: InstanceFacts) -> None:
        there, back = before.settings, str(before.current)
        assert there is not None
        work.tell(Kind.UNDO, "sweep", f"putting release {short(back)} back")
        try:
            left = work.probe(work.release.settings).observe().unit.invocation
            asked = {"instance": work.instance, "to": back, "mark": False, "reason": REASON, "details": dict(work.who)}
            limit = 120.0 + work.release.settings.drain_timeout_s
            if self.connection.call("take_back", {**asked, "invocation": None}, deadline_s=limit)["restarted"]:
                wait = waiting(work, there, back, work.keep)
                wait.until_healthy(float(there.start_timeout_s), Before(left, stop_limit(work.release.settings)))
        except DdtreeError as stuck:
            raise NotRolledBackError(
                f"release {short(back)} could not be put back: {stuck.found}",
                host=work.target,
                why="the sweep is over and what ran before it does not run; the host tries again by itself",
                next=f"ddtree-ops rollback {work.target} --to {short(back)}",
            ) from stuck


@dataclass
class ArmDrain:
    """Stops the arm before; taken back, that is not started again: the release before the sweep is."""

    sweep: Sweep
    drain: Drain

    def do(self) -> str:
        return self.drain.do()

    def undo(self) -> str:
        self.sweep.leave()
        return self.drain.undo()

    def put_in(self) -> str:
        return self.drain.put_in()

    def take_out(self) -> str:
        return self.drain.take_out()


def require_running(facts: HostFacts, settings: Settings) -> InstanceFacts:
    """What a sweep returns to: a proven release that runs."""
    there, target = facts.instance(settings.instance), f"{facts.host}:{settings.instance}"
    if there.current is None or there.settings is None:
        found = "nothing is deployed here that a sweep could put back"
    elif there.proven != there.current:
        found = f"release {short(there.current)} was never proven"
    elif there.unit.condition is not Condition.ACTIVE or there.running != there.current:
        found = f"release {short(there.current)} does not run: the unit is {there.unit.condition}"
    elif there.armed_until is not None:
        found = f"release {short(there.current)} is not confirmed yet"
    else:
        return there
    raise RefusedError(
        found,
        host=target,
        why="when a sweep is over, or breaks off, the host returns to the release that ran before it",
        next=f"ddtree-ops deploy {target} --mode linear",
    )


def compared(results: Sequence[Result], gates: GateSettings, ar: Measurement | None = None) -> list[Result]:
    """The figures of each measured arm beside linear's; one whose answers are not linear's is marked. Pure."""
    base = next((each.measurement for each in results if each.settings.mode is Mode.LINEAR), None)
    return [_compared(each, base, gates, ar) for each in results]


def _compared(each: Result, base: Measurement | None, gates: GateSettings, ar: Measurement | None) -> Result:
    if each.measurement is None:
        return each
    declared = Measurement(tuple(run for run in each.measurement.runs if run.concurrency in gates.concurrencies))
    if base is None or each.settings.mode is Mode.LINEAR:
        return replace(each, runs=figures(declared, None))
    said = lossless.judge(lossless.calibrate(base, ar), each.measurement)
    verdict = each.verdict if said.holds else Verdict.WRONG
    return replace(each, runs=figures(declared, base), verdict=verdict, line=said.line)


def recommend(results: Sequence[Result], min_speedup: float = 1.0) -> tuple[Result | None, str]:
    """The arm to keep, by the rule of the throughput gate, and why. None if there was nothing to compare. Pure."""
    linear = next((each for each in results if each.settings.mode is Mode.LINEAR and each.runs), None)
    trees = [each for each in results if each.settings.mode is Mode.TREE and each.runs]
    if linear is None:
        return None, "linear was not measured, so there is nothing to compare with"
    if not trees:
        return None, "no tree was measured"
    sure = [
        tree
        for tree in trees
        if tree.verdict is Verdict.MEASURED and all(run["lower"] >= min_speedup for run in tree.runs)
    ]
    if not sure:
        return linear, f"no tree is surely {min_speedup:.2f} times linear at every concurrency with linear's answers"
    best = max(sure, key=lambda tree: tree.speedup)
    least = min(run["lower"] for run in best.runs)
    return best, f"{best.speedup:.2f} times linear, with 95 % confidence at least {least:.2f} times"
