"""Wanted release and host facts to an exact change. Pure: no clock, no host, no files.

The same plan is what ``plan`` prints, ``deploy`` carries out and ``plan --out`` keeps; it names the facts it was made
for by a fingerprint, so that a kept plan is refused on a host that moved since.
"""

from __future__ import annotations

import difflib
import json
from enum import StrEnum

from pydantic import ValidationError

from ddtree_ops.errors import MovedError, UsageError
from ddtree_ops.facts.host import HostFacts, InstanceFacts
from ddtree_ops.facts.unit import Condition
from ddtree_ops.model import Frozen, Settings, unit_name
from ddtree_ops.release import Release, canonical, sha256, short

FORMAT = 1


class Effect(StrEnum):
    """What a plan does to the running server."""

    NOTHING = "nothing"
    RESTART = "restart"
    RELOAD_RESTART = "reload + restart"


class StepName(StrEnum):
    """The steps of a deploy, in the order in which they are taken."""

    LOCK = "lock"
    CHECK = "check"
    STAGE_ENGINE = "stage engine"
    STAGE_RELEASE = "stage release"
    ARM = "arm"
    DRAIN = "drain"
    SWITCH = "switch"
    WRITE_UNIT = "write unit"
    RELOAD = "daemon-reload"
    RESET_FAILED = "reset-failed"
    RESTART = "restart"
    HEALTH = "health"
    GATES = "gates"
    ROUTE = "route"
    CONFIRM = "confirm"
    RECORD = "record"


# What a release that is in place but not proven does not need again.
_OF_A_CHANGE = frozenset(
    {
        StepName.STAGE_ENGINE,
        StepName.STAGE_RELEASE,
        StepName.DRAIN,
        StepName.WRITE_UNIT,
        StepName.RELOAD,
        StepName.RESET_FAILED,
        StepName.RESTART,
    }
)


class PlannedStep(Frozen):
    """One step and its line for the person."""

    name: StepName
    line: str


class Change(Frozen):
    """One setting that differs from the release that is there; values as JSON text, None where there was none."""

    setting: str
    before: str | None
    after: str | None


class Travel(Frozen):
    """Something that the host lacks and that will be sent."""

    what: str
    size: int


class Plan(Frozen):
    """The exact change of one instance. ``before`` is what is there, ``back`` what a failure returns to."""

    format: int = FORMAT
    host: str
    instance: str
    release: str
    engine: str
    before: str | None
    back: str | None
    effect: Effect
    why: tuple[str, ...]
    steps: tuple[PlannedStep, ...]
    unit_diff: str
    settings_diff: tuple[Change, ...]
    travels: tuple[Travel, ...]
    notes: tuple[str, ...]
    fingerprint: str

    @property
    def target(self) -> str:
        return f"{self.host}:{self.instance}"

    def has(self, name: StepName) -> bool:
        return any(step.name is name for step in self.steps)


class Options(Frozen):
    """What the command line adds to the wanted release; part of the plan's shape, not of the release."""

    restart: bool = False
    arm: bool = False
    hold: bool = False  # leave the host's switch armed in the end: what comes back afterwards turns it off
    drain: bool = False
    route: bool = False
    gates: tuple[str, ...] = ()
    prove: bool = False  # take a release that is proven already through the gates again


def make_plan(wanted: Release, facts: HostFacts, *, engine_size: int = 0, options: Options | None = None) -> Plan:
    """Compare the wanted release with what the host has."""
    options = options or Options()
    there = facts.instance(wanted.instance)
    why = reasons(wanted, there, options)
    reload_first = bool(why) and (there.unit_text != wanted.unit or there.unit.needs_reload)
    effect = Effect.NOTHING if not why else Effect.RELOAD_RESTART if reload_first else Effect.RESTART
    engine_missing = bool(why) and wanted.engine not in facts.engines
    release_missing = bool(why) and wanted.id not in there.complete
    travels = []
    if engine_missing:
        travels.append(Travel(what=f"engine {short(wanted.engine)}", size=engine_size))
    if release_missing:
        size = sum(len(data) for data in wanted.files().values())
        travels.append(Travel(what=f"release {wanted.short}", size=size))
    return Plan(
        host=facts.host,
        instance=wanted.instance,
        release=wanted.id,
        engine=wanted.engine,
        before=there.current,
        back=way_back(wanted.id, there),
        effect=effect,
        why=why,
        steps=_steps(wanted, there, effect, engine_missing, options),
        unit_diff=unit_diff(there.unit_text, wanted.unit, wanted.instance),
        settings_diff=settings_diff(there.settings, wanted.settings),
        travels=tuple(travels),
        notes=_notes(wanted, there, being_changed=options.hold or (facts.lock is not None and facts.lock.live)),
        fingerprint=fingerprint(facts, wanted.instance),
    )


def reasons(wanted: Release, there: InstanceFacts, options: Options) -> tuple[str, ...]:
    """Why the server must be (re)started; none means that the wanted release already runs."""
    found = []
    condition = there.unit.condition
    if there.current is None:
        found.append("nothing is deployed yet")
    elif there.current != wanted.id:
        found.append(f"release {short(there.current)} is there, {wanted.short} is wanted")
    elif there.unit_text != wanted.unit:
        found.append("the unit on disk is not the release's own")
    if there.current == wanted.id and there.unit.needs_reload:
        found.append("systemd has an older unit loaded")
    if there.current == wanted.id and condition not in (Condition.ACTIVE, Condition.ACTIVATING):
        found.append(f"the unit is {condition}")
    elif there.current == wanted.id and there.running not in (None, wanted.id):
        found.append(f"the process that runs is of release {short(there.running)}")
    if options.restart and not found:
        found.append("a restart was asked for")
    return tuple(found)


def way_back(wanted: str, there: InstanceFacts) -> str | None:
    """The release that a failure returns to: what was there; for one that was there but never proven, the last good."""
    if there.current != wanted or there.proven == wanted:
        return there.current
    return last_good(there, wanted)


def last_good(there: InstanceFacts, but: str | None) -> str | None:
    """The release proven last, other than ``but``, that is whole and was never taken back."""
    proven_at = {
        name: float((there.releases[name].gates or {}).get("at", 0.0))
        for name in there.complete - there.taken_back.keys() - {but}
        if there.releases[name].gates is not None
    }
    return max(proven_at, key=lambda name: proven_at[name]) if proven_at else None


def _steps(
    wanted: Release, there: InstanceFacts, effect: Effect, engine_missing: bool, options: Options
) -> tuple[PlannedStep, ...]:
    proven = there.proven == wanted.id and not options.prove
    if effect is Effect.NOTHING:
        names = [StepName.CHECK, StepName.HEALTH]
        if there.armed_until is not None:  # a change before this one broke off before it changed anything
            names = [StepName.LOCK, StepName.CHECK, StepName.HEALTH, StepName.CONFIRM]
        if not proven:
            names = [name for name in StepName if name not in _OF_A_CHANGE]
    else:
        names = list(StepName)
    left_out = {
        StepName.STAGE_ENGINE: not engine_missing,
        StepName.STAGE_RELEASE: wanted.id in there.complete,
        StepName.ARM: not options.arm,
        StepName.CONFIRM: options.hold or (not options.arm and there.armed_until is None),
        StepName.DRAIN: not options.drain or there.unit.condition is not Condition.ACTIVE,
        StepName.RELOAD: effect is not Effect.RELOAD_RESTART,
        StepName.GATES: not options.gates,
        StepName.ROUTE: not options.route,
    }
    return tuple(
        PlannedStep(name=name, line=_line(name, wanted, there, options)) for name in names if not left_out.get(name)
    )


def _line(name: StepName, wanted: Release, there: InstanceFacts, options: Options) -> str:
    """One line for the person."""
    return {
        StepName.LOCK: "hold the host's lock",
        StepName.CHECK: "look at the host and refuse what cannot work",
        StepName.STAGE_ENGINE: f"send engine {short(wanted.engine)} and build its overlay",
        StepName.STAGE_RELEASE: f"send release {wanted.short}",
        StepName.ARM: "let the host take back by itself if we vanish",
        StepName.DRAIN: f"let running requests finish (at most {wanted.settings.drain_timeout_s} s)",
        StepName.SWITCH: f"point current at {wanted.short} (was {short(there.current)})"
        if there.current != wanted.id
        else f"current is {wanted.short} already",
        StepName.WRITE_UNIT: f"write {unit_name(wanted.instance)}",
        StepName.RELOAD: "systemctl daemon-reload",
        StepName.RESET_FAILED: "forget earlier failures of the unit",
        StepName.RESTART: f"restart {unit_name(wanted.instance)}",
        StepName.HEALTH: f"wait for health (at most {wanted.settings.start_timeout_s} s)",
        StepName.GATES: ", ".join(options.gates),
        StepName.ROUTE: "let the router send it requests",
        StepName.CONFIRM: "tell the host that the release stays",
        StepName.RECORD: f"record {wanted.short} as proven",
    }[name]


def _notes(wanted: Release, there: InstanceFacts, *, being_changed: bool) -> tuple[str, ...]:
    notes = []
    if wanted.id in there.taken_back:
        notes.append(f"release {wanted.short} was taken back before: {there.taken_back[wanted.id]}")
    if there.unit.drop_ins:
        notes.append(f"drop-ins change the unit: {', '.join(there.unit.drop_ins)}")
    if there.armed_until is not None and not being_changed:
        notes.append("an earlier deploy was never confirmed; the host would take it back by itself")
    return tuple(notes)


def unit_diff(before: str | None, after: str, instance: str) -> str:
    """A unified diff of the unit's text; empty if nothing changes."""
    name = unit_name(instance)
    lines = difflib.unified_diff(
        (before or "").splitlines(keepends=True),
        after.splitlines(keepends=True),
        fromfile=f"a/{name}" if before is not None else "/dev/null",
        tofile=f"b/{name}",
    )
    return "".join(lines)


def settings_diff(before: Settings | None, after: Settings) -> tuple[Change, ...]:
    """The settings that differ, in the order of the model."""
    old = before.model_dump(mode="json") if before else {}
    new = after.model_dump(mode="json")
    return tuple(
        Change(
            setting=key,
            before=json.dumps(old[key], ensure_ascii=False) if key in old else None,
            after=json.dumps(value, ensure_ascii=False),
        )
        for key, value in new.items()
        if key not in old or old[key] != value
    )


def fingerprint(facts: HostFacts, instance: str) -> str:
    """What a plan depends on: if this changes, the plan was made for another host."""
    there = facts.instance(instance)
    return sha256(
        canonical(
            {
                "host": facts.host,
                "systemd": facts.systemd,
                "engines": sorted(facts.engines),
                "current": there.current,
                "proven": there.proven,
                "running": there.running,
                "condition": there.unit.condition,
                "needs_reload": there.unit.needs_reload,
                "drop_ins": list(there.unit.drop_ins),
                "unit": sha256(there.unit_text.encode()) if there.unit_text is not None else None,
                "venvs": {path: venv.sglang for path, venv in sorted(facts.venvs.items())},
            }
        )
    )


class PlanFile(Frozen):
    """What ``plan --out FILE`` keeps: the plans, and the settings that the releases are made of."""

    format: int = FORMAT
    inventory: str
    plans: tuple[Plan, ...]
    settings: dict[str, Settings]


def read_plan_file(text: str, path: str) -> PlanFile:
    """Read a kept plan; a file that is not one is a usage error."""
    try:
        found = PlanFile.model_validate_json(text)
    except ValidationError as bad:
        first = bad.errors()[0]
        raise UsageError(
            f"{path} is not a plan: {': '.join([*map(str, first['loc']), first['msg']])}",
            why="only what `plan --out` wrote can be carried out",
            next=f"ddtree-ops plan TARGET --out {path}",
        ) from bad
    if found.format != FORMAT:
        raise UsageError(
            f"{path} is a plan of format {found.format}; this version reads {FORMAT}",
            next=f"ddtree-ops plan TARGET --out {path}",
        )
    return found


def require_unmoved(kept: Plan, now: Plan) -> None:
    """Refuse a kept plan on a host that moved, or that would now do something else."""
    if kept.fingerprint != now.fingerprint:
        found = "the host has changed since the plan was made"
    elif kept.release != now.release:
        found = f"the plan is for release {short(kept.release)}; its settings now make {short(now.release)}"
    else:
        return
    raise MovedError(
        found,
        host=kept.target,
        why="what the plan shows is not what would happen now",
        next=f"ddtree-ops plan {kept.target}",
        data={"before": kept.before, "now": now.before},
    )
