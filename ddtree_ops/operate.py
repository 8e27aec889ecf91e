"""What ``deploy`` and ``plan`` do, without the command line: targets in, outcomes or plans out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

from ddtree_ops import wiring
from ddtree_ops.connection import PATIENCE_S, Connection
from ddtree_ops.deploy import Act, Deploy, Engine
from ddtree_ops.doctor.visit import refuse_red, visit
from ddtree_ops.errors import DdtreeError, RefusedError, UsageError
from ddtree_ops.events import Event, Kind, Report, silent
from ddtree_ops.facts.host import HostFacts
from ddtree_ops.gates import NAMES
from ddtree_ops.gates.deploy import COMPARED, Gatekeeper, as_linear
from ddtree_ops.hosts import each_host
from ddtree_ops.interrupt import Token, handling
from ddtree_ops.inventory.edit import save_settings
from ddtree_ops.model import Fleet, GateSettings, HostSpec, Mode, Settings
from ddtree_ops.outcome import Outcome, Status, worst
from ddtree_ops.plan import Options, Plan, PlanFile, read_plan_file
from ddtree_ops.release import Release, make_release, short
from ddtree_ops.render import render_target
from ddtree_ops.rollback import choose, other_mode, release_on_host
from ddtree_ops.steps import DEAD_MAN_S
from ddtree_ops.targets import Overrides, Target, resolve_targets


@dataclass(frozen=True)
class Wanted:
    """What is to be deployed: targets with their settings, and the plans that were kept for them, if any."""

    inventory: str
    targets: tuple[Target, ...]
    kept: dict[str, Plan] = field(default_factory=dict)
    notices: tuple[str, ...] = ()

    def by_host(self) -> list[tuple[HostSpec, list[Settings]]]:
        return by_host(self.targets)


def by_host(targets: Sequence[Target]) -> list[tuple[HostSpec, list[Settings]]]:
    """The targets grouped by host, in the order in which they were named."""
    hosts: dict[str, tuple[HostSpec, list[Settings]]] = {}
    for host, settings in targets:
        hosts.setdefault(host.name, (host, []))[1].append(settings)
    return list(hosts.values())


@dataclass(frozen=True)
class How:
    """The options of a deploy that do not change what is deployed."""

    restart: bool = False
    health_timeout_s: float | None = None
    lock_wait_s: float = 0.0
    parallel: int = 8
    patience_s: float = PATIENCE_S
    dead_man_s: float = DEAD_MAN_S
    host_deadline_s: float | None = None
    skips: Mapping[str, str] = field(default_factory=dict)
    baseline: bool = False
    hold: bool = False


@dataclass(frozen=True)
class Planned:
    """The plan of one target, or why there is none."""

    target: str
    plan: Plan | None = None
    error: DdtreeError | None = None


FleetOf = Callable[[Sequence[str]], Fleet]


def select(fleet_of: FleetOf, names: Sequence[str], overrides: Overrides) -> Wanted:
    """TARGETs and options to what is wanted. A change never means everything by leaving the names out."""
    if not names:
        raise UsageError(
            "no TARGET is named",
            why="a change is never made everywhere by leaving something out",
            next="ddtree-ops deploy all",
        )
    fleet = fleet_of(names)
    selection = resolve_targets(fleet, names, overrides)
    return Wanted(fleet.path, selection.targets, {}, selection.notices)


def select_kept(fleet_of: FleetOf, names: Sequence[str], overrides: Overrides, file: Path) -> Wanted:
    """What a kept plan wants: its own settings, on the hosts of the inventory it was made with."""
    if names or overrides.given():
        raise UsageError(
            "--plan takes no TARGET and no settings",
            why="the plan says which they are",
            next=f"ddtree-ops deploy --plan {file}",
        )
    try:
        kept = read_plan_file(file.read_text("utf-8"), str(file))
    except OSError as error:
        raise UsageError(
            f"{file} cannot be read: {error.strerror}", next=f"ddtree-ops plan TARGET --out {file}"
        ) from None
    fleet = fleet_of([plan.target for plan in kept.plans])
    targets = []
    for plan in kept.plans:
        if plan.host not in fleet.hosts:
            raise UsageError(
                f"{file} is for host {plan.host}, which {fleet.path} does not have",
                next=f"ddtree-ops -i {kept.inventory} deploy --plan {file}",
            )
        targets.append(Target(fleet.hosts[plan.host], kept.settings[plan.target]))
    return Wanted(fleet.path, tuple(targets), {plan.target: plan for plan in kept.plans})


def deploy(wanted: Wanted, how: How, report: Report) -> list[Outcome]:
    """Deploy; Ctrl-C and SIGTERM end it tidily."""
    with tidily(report) as token:
        run, act = deployer(wanted, how, token, report)
        return run.run(wanted.by_host(), act)


@contextmanager
def tidily(report: Report) -> Iterator[Token]:
    """A token that Ctrl-C and SIGTERM set while this lasts."""
    token = Token()
    with handling(token, lambda line: report(Event(Kind.NOTE, "ddtree-ops", "", "interrupt", line))):
        yield token


def deployer(wanted: Wanted, how: How, token: Token, report: Report) -> tuple[Deploy, Act]:
    """What deploys, and what it does with each instance: a baseline first where one is lacking, linear for a tree
    that failed as a tree."""
    run = _run(wanted, how, token, report)

    def act(connection: Connection, settings: Settings) -> Outcome:
        first = _baseline_first(run, how, connection, settings)
        if first is not None and not first.status.good:
            return first
        return _demoted(run, connection, settings, run.one(connection, settings))

    return run, act


def _demoted(run: Deploy, connection: Connection, settings: Settings, outcome: Outcome) -> Outcome:
    """A tree that failed in what only trees can fail costs the mode, not the engine: linear of it stays instead."""
    data = outcome.error.data if outcome.error is not None else {}
    rolled_back = outcome.status is Status.ROLLED_BACK and data.get("gate") in COMPARED
    if not rolled_back or not settings.mode.builds_trees or data.get("back_engine") == run.engine.digest:
        return outcome
    line = f"{settings.mode} failed {data['gate']}; linear of the same engine takes its place"
    run.tell(connection.host, settings, Kind.NOTE, line)
    linear = replace(run, kept={}).one(connection, as_linear(settings))
    if not linear.status.good:
        return replace(outcome, notes=(*outcome.notes, "linear failed too"))
    note = f"demoted to linear: release {short(linear.release)}"
    return replace(outcome, status=Status.DEMOTED, release=linear.release, notes=(*outcome.notes, note))


def _baseline_first(run: Deploy, how: How, connection: Connection, settings: Settings) -> Outcome | None:
    """Measure linear on this very instance, if a tree would have nothing to be compared with (or it is asked for)."""
    host, keeper = connection.host, Gatekeeper(how.skips)
    gates = host.gates.get(settings.instance)
    try:
        lacks = keeper.lacks_baseline(settings, run.engine.digest, gates, connection.call)
    except DdtreeError:
        return None  # the deploy itself meets it too, and says it better
    if not lacks and not (how.baseline and gates is not None and settings.mode.builds_trees):
        return None
    line = "no linear baseline of this host, engine and model yet" if lacks else "a new linear baseline is asked for"
    run.tell(host, settings, Kind.NOTE, f"{line}: linear is deployed and measured first")
    linear = replace(run, kept={}, options=run.options.model_copy(update={"restart": False, "prove": True}))
    return linear.one(connection, as_linear(settings))


def rollback(
    wanted: Wanted, how: How, report: Report, *, to: str | None, mode: Mode | None, reason: str
) -> list[Outcome]:
    """Back to the last proven release, to the one named, or to another mode with the engine that is there."""
    with tidily(report) as token:
        run = _run(wanted, how, token, report, engine=on_host())
        return run.run(wanted.by_host(), returning(run, to, mode, reason))


def returning(run: Deploy, to: str | None, mode: Mode | None, reason: str) -> Act:
    """What ``rollback`` does with each instance."""

    def act(connection: Connection, settings: Settings) -> Outcome:
        name = settings.instance

        def pick(connection: Connection, facts: HostFacts) -> Release:
            if mode is None:
                chosen = choose(connection.host, facts.instance(name), to)
                return release_on_host(facts, name, chosen, connection.unit_of(name, chosen))
            changed, engine = other_mode(facts, name, mode)
            version = facts.systemd or 0
            return make_release(changed, engine, connection.host, systemd_version=version, render=run.render)

        return run.back(connection, settings, pick, reason)

    return act


def on_host() -> Engine:
    """No engine of ours: only what lies on the host already may be used."""

    def refuse(connection: Connection, settings: Settings) -> NoReturn:
        target = f"{connection.host.name}:{settings.instance}"
        raise RefusedError(
            "the engine of that release is not on the host any more",
            host=target,
            why="a rollback sends nothing",
            next=f"ddtree-ops deploy {target}",
        )

    return Engine("", "", refuse, refuse)


def plans(wanted: Wanted, how: How, report: Report = silent) -> list[Planned]:
    """What ``deploy`` would do now; nothing is changed and nothing is locked."""
    run = _run(wanted, how, Token(), report)

    def look(connection: Connection, settings: Settings) -> Planned:
        target = f"{connection.host.name}:{settings.instance}"
        try:
            return Planned(target, run.look(connection, settings)[2])
        except DdtreeError as error:
            return Planned(target, error=error if error.host else replace(error, host=target))

    found = each_host(wanted.by_host(), lambda connection, instances: [look(connection, each) for each in instances])
    made = [planned for answer in found for planned in answer.value or ()]
    return made + [Planned(answer.host.name, error=answer.error) for answer in found if answer.error is not None]


def _run(wanted: Wanted, how: How, token: Token, report: Report, engine: Engine | None = None) -> Deploy:
    """Everything of one run. A release that was proven once is not taken through the gates again to go back to it."""
    gated = engine is None
    return Deploy(
        engine=engine or wiring.engine(),
        render=render_target,
        connect=lambda host: wiring.connect(host, how.patience_s),
        clock=wiring.CLOCK,
        token=token,
        report=report,
        evidence_dir=wiring.evidence_dir(),
        options=Options(restart=how.restart, arm=how.dead_man_s > 0, hold=how.hold, gates=NAMES if gated else ()),
        gates=Gatekeeper(how.skips) if gated else None,
        secrets=wiring.KEYRING,
        draining=wiring.draining,
        kept=wanted.kept,
        lock_wait_s=how.lock_wait_s,
        health_timeout_s=how.health_timeout_s,
        dead_man_s=how.dead_man_s,
        host_deadline_s=how.host_deadline_s,
        parallel=how.parallel,
        who=wiring.who(),
        examine=doctored if gated else None,
        audit=_audited("deploy" if gated else "rollback", wanted.inventory, report),
    )


def measurer(wanted: Wanted, how: How, token: Token, report: Report, gates: GateSettings) -> Deploy:
    """What starts the arms of a sweep: like a deploy's, but every arm is measured, also one that is proven already."""
    streams = ", ".join(map(str, gates.concurrencies))
    options = Options(arm=True, gates=(f"measure at {streams} streams",), prove=True)
    return replace(_run(wanted, how, token, report), options=options)


def _audited(command: str, inventory: str, report: Report) -> Callable[[Outcome], None]:
    """Each outcome into the operator's own log. A log that cannot be written is said and changes no outcome."""
    log = wiring.audit()

    def record(outcome: Outcome) -> None:
        try:
            log.outcome(command, inventory, outcome)
        except OSError as error:
            line = f"not recorded in {log.path}: {error.strerror}"
            report(Event(Kind.NOTE, outcome.host, outcome.instance, "audit", line))

    return record


def doctored(connection: Connection, settings: Settings) -> Sequence[str]:
    """The doctor before a restart: red findings refuse, yellow ones are said."""
    seen = visit(connection, [settings], wiring.CLOCK)
    refuse_red(f"{connection.host.name}:{settings.instance}", seen.findings)
    return [f"{finding.check.title}: {finding.seen}" for finding in seen.findings]


def save(wanted: Wanted, overrides: Overrides, outcomes: Sequence[Outcome]) -> list[str]:
    """``--save``: the options stay in force for what now runs with them; one line for each key that changed."""
    good = {outcome.target for outcome in outcomes if outcome.status.good}
    changes = [
        (target.host.name, target.settings.instance, overrides.given())
        for target in wanted.targets
        if target.name in good
    ]
    return save_settings(Path(wanted.inventory), changes) if changes and overrides.given() else []


def keep(wanted: Wanted, planned: Sequence[Planned], file: Path) -> None:
    """``plan --out FILE``; a plan with errors in it is not kept."""
    made = tuple(each.plan for each in planned if each.plan is not None)
    settings = {target.name: target.settings for target in wanted.targets}
    file.write_text(
        PlanFile(inventory=wanted.inventory, plans=made, settings=settings).model_dump_json(indent=2) + "\n"
    )


def result(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """The one machine-readable result of a run."""
    return {"exit_code": int(worst(outcomes)), "outcomes": [outcome.as_json() for outcome in outcomes]}
