"""``deploy --batches``: a rollout in earnest. Batches are deployed, watched for a while, and taken back if they die."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ddtree_ops import resume
from ddtree_ops.clock import Deadline
from ddtree_ops.deploy import Deploy
from ddtree_ops.errors import NotRolledBackError, RolledBackError, UsageError
from ddtree_ops.events import Event, Kind, Report
from ddtree_ops.interrupt import Token
from ddtree_ops.model import HostSpec, Settings
from ddtree_ops.operate import (
    FleetOf,
    How,
    Wanted,
    deploy,
    deployer,
    on_host,
    result,
    returning,
    select,
    select_kept,
    tidily,
)
from ddtree_ops.outcome import Outcome, Status
from ddtree_ops.release import short
from ddtree_ops.rollout import REST, Rollout, Rules, parse_batches
from ddtree_ops.status import Health
from ddtree_ops.targets import Overrides, Target
from ddtree_ops.watch import statuses

LOOK_EVERY_S = 3.0
SICK_LOOKS = 2  # in a row: one bad look may be a busy moment


@dataclass(frozen=True)
class Rolled:
    """How a rollout ended, and how it could go on."""

    outcomes: tuple[Outcome, ...]
    stopped: str = ""

    def as_json(self) -> dict[str, Any]:
        return {**result(self.outcomes), "stopped": self.stopped, "resume": self.resume}

    @property
    def line(self) -> str:
        """Why it did not go on, and the command to go on with; empty if it is through."""
        return f"stopped: {self.stopped}; go on: {self.resume}" if self.stopped else ""

    @property
    def resume(self) -> str:
        return "ddtree-ops deploy --resume" if self.stopped else ""


@dataclass(frozen=True)
class Asked:
    """The options of a rollout as a person gave them."""

    batches: str | None = None
    max_failures: int = 0
    max_unreachable: int = 0
    soak_s: float = 0.0
    deadline_s: float | None = None
    resume: bool = False

    @property
    def rules(self) -> Rules:
        parts = parse_batches(self.batches) if self.batches else (REST,)
        return Rules(parts, self.max_failures, self.max_unreachable, self.soak_s, self.deadline_s)


@dataclass(frozen=True)
class Job:
    """What is to be done: a plain deploy, or (with ``kept``) a rollout whose state is kept."""

    wanted: Wanted
    kept: resume.RolloutFile | None = None


def choose(fleet_of: FleetOf, names: Sequence[str], overrides: Overrides, plan: Path | None, asked: Asked) -> Job:
    """Targets and options, a kept plan, or a rollout that was stopped."""
    if asked.resume:
        if names or plan is not None or overrides.given():
            raise UsageError(
                "--resume takes no TARGET, plan or settings",
                why="the rollout that was stopped says which they are",
                next="ddtree-ops deploy --resume",
            )
        return resumed(fleet_of, resume.default_path())
    wanted = select(fleet_of, names, overrides) if plan is None else select_kept(fleet_of, names, overrides, plan)
    if asked.batches is None:
        return Job(wanted)
    return Job(wanted, resume.begin(wanted.inventory, wanted.targets, asked.rules))


def resumed(fleet_of: FleetOf, file: Path) -> Job:
    """What an earlier rollout left to do, on the hosts of its inventory."""
    kept = resume.read(file)
    fleet = fleet_of(list(kept.left))
    targets = []
    for name, settings in kept.left.items():
        host = name.partition(":")[0]
        if host not in fleet.hosts:
            raise UsageError(
                f"the rollout is for host {host}, which {fleet.path} does not have",
                next=f"ddtree-ops -i {kept.inventory} deploy --resume",
            )
        targets.append(Target(fleet.hosts[host], settings))
    return Job(Wanted(fleet.path, tuple(targets)), kept)


def carry_out(job: Job, how: How, report: Report) -> Rolled:
    if job.kept is None:
        return Rolled(tuple(deploy(job.wanted, how, report)))
    return roll_out(job.wanted, how, job.kept, report, resume.default_path())


def roll_out(wanted: Wanted, how: How, kept: resume.RolloutFile, report: Report, file: Path) -> Rolled:
    """Batch after batch. Where it stands is in ``file`` at any time."""
    by_name = {host.name: (host, settings) for host, settings in wanted.by_host()}
    resume.write(kept, file)
    with tidily(report) as token:
        run, act = deployer(wanted, how, token, report)
        watcher = Soak(run, token, by_name)
        rollout = Rollout(
            rules=kept.rules,
            deploy=lambda batch: run.run([by_name[name] for name in batch], act),
            soak=watcher,
            not_begun=lambda batch: [_not_begun(host, each) for name in batch for host, each in _pairs(by_name[name])],
            clock=run.clock,
            check=lambda: token.is_set,
            say=lambda line: report(Event(Kind.NOTE, "ddtree-ops", "", "rollout", line)),
            keep=lambda outcomes: _keep(kept, file, outcomes),
        )
        outcomes = rollout.run(list(by_name))
    return Rolled(tuple(outcomes), rollout.stopped)


def _keep(kept: resume.RolloutFile, file: Path, outcomes: Sequence[Outcome]) -> None:
    resume.write(kept, file, outcomes)


def _pairs(pair: tuple[HostSpec, Sequence[Settings]]) -> list[tuple[HostSpec, Settings]]:
    return [(pair[0], each) for each in pair[1]]


def _not_begun(host: HostSpec, settings: Settings) -> Outcome:
    return Outcome(host.name, settings.instance, Status.NOT_BEGUN)


@dataclass
class Soak:
    """Watches what a batch deployed; what does not stay healthy is taken back, at once if nothing else is left."""

    run: Deploy
    token: Token
    by_name: dict[str, tuple[HostSpec, list[Settings]]]

    def __call__(self, outcomes: Sequence[Outcome], seconds: float) -> list[Outcome]:
        good = {each.target: each for each in outcomes if each.status.good}
        sick: dict[str, tuple[int, str]] = {}
        deadline = Deadline.after(seconds, self.run.clock)
        while (alive := set(good) - self._dead(sick)) and not deadline.passed and not self.token.is_set:
            self.run.clock.sleep(min(LOOK_EVERY_S, deadline.left))
            for status in statuses(self._watched(alive)):
                bad = status.health not in (Health.HEALTHY, Health.UNREACHABLE)
                times = sick.get(status.target, (0, ""))[0] + 1 if bad else 0
                sick[status.target] = (times, status.line)
        return [
            self._back(each, sick[each.target][1]) if each.target in self._dead(sick) else each for each in outcomes
        ]

    @staticmethod
    def _dead(sick: dict[str, tuple[int, str]]) -> set[str]:
        return {target for target, (times, _) in sick.items() if times >= SICK_LOOKS}

    def _watched(self, targets: set[str]) -> list[tuple[HostSpec, list[Settings]]]:
        hosts = [
            (host, [each for each in settings if f"{host.name}:{each.instance}" in targets])
            for host, settings in self.by_name.values()
        ]
        return [(host, settings) for host, settings in hosts if settings]

    def _back(self, outcome: Outcome, why: str) -> Outcome:
        """To the release that was there before the rollout; if there was none, a person must look."""
        found = f"it did not stay healthy after the deploy: {why}"
        if outcome.before in (None, outcome.release):
            stuck = NotRolledBackError(
                found,
                host=outcome.target,
                why="no other release was there before it",
                next=f"ddtree-ops logs {outcome.target}",
            )
            return replace(outcome, status=Status.NOT_ROLLED_BACK, error=stuck)
        host, settings = self.by_name[outcome.host]
        wanted = [each for each in settings if each.instance == outcome.instance]
        options = self.run.options.model_copy(update={"gates": (), "prove": False, "restart": False})
        run = replace(self.run, engine=on_host(), gates=None, options=options, kept={})
        back = run.run([(host, wanted)], returning(run, outcome.before, None, found))[0]
        if not back.status.good:
            return back
        error = RolledBackError(
            found,
            host=outcome.target,
            why=f"release {short(outcome.before)} runs again",
            next=f"ddtree-ops logs {outcome.target}",
        )
        return replace(outcome, status=Status.ROLLED_BACK, error=error)
