"""TARGET and options to (host, settings) pairs. Pure.

A TARGET is HOST, HOST:INSTANCE, a group, or ``all``. A bare host means all its instances, except when options
change settings: then it means its default instance, so that ``deploy ct200 --mode tree`` changes one server.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from pydantic import ValidationError

from ddtree_ops.errors import UsageError
from ddtree_ops.inventory import checks
from ddtree_ops.model import Fleet, HostSpec, Mode, Settings


class Target(NamedTuple):
    """One instance on one host, with the settings wanted for it."""

    host: HostSpec
    settings: Settings

    @property
    def name(self) -> str:
        return f"{self.host.name}:{self.settings.instance}"


@dataclass(frozen=True)
class Overrides:
    """Options of the command line that change settings; None means not given."""

    mode: Mode | None = None
    budget: int | None = None
    widths: tuple[int, ...] | None = None
    topk_cap: int | None = None
    states: str | None = None
    gpus: tuple[int, ...] | None = None
    port: int | None = None
    allow_hybrid_unsafe: bool | None = None
    unsafe_reason: str | None = None

    def given(self) -> dict[str, Any]:
        """The settings these options set. A reason alone changes nothing: it explains some other option."""
        found = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) is not None}
        if not found.get("allow_hybrid_unsafe"):
            found.pop("unsafe_reason", None)
        return found


@dataclass(frozen=True)
class Selection:
    """What a command acts on, in the order named, and what a person should know about how it was read."""

    targets: tuple[Target, ...]
    notices: tuple[str, ...] = ()

    def by_host(self) -> dict[str, list[Target]]:
        hosts: dict[str, list[Target]] = {}
        for target in self.targets:
            hosts.setdefault(target.host.name, []).append(target)
        return hosts


def resolve_targets(fleet: Fleet, names: Sequence[str], overrides: Overrides | None = None) -> Selection:
    """Resolve TARGETs with options applied. Raises UsageError. No names at all means every instance."""
    given = overrides.given() if overrides else {}
    found: dict[str, Target] = {}
    for name in names or ("all",):
        for host, instance in _expand(fleet, name, changing=bool(given)):
            target = Target(host, host.instances[instance])
            found.setdefault(target.name, target)
    notices = list(fleet.notices)
    targets = list(found.values())
    if given:
        changed = [_apply(target, given, notices) for target in targets]
        _check_conflicts(changed)
        targets = changed
    return Selection(tuple(targets), tuple(notices))


def changed_targets(fleet: Fleet, names: Sequence[str]) -> tuple[Target, ...]:
    """TARGETs of a change that is not in the settings (rollback): a bare host means its default instance."""
    pairs = [pair for name in names for pair in _expand(fleet, name, changing=True)]
    found = {f"{host.name}:{instance}": Target(host, host.instances[instance]) for host, instance in pairs}
    return tuple(found.values())


def one_target(fleet: Fleet, name: str) -> Target:
    """A TARGET that must mean exactly one instance (rollback, render to a file, ...)."""
    pairs = list(_expand(fleet, name, changing=True))
    if len(pairs) != 1:
        raise UsageError(
            f"{name!r} means {len(pairs)} instances, this command takes one",
            why=", ".join(f"{host.name}:{instance}" for host, instance in pairs),
            next=f"name one, for example {pairs[0][0].name}:{pairs[0][1]}" if pairs else "ddtree-ops targets",
        )
    host, instance = pairs[0]
    return Target(host, host.instances[instance])


def _expand(fleet: Fleet, name: str, *, changing: bool) -> Iterator[tuple[HostSpec, str]]:
    if name == "all":
        for each in fleet.hosts.values():
            if each.instances:
                yield from _expand(fleet, each.name, changing=changing)
    elif name in fleet.groups:
        for member in fleet.groups[name]:
            yield from _expand(fleet, member, changing=changing)
    else:
        host_name, colon, instance = name.partition(":")
        host = _host(fleet, host_name, name)
        if colon:
            yield host, _instance(host, instance)
        elif changing:
            yield host, default_instance(host)
        elif not host.instances:
            raise _no_instances(fleet, host)
        else:
            yield from ((host, instance) for instance in host.instances)


def default_instance(host: HostSpec) -> str:
    """The instance that options change when only the host is named."""
    if host.default_instance is not None:
        return host.default_instance
    if len(host.instances) == 1:
        return next(iter(host.instances))
    names = ", ".join(host.instances) or "none"
    first = next(iter(host.instances), "NAME")
    raise UsageError(
        f"options would change one instance of {host.name}, but it is not said which: it has {names}",
        host=host.name,
        why=f"no default_instance is named under [hosts.{host.name}]",
        next=f"name it: {host.name}:{first}",
        data={"instances": list(host.instances)},
    )


def _host(fleet: Fleet, host: str, name: str) -> HostSpec:
    if host in fleet.hosts:
        return fleet.hosts[host]
    known = (*fleet.hosts, *fleet.groups)
    what = "host" if ":" in name else "host or group"
    raise UsageError(
        f"unknown {what} {host!r}.{checks.did_you_mean(host, known)}",
        why=f"{fleet.path} defines: {', '.join(known)}",
        next="ddtree-ops targets",
        data={"known": list(known)},
    )


def _instance(host: HostSpec, instance: str) -> str:
    if instance in host.instances:
        return instance
    known = ", ".join(host.instances) or "none"
    raise UsageError(
        f"host {host.name} has no instance {instance!r}.{checks.did_you_mean(instance, host.instances)}",
        host=host.name,
        why=f"its instances are: {known}",
        next=f"ddtree-ops targets {host.name}",
        data={"known": list(host.instances)},
    )


def _no_instances(fleet: Fleet, host: HostSpec) -> UsageError:
    return UsageError(
        f"host {host.name} has no instances",
        host=host.name,
        why="there is nothing to act on",
        next=f"add [hosts.{host.name}.instances.NAME] to {fleet.path}",
    )


# -- options


def _apply(target: Target, given: dict[str, Any], notices: list[str]) -> Target:
    host, old = target
    fields = old.model_dump() | given
    try:
        settings = Settings.model_validate(fields)
    except ValidationError as error:
        raise _usage(target, checks.explain_validation(error, fields)[0]) from None
    for problem in (*checks.settings_problems(settings), checks.gpu_problem(settings, host.gpus)):
        if problem:
            raise _usage(target, problem)
    settings, notice = checks.cap_topk(settings, stated="topk_cap" in given or "topk_cap" in old.model_fields_set)
    if notice:
        notices.append(f"{host.name}:{notice}")
    for option, value in (("budget", settings.budget), ("topk_cap", settings.topk_cap)):
        if option in given and not settings.mode.builds_trees:
            flag = option.replace("_", "-")
            notices.append(f"{target.name}: --{flag} {value} has no effect in mode {settings.mode}")
    for option, mode in (("budget", settings.mode is not Mode.AUTO), ("widths", settings.mode is Mode.AUTO)):
        if option in given and settings.mode.builds_trees and not mode:
            flag, instead = ("--budget", "--width") if option == "budget" else ("--width", "--budget")
            notices.append(f"{target.name}: {flag} has no effect in mode {settings.mode}; there it is {instead}")
    if "states" in given and not settings.mode.verifies_trees:
        notices.append(f"{target.name}: --states {settings.states} has no effect in mode {settings.mode}")
    if notice := checks.wide_for_records(settings):
        notices.append(f"{target.name}: {notice}")
    return Target(host, settings)


def _check_conflicts(targets: Sequence[Target]) -> None:
    """Ports and GPUs, against the instances of the inventory and against each other as changed."""
    changed = {target.name: target.settings for target in targets}
    for target in targets:
        host = target.host
        others = {name: changed.get(f"{host.name}:{name}", settings) for name, settings in host.instances.items()}
        if problem := checks.conflict(target.settings, others):
            raise _usage(target, problem)


def _usage(target: Target, problem: checks.Problem) -> UsageError:
    return UsageError(
        problem.found, host=target.name, why=problem.why, next=problem.fix, data={"key": problem.key}
    )  # fmt: skip
