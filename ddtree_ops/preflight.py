"""Is this host fit for this change? Pure: facts in, findings out; ``deploy`` refuses on the first of them.

Every finding says what was found, why it matters and one command to run next. Nothing has been touched yet.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ddtree_ops.errors import RefusedError
from ddtree_ops.facts.host import HostFacts
from ddtree_ops.facts.root import REPAIR, WHY
from ddtree_ops.model import HostSpec, Settings, unit_name
from ddtree_ops.plan import Plan

OLDEST_SYSTEMD = 240  # Type=exec
MARGIN_BYTES = 64 << 20


@dataclass(frozen=True)
class Finding:
    """One reason not to begin."""

    name: str
    found: str
    why: str
    next: str


def findings(host: HostSpec, settings: Settings, facts: HostFacts, sglang: str | None) -> list[Finding]:
    """Everything that stands against starting ``settings`` here; ``sglang`` is the version the engine is made for."""
    return [
        *_system(host, facts),
        *_layout(host, settings, facts),
        *_venv(host, settings, facts, sglang),
        *_port(host, settings, facts),
        *_gpus(host, settings, facts),
    ]


def space(host: HostSpec, facts: HostFacts, plan: Plan) -> list[Finding]:
    """Whether what must travel fits. An overlay is made of hard links, so what travels is what it takes."""
    needed = sum(travel.size for travel in plan.travels)
    if not needed or facts.free_bytes is None or facts.free_bytes >= needed + MARGIN_BYTES:
        return []
    return [
        Finding(
            "space",
            f"{_mib(facts.free_bytes)} free under {host.root}, {_mib(needed + MARGIN_BYTES)} needed",
            "a release is staged whole or not at all",
            f"ddtree-ops prune {host.name}",
        )
    ]


def refuse(host: HostSpec, settings: Settings, found: list[Finding]) -> None:
    """Raise the first finding, with all of them as data."""
    if not found:
        return
    first = found[0]
    raise RefusedError(
        first.found,
        host=f"{host.name}:{settings.instance}",
        why=first.why,
        next=first.next,
        data={"problems": [f.found for f in found], "findings": [vars(f) for f in found]},
    )


def _system(host: HostSpec, facts: HostFacts) -> Iterator[Finding]:
    if facts.systemd is None:
        yield Finding(
            "systemd",
            "systemd does not run here",
            "a server is a systemd unit; without it nothing starts, watches or stops one",
            f"ddtree-ops doctor {host.name}",
        )
    elif facts.systemd < OLDEST_SYSTEMD:
        yield Finding(
            "systemd",
            f"systemd {facts.systemd} is too old",
            f"units need Type=exec, of systemd {OLDEST_SYSTEMD}",
            f"ddtree-ops doctor {host.name}",
        )
    if facts.lingers is False and host.transport == "ssh":
        yield Finding(
            "linger",
            "the user's systemd ends with their last session",
            "the server would be stopped as soon as this connection is closed",
            f"on {host.name}: loginctl enable-linger",
        )
    if facts.root_problem:
        yield Finding(
            "root",
            f"{host.root} cannot be written: {facts.root_problem}",
            "engines and releases lie there",
            f"ddtree-ops bootstrap {host.name}",
        )
    for each in facts.open_folders:
        yield Finding("root", str(each), WHY, f"on {host.name}: {REPAIR.format_map(each.words)}")


def _layout(host: HostSpec, settings: Settings, facts: HostFacts) -> Iterator[Finding]:
    there = facts.instance(settings.instance)
    if there.current_problem:
        yield Finding(
            "current",
            f"{host.root}/instances/{settings.instance}/current {there.current_problem}",
            "it must be a link to a release, or absent; it is replaced by rename",
            f"ddtree-ops status {host.name}:{settings.instance}",
        )
    if there.masked:
        yield Finding(
            "masked",
            f"{unit_name(settings.instance)} is masked",
            "somebody forbade this unit to start",
            f"on {host.name}: systemctl unmask {unit_name(settings.instance)}",
        )


def _venv(host: HostSpec, settings: Settings, facts: HostFacts, sglang: str | None) -> Iterator[Finding]:
    venv = facts.venvs.get(settings.venv)
    if venv is None:
        return
    if not venv.python:
        yield Finding(
            "venv",
            f"there is no virtual environment at {settings.venv} (no bin/python that runs)",
            "SGLang and its libraries come from it",
            f"ddtree-ops bootstrap {host.name}",
        )
        return
    if sglang is not None and venv.sglang != sglang:
        has = f"SGLang {venv.sglang}" if venv.sglang else "no SGLang"
        yield Finding(
            "sglang",
            f"{settings.venv} has {has}; the engine is made for {sglang}",
            "the patches are made for exactly that version",
            f"ddtree-ops doctor {host.name}",
        )


def _port(host: HostSpec, settings: Settings, facts: HostFacts) -> Iterator[Finding]:
    ours = unit_name(settings.instance)
    for listening in facts.listening:
        if listening.port == settings.port and listening.unit != ours:
            who = f"{listening.command or 'a process'} (pid {listening.pid})"
            of = f" of {listening.unit}" if listening.unit else ""
            yield Finding(
                "port",
                f"port {settings.port} is taken by {who}{of}",
                "the server could not listen on it, or another would answer in its place",
                f"ddtree-ops status {host.name}",
            )


def _gpus(host: HostSpec, settings: Settings, facts: HostFacts) -> Iterator[Finding]:
    there = facts.gpus
    for gpu in settings.gpus if there else ():
        if gpu not in {known.index for known in there or ()}:
            yield Finding(
                "gpu",
                f"there is no GPU {gpu}; this host has {_count(len(there or ()))}",
                "the server would find no device",
                f"ddtree-ops status {host.name}",
            )
    for other in facts.instances.values():
        theirs = other.settings
        if other.name == settings.instance or theirs is None:
            continue
        shared = sorted(set(theirs.gpus) & set(settings.gpus))
        if shared:
            yield Finding(
                "gpu",
                f"GPU {', '.join(map(str, shared))} belongs to the deployed instance {other.name}",
                "two servers on one GPU take each other's memory",
                f"ddtree-ops status {host.name}:{other.name}",
            )
        if theirs.port == settings.port:
            yield Finding(
                "port",
                f"port {settings.port} belongs to the deployed instance {other.name}",
                "one of the two could not start",
                f"ddtree-ops status {host.name}:{other.name}",
            )
    yield from _strangers(host, settings, facts)


def _strangers(host: HostSpec, settings: Settings, facts: HostFacts) -> Iterator[Finding]:
    ours = unit_name(settings.instance)
    for gpu in facts.gpus or ():
        if gpu.index not in settings.gpus:
            continue
        for user in gpu.users:
            if user.unit != ours:
                of = f" of {user.unit}" if user.unit else ""
                yield Finding(
                    "gpu",
                    f"GPU {gpu.index} is used by {user.command or 'a process'} (pid {user.pid}{of})",
                    "its memory is not free, so the server would not fit or would end up killed",
                    f"ddtree-ops status {host.name}",
                )


def _mib(size: int) -> str:
    return f"{size / (1 << 20):.0f} MiB"


def _count(number: int) -> str:
    return f"{number} GPU" if number == 1 else f"{number} GPUs"
