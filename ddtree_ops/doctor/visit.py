"""One visit: ask a host everything in one round trip, read it, judge it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from ddtree_ops.clock import Clock
from ddtree_ops.doctor.catalogue import Finding
from ddtree_ops.doctor.checks import examine
from ddtree_ops.doctor.machine import Machine, parse_machine
from ddtree_ops.doctor.models import memory_plan, shapes
from ddtree_ops.errors import RefusedError
from ddtree_ops.facts.memory import Compared, compare
from ddtree_ops.inventory.edit import save_settings
from ddtree_ops.model import HostSpec, Settings, unit_name
from ddtree_ops.pair import Proof, prove_pair
from ddtree_ops.planner import MemoryPlan, fitted
from ddtree_ops.proofs import PROOFS
from ddtree_ops.render.environment import server_environment

DEADLINE_S = 45.0
ONLY_EXTRA = ("--max-mamba-cache-size", "--mamba-ssm-dtype")
"""Limits that are no settings of their own."""


class Caller(Protocol):
    """What is needed of ``connection.Connection``."""

    @property
    def host(self) -> HostSpec: ...

    def call(self, op: str, args: Mapping[str, Any] | None = None, *, deadline_s: float) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Visit:
    """What was seen on one host and what is wrong with it."""

    host: HostSpec
    settings: tuple[Settings, ...]
    machine: Machine
    findings: tuple[Finding, ...]
    seconds: float

    @property
    def refuses(self) -> bool:
        return any(finding.refuses for finding in self.findings)

    @property
    def plans(self) -> dict[str, MemoryPlan]:
        """The memory of each instance whose weights and GPU are known."""
        found = {each.instance: memory_plan(each, self.machine) for each in self.settings}
        return {name: plan for name, plan in found.items() if plan is not None}

    @property
    def compared(self) -> dict[str, tuple[Compared, ...]]:
        """The plan beside what the server itself reported at its start, where one ran."""
        logs = {name: self.machine.memory_logs.get(unit_name(name)) for name in self.plans}
        return {name: compare(self.plans[name], log) for name, log in logs.items() if log is not None}

    @property
    def proofs(self) -> dict[str, Proof]:
        """What was compared of target and drafter, for each instance that has both."""
        found = {}
        for each in self.settings:
            try:
                model, drafter = shapes(each, self.machine)
            except RefusedError:
                continue
            if model is not None and drafter is not None:
                found[each.instance] = prove_pair(model, drafter)
        return found


def visit(caller: Caller, settings: Sequence[Settings], clock: Clock) -> Visit:
    """Look at a host; changes nothing."""
    before, began = clock.time(), clock.monotonic()
    raw = caller.call("doctor", questions(caller.host, settings), deadline_s=DEADLINE_S)
    seconds = clock.monotonic() - began
    machine = parse_machine(raw)
    found = examine(caller.host, settings, machine, now=before + seconds / 2)
    return Visit(caller.host, tuple(settings), machine, tuple(found), seconds)


def limits(seen: Visit) -> dict[str, dict[str, Any]]:
    """Settings that say the limits explicitly, by instance; of instances whose memory is known and suffices."""
    found: dict[str, dict[str, Any]] = {}
    for each in seen.settings:
        plan = (
            fitted(replace(seen.plans[each.instance].ask, mem_fraction=None)) if each.instance in seen.plans else None
        )
        if plan is not None:
            found[each.instance] = {
                "max_running_requests": plan.ask.running,
                "mem_fraction_static": plan.mem_fraction,
                "extra_args": with_flags(each.extra_args, plan.flags()),
            }
    return found


def save_limits(inventory: Path, seen: Sequence[Visit], given: Mapping[str, Any]) -> list[str]:
    """Write the limits that fit, and the options given, into the inventory; one line for each key that changed."""
    made = [(each.host.name, name, {**given, **found}) for each in seen for name, found in limits(each).items()]
    return save_settings(inventory, made) if made else []


def with_flags(extra: Sequence[str], flags: Sequence[str]) -> tuple[str, ...]:
    """``extra`` with the limits that only extra arguments can say; one that was given keeps its place."""
    made = list(extra)
    for name, value in zip(flags[::2], flags[1::2], strict=True):
        if name not in ONLY_EXTRA:
            continue
        given = [i for i, word in enumerate(made) if word == name or word.startswith(f"{name}=")]
        if not given:
            made += [name, value]
        elif "=" in made[given[-1]]:
            made[given[-1]] = f"{name}={value}"
        else:
            made = [*made[: given[-1] + 1], value, *made[given[-1] + 2 :]]
    return tuple(made)


def refuse_red(target: str, found: Sequence[Finding]) -> None:
    """Raise the first red finding, with all of them as data; yellow ones are for the caller to say."""
    red = [finding for finding in found if finding.refuses]
    if red:
        raise RefusedError(
            f"{red[0].check.title}: {red[0].seen}",
            host=target,
            why=red[0].check.why,
            next=red[0].repair,
            data={"problems": [f"{f.check.title}: {f.seen}" for f in red], "findings": [f.check.id for f in found]},
        )


def questions(host: HostSpec, settings: Sequence[Settings]) -> dict[str, Any]:
    """What to ask of this host for these instances."""
    # a model that is no path is a name that SGLang resolves itself, in a cache of its own
    models = {path: each.user for each in settings for path in (each.model, each.drafter) if path and path[0] == "/"}
    first = next(iter(settings), None)
    return {
        "users": sorted({each.user for each in settings if each.user}),
        "units": sorted({unit_name(each.instance) for each in settings}),
        "ports": sorted({each.port for each in settings}),
        "venvs": sorted({each.venv for each in settings}),
        "models": models,
        "caches": ["/var/cache"] if host.scope == "system" else [],
        "proofs": PROOFS,
        "path": server_environment(first, engine_dir="")["PATH"] if first else None,
    }
