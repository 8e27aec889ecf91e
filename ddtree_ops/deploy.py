"""``deploy``: many hosts at once with a bound, the instances of one host one after the other.

One host is: look, plan, refuse what cannot work, and only then take the lock, look again, and carry the plans out.
A host that already runs what is wanted is looked at and asked for one completion; it is not locked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddtree_ops.clock import Clock, Deadline
from ddtree_ops.connection import Connection
from ddtree_ops.errors import DdtreeError, NotRolledBackError
from ddtree_ops.events import Event, Kind, Report
from ddtree_ops.facts.host import HostFacts
from ddtree_ops.health import UnhealthyError
from ddtree_ops.interrupt import Checks, Interrupted, Limited, Token
from ddtree_ops.model import HostSpec, Settings
from ddtree_ops.outcome import Outcome, Status, status_of
from ddtree_ops.plan import Effect, Options, Plan, StepName, make_plan, require_unmoved
from ddtree_ops.preflight import findings, refuse, space
from ddtree_ops.release import Release, RenderUnit, make_release
from ddtree_ops.run import carry_out
from ddtree_ops.secret import Secrets
from ddtree_ops.steps import DEAD_MAN_S, Draining, Work


@dataclass(frozen=True)
class Engine:
    """The engine that is deployed: its name, the SGLang it is made for, and how it gets onto a host.

    ``check`` returns how many bytes would travel and refuses a host with another SGLang; it changes nothing.
    """

    digest: str
    sglang: str
    check: Callable[[Connection, Settings], int]
    stage: Callable[[Connection, Settings], str]


@dataclass
class Attempt:
    """What is known of an attempt when it ends, however it ends."""

    plan: Plan | None = None
    notes: Sequence[str] = ()
    seconds: float = 0.0
    round_trips: int = 0


Act = Callable[[Connection, Settings], Outcome]
Pick = Callable[[Connection, HostFacts], Release]


class LateError(DdtreeError):
    """One host took longer than it may."""


def no_secrets(_host: HostSpec, _settings: Settings) -> Secrets:
    return Secrets()


@dataclass(frozen=True)
class Deploy:
    """One run of ``deploy``: everything that is the same for every host."""

    engine: Engine
    render: RenderUnit
    connect: Callable[[HostSpec], Connection]
    clock: Clock
    token: Token
    report: Report
    evidence_dir: Path
    options: Options = field(default_factory=Options)
    gates: Callable[[Work], Mapping[str, Any]] | None = None
    secrets: Callable[[HostSpec, Settings], Secrets] = no_secrets
    draining: Callable[[Work], Draining] | None = None
    kept: Mapping[str, Plan] = field(default_factory=dict)
    lock_wait_s: float = 0.0
    health_timeout_s: float | None = None
    dead_man_s: float = DEAD_MAN_S
    host_deadline_s: float | None = None
    parallel: int = 8
    who: Mapping[str, Any] = field(default_factory=dict)
    audit: Callable[[Outcome], None] = lambda _outcome: None
    # a closer look before a restart: refuses what would fail, returns what a person should know
    examine: Callable[[Connection, Settings], Sequence[str]] | None = None

    def run(self, hosts: Sequence[tuple[HostSpec, Sequence[Settings]]], act: Act | None = None) -> list[Outcome]:
        """Deploy to every host; one result for each instance, whatever happens to the others."""
        with ThreadPoolExecutor(max_workers=max(1, min(self.parallel, len(hosts) or 1))) as pool:
            parts = [pool.submit(self.one_host, host, settings, act or self.one) for host, settings in hosts]
            return [outcome for part in parts for outcome in part.result()]

    def one_host(self, host: HostSpec, settings: Sequence[Settings], each_instance: Act) -> list[Outcome]:
        """Every instance of one host, in sequence."""
        try:
            self.token.check()
            connection = self.connect(host)
        except Interrupted:
            return [self.outcome(host, each, Status.INTERRUPTED) for each in settings]
        except DdtreeError as error:
            return [self.outcome(host, each, status_of(error), error=error) for each in settings]
        try:
            return [each_instance(connection, each) for each in settings]
        finally:
            connection.close()

    def one(self, connection: Connection, settings: Settings) -> Outcome:
        """One instance to what the inventory and the options want."""

        def act(attempt: Attempt) -> None:
            self.tell(connection.host, settings, Kind.START, "look at the host and refuse what cannot work")
            facts, release, plan = self.look(connection, settings)
            attempt.plan = plan
            self.say_plan(connection.host, settings, plan)
            if self.examine is not None and plan.has(StepName.RESTART):
                for line in self.examine(connection, settings):
                    self.tell(connection.host, settings, Kind.NOTE, line)
            if plan.has(StepName.LOCK) or (facts.lock is not None and facts.lock.live):
                self.change(connection, settings, attempt, plan)
            else:
                self.act(self.work(connection, release, plan, facts), attempt)

        return self.attempt(connection, settings, act)

    def back(self, connection: Connection, settings: Settings, pick: Pick, reason: str) -> Outcome:
        """One instance to a release that ``pick`` finds on the host; what is left by hand counts as taken back."""

        def act(attempt: Attempt) -> None:
            say = self.lock_line(connection.host, settings)
            with connection.locked(f"rollback {settings.instance}", self.lock_wait_s, say, self.token.check):
                facts = connection.facts([settings])
                release = pick(connection, facts)
                attempt.plan = make_plan(release, facts, options=self.options_for(connection.host, release.settings))
                self.say_plan(connection.host, settings, attempt.plan)
                work = self.work(connection, release, attempt.plan, facts)
                work.marks = reason
                self.act(work, attempt)

        return self.attempt(connection, settings, act)

    def attempt(self, connection: Connection, settings: Settings, act: Callable[[Attempt], None]) -> Outcome:
        """Every way an attempt can end is an outcome; even a bug must not hide the results of other hosts."""
        attempt, began, trips = Attempt(), self.clock.monotonic(), connection.round_trips()
        error: DdtreeError | None = None
        try:
            self.token.check()
            act(attempt)
            same = attempt.plan is not None and attempt.plan.effect is Effect.NOTHING
            status = Status.UNCHANGED if same else Status.DEPLOYED
        except Interrupted:
            status = Status.INTERRUPTED
        except DdtreeError as failure:
            error, status = failure, status_of(failure)
        except Exception as bug:  # noqa: BLE001  said as a bug; the other hosts' results must not go with it
            found = f"unexpected {type(bug).__name__}: {bug}"
            error = DdtreeError(
                found, why="this is a bug of ddtree-ops", next="run it again with --debug and report it"
            )
            status = Status.FAILED
        attempt.seconds, attempt.round_trips = self.clock.monotonic() - began, connection.round_trips() - trips
        return self.outcome(connection.host, settings, status, attempt, error)

    def look(self, connection: Connection, settings: Settings) -> tuple[HostFacts, Release, Plan]:
        """Facts, the release they make, the plan; refuses a host that moved or is not fit."""
        host = connection.host
        self.secrets(host, settings)  # one that cannot be found is a reason to touch nothing
        facts = connection.facts([*host.instances.values(), settings])
        release = self.release(host, settings, facts)
        refuse(host, settings, findings(host, settings, facts, self.engine.sglang))
        size = 0 if self.engine.digest in facts.engines else self.engine.check(connection, settings)
        plan = make_plan(release, facts, engine_size=size, options=self.options_for(host, settings))
        if (kept := self.kept.get(plan.target)) is not None:
            require_unmoved(kept, plan)
        refuse(host, settings, space(host, facts, plan))
        return facts, release, plan

    def options_for(self, host: HostSpec, settings: Settings) -> Options:
        """What this instance needs of what the run could do."""
        drain = self.draining is not None and settings.drain_timeout_s > 0
        route = self.draining is not None and settings.instance in host.routers
        return self.options.model_copy(update={"drain": drain, "route": route})

    def say_plan(self, host: HostSpec, settings: Settings, plan: Plan) -> None:
        self.tell(host, settings, Kind.OK, f"{plan.effect}: {'; '.join(plan.why) or 'it already runs'}")
        for note in plan.notes:
            self.tell(host, settings, Kind.NOTE, note)

    def release(self, host: HostSpec, settings: Settings, facts: HostFacts) -> Release:
        version = facts.systemd or 0
        return make_release(settings, self.engine.digest, host, systemd_version=version, render=self.render)

    def change(self, connection: Connection, settings: Settings, attempt: Attempt, first: Plan) -> None:
        """Under the lock, from facts that were taken under the lock."""
        say = self.lock_line(connection.host, settings)
        with connection.locked(f"deploy {settings.instance}", self.lock_wait_s, say, self.token.check) as took:
            if took:
                say(f"took over the lock that {took} left behind")
            facts, release, attempt.plan = self.look(connection, settings)
            if attempt.plan.fingerprint != first.fingerprint:
                say("the host changed before the lock was ours; planned again")
                self.say_plan(connection.host, settings, attempt.plan)
            self.act(self.work(connection, release, attempt.plan, facts), attempt)

    def limited(self, host: HostSpec) -> Checks:
        """The token, and the time that one host may take; what is late is taken back like what failed."""
        if self.host_deadline_s is None:
            return self.token
        late = LateError(f"not done after the {self.host_deadline_s:.0f} s that a host may take", host=host.name)
        return Limited(self.token, Deadline.after(self.host_deadline_s, self.clock), late)

    def lock_line(self, host: HostSpec, settings: Settings) -> Callable[[str], None]:
        return lambda line: self.report(Event(Kind.PROGRESS, host.name, settings.instance, StepName.LOCK, line))

    def act(self, work: Work, attempt: Attempt) -> None:
        """Carry the plan out. A server that already runs is only looked at, and then a failure changed nothing."""
        attempt.notes = work.notes
        try:
            carry_out(work, self.evidence_dir)
        except UnhealthyError as sick:
            raise not_healthy(work, sick) from sick

    def work(self, connection: Connection, release: Release, plan: Plan, facts: HostFacts) -> Work:
        return Work(
            host=connection.host,
            release=release,
            plan=plan,
            there=facts.instance(release.instance),
            helper=connection,
            probe=connection.probe,
            stage_engine=lambda: self.engine.stage(connection, release.settings),
            renew=connection.renew,
            clock=self.clock,
            token=self.limited(connection.host),
            report=self.report,
            gates=self.gates,
            secrets=self.secrets(connection.host, release.settings),
            draining=self.draining,
            health_timeout_s=self.health_timeout_s,
            dead_man_s=self.dead_man_s,
            alive_at=self.clock.monotonic(),
            who=self.who,
        )

    def tell(self, host: HostSpec, settings: Settings, kind: Kind, line: str) -> None:
        self.report(Event(kind, host.name, settings.instance, StepName.CHECK, line))

    def outcome(
        self,
        host: HostSpec,
        settings: Settings,
        status: Status,
        attempt: Attempt | None = None,
        error: DdtreeError | None = None,
    ) -> Outcome:
        attempt = attempt or Attempt()
        plan = attempt.plan
        outcome = Outcome(
            host=host.name,
            instance=settings.instance,
            status=status,
            release=plan.release if plan else None,
            before=plan.before if plan else None,
            effect=str(plan.effect) if plan else "",
            seconds=attempt.seconds,
            round_trips=attempt.round_trips,
            error=error,
            notes=(*(plan.notes if plan else ()), *attempt.notes),
        )
        self.audit(outcome)
        self.report(Event(Kind.END, host.name, settings.instance, str(status), outcome.line))
        return outcome


def not_healthy(work: Work, sick: UnhealthyError) -> DdtreeError:
    """The wanted release was already there and is not healthy: nothing was changed, so nothing can be undone."""
    return NotRolledBackError(
        f"release {work.release.short} is in place but not healthy: {sick.found}",
        host=work.target,
        why="nothing was changed just now, so there was nothing to take back",
        next=f"ddtree-ops deploy {work.target} --restart",
        data={"release": work.release.id},
    )
