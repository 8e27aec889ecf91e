"""What ``bench`` and ``sweep`` do, without the command line: targets and sizes in, figures out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ddtree_ops import operate, wiring
from ddtree_ops.bench import Bench, Benched
from ddtree_ops.connection import Connection
from ddtree_ops.errors import DdtreeError, ExitCode, UsageError
from ddtree_ops.events import Report
from ddtree_ops.gates.deploy import as_linear
from ddtree_ops.inventory.checks import explain_validation
from ddtree_ops.inventory.edit import save_settings
from ddtree_ops.model import GateSettings, HostSpec, Mode, Settings
from ddtree_ops.sweep import Result, Sweep, Verdict, compared, recommend
from ddtree_ops.targets import Overrides, Target, resolve_targets


@dataclass(frozen=True)
class Load:
    """How it is measured; what is not given is the instance's own ``gates``, else the defaults."""

    concurrencies: tuple[int, ...] = ()
    prompts: int | None = None
    tokens: int | None = None
    rounds: int | None = None

    def gates(self, host: HostSpec, instance: str) -> GateSettings:
        """The instance's gates with what was given. UsageError for a number that is out of range."""
        own = host.gates.get(instance, GateSettings())
        given = {name: getattr(self, name) for name in ("prompts", "tokens", "rounds") if getattr(self, name)}
        if self.concurrencies:
            given["concurrencies"] = tuple(dict.fromkeys(self.concurrencies))
        try:
            return GateSettings.model_validate(own.model_dump() | given)
        except ValidationError as error:
            problem = explain_validation(error, given)[0]
            raise UsageError(problem.found, why=problem.why, next=problem.fix) from None


@dataclass(frozen=True)
class Swept:
    """What came of a sweep."""

    target: str
    results: tuple[Result, ...]
    recommended: Result | None
    why: str
    saved: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=())

    @property
    def code(self) -> ExitCode:
        """5 if nothing could be measured; the host is as it was before either way."""
        return ExitCode.DONE if any(each.runs for each in self.results) else ExitCode.ROLLED_BACK

    def as_json(self) -> dict[str, Any]:
        return {
            "exit_code": int(self.code),
            "target": self.target,
            "arms": [each.as_json() for each in self.results],
            "recommended": self.recommended.as_json() if self.recommended else None,
            "why": self.why,
            "saved": list(self.saved),
        }


def bench(fleet_of: operate.FleetOf, names: Sequence[str], load: Load, wait_s: float, report: Report) -> list[Benched]:
    """Measure what runs on every target; nothing is changed."""
    targets = resolve_targets(fleet_of(names), names).targets
    for host, settings in targets:
        load.gates(host, settings.instance)  # what is out of range is said before anything is contacted
    with operate.tidily(report) as token, ExitStack() as closing:
        links: dict[str, Connection] = {}
        for host, _ in targets:
            if host.name not in links:
                links[host.name] = wiring.connect(host)
                closing.callback(links[host.name].close)

        def gates(connection: Connection, settings: Settings) -> GateSettings:
            return load.gates(connection.host, settings.instance)

        def headers(connection: Connection, settings: Settings) -> Mapping[str, str]:
            return wiring.KEYRING.headers(connection.host, settings)

        made = Bench(gates, wiring.CLOCK, token, report, headers, wait_s)
        return made.run([(links[host.name], settings) for host, settings in targets])


def arms(
    fleet_of: operate.FleetOf, name: str, budgets: Sequence[int], caps: Sequence[int], unsafe: Overrides
) -> tuple[operate.Wanted, list[Settings]]:
    """Linear as the instance has it, then a tree for each budget and cap, each once. UsageError for a bad size."""
    if not budgets:
        raise UsageError("no budget is named", next=f"ddtree-ops sweep {name} --budgets 8,16,32")
    wanted = operate.select(fleet_of, [name], Overrides(mode=Mode.LINEAR))
    found, notices = [as_linear(one(wanted, name, "sweep").settings)], list(wanted.notices)
    for budget in budgets:
        for cap in caps or (None,):
            tree = operate.select(fleet_of, [name], replace(unsafe, mode=Mode.TREE, budget=budget, topk_cap=cap))
            notices += tree.notices
            found.append(tree.targets[0].settings)
    once = {each.model_dump_json(): each for each in found}
    return replace(wanted, notices=tuple(dict.fromkeys(notices))), list(once.values())


def one(wanted: operate.Wanted, name: str, command: str) -> Target:
    """The one instance that is meant."""
    if len(wanted.targets) != 1:
        raise UsageError(
            f"{name} means {len(wanted.targets)} instances, a {command} takes one",
            why=", ".join(target.name for target in wanted.targets),
            next=f"ddtree-ops {command} {wanted.targets[0].name}",
        )
    return wanted.targets[0]


def sweep(wanted: operate.Wanted, settings: Sequence[Settings], load: Load, how: operate.How, report: Report) -> Swept:
    """Measure every arm on the one instance and put back what ran."""
    target = wanted.targets[0]
    host, gates = target.host, load.gates(target.host, target.settings.instance)
    with operate.tidily(report) as token:
        run = operate.measurer(wanted, how, token, report, gates)
        connection = run.connect(host)
        try:
            results = Sweep(run, connection, gates).all(settings)
        except DdtreeError as error:
            raise error if error.host else replace(error, host=target.name) from error
        finally:
            connection.close()
    judged = compared(results, gates)
    best, why = recommend(judged, gates.min_speedup)
    return Swept(target.name, tuple(judged), best, why)


def save(wanted: operate.Wanted, swept: Swept) -> Swept:
    """``--save``: what is recommended becomes what the inventory wants; nothing is deployed."""
    if swept.recommended is None:
        return swept
    chosen, (host, settings) = swept.recommended.settings, wanted.targets[0]
    keys = ("mode", "budget", "topk_cap") if chosen.mode.builds_trees else ("mode",)
    values = {key: getattr(chosen, key) for key in keys}
    if chosen.allow_hybrid_unsafe:
        values |= {"allow_hybrid_unsafe": True, "unsafe_reason": chosen.unsafe_reason}
    lines = save_settings(Path(wanted.inventory), [(host.name, settings.instance, values)])
    return replace(swept, saved=tuple(lines))


__all__ = ["Load", "Swept", "Verdict", "arms", "bench", "save", "sweep"]
