"""What is known of a host before a change: the helper's ``facts`` answer, read into frozen values.

Everything that preflight, plan and status decide on is in here, so that they stay pure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from ddtree_ops.facts.root import OpenFolder, open_folders
from ddtree_ops.facts.unit import UnitState, parse_show
from ddtree_ops.model import Settings


@dataclass(frozen=True)
class GpuUser:
    """A process that holds memory on a GPU; ``unit`` is the systemd unit of its cgroup, empty if it has none."""

    pid: int
    memory: int = 0
    command: str = ""
    unit: str = ""


@dataclass(frozen=True)
class Gpu:
    """One GPU as nvidia-smi counts it, and who uses it. Memory in MiB."""

    index: int
    uuid: str
    name: str = ""
    memory_total: int = 0
    memory_used: int = 0
    users: tuple[GpuUser, ...] = ()


@dataclass(frozen=True)
class Listening:
    """Who listens on a port; ``unit`` is the systemd unit of its cgroup, empty if it has none."""

    port: int
    pid: int
    command: str = ""
    unit: str = ""


@dataclass(frozen=True)
class Venv:
    """A virtual environment that an instance wants: does it exist, which SGLang is in it."""

    path: str
    python: bool
    sglang: str | None = None


@dataclass(frozen=True)
class OnDisk:
    """A release as it lies on the host. ``gates`` is what proved it; ``damage`` what its manifest says is wrong."""

    engine: str | None = None
    settings: Settings | None = None
    gates: Mapping[str, Any] | None = None
    damage: tuple[str, ...] = ()
    staged: float = 0.0


@dataclass(frozen=True)
class InstanceFacts:
    """One instance as the host has it: on disk, loaded by systemd, running."""

    name: str
    unit: UnitState = field(default_factory=UnitState)
    unit_text: str | None = None
    current: str | None = None
    current_problem: str = ""
    masked: bool = False
    running: str | None = None
    previous: str | None = None
    proven: str | None = None
    taken_back: Mapping[str, str] = field(default_factory=dict)
    releases: Mapping[str, OnDisk] = field(default_factory=dict)
    armed_until: float | None = None
    processes: tuple[int, ...] = ()

    @property
    def settings(self) -> Settings | None:
        """Of the release that ``current`` points at."""
        there = self.releases.get(self.current) if self.current else None
        return there.settings if there else None

    @property
    def complete(self) -> frozenset[str]:
        """The releases that are whole, byte for byte."""
        return frozenset(name for name, there in self.releases.items() if not there.damage)


@dataclass(frozen=True)
class LockFacts:
    """Who changes the host right now."""

    owner: str
    pid: int | None
    purpose: str
    since: float
    expires: float
    live: bool


@dataclass(frozen=True)
class HostFacts:
    """One host at one instant."""

    host: str
    at: float = 0.0
    systemd: int | None = None
    python: str = ""
    root_problem: str = ""
    open_folders: tuple[OpenFolder, ...] = ()
    lingers: bool | None = None
    free_bytes: int | None = None
    engines: frozenset[str] = frozenset()
    gpus: tuple[Gpu, ...] | None = None
    listening: tuple[Listening, ...] = ()
    venvs: Mapping[str, Venv] = field(default_factory=dict)
    instances: Mapping[str, InstanceFacts] = field(default_factory=dict)
    lock: LockFacts | None = None

    def instance(self, name: str) -> InstanceFacts:
        return self.instances.get(name) or InstanceFacts(name)


def parse_facts(host: str, value: Mapping[str, Any]) -> HostFacts:
    """Read the helper's ``facts`` answer."""
    machine, lock = value["host"], value["lock"]
    return HostFacts(
        host=host,
        at=value["at"],
        systemd=_systemd(machine["systemd"], machine["system_state"]),
        python=machine["python"],
        root_problem=_root_problem(machine["root_state"]),
        open_folders=open_folders(machine["root_state"]),
        lingers=machine.get("lingers"),
        free_bytes=value["disk"]["free"],
        engines=frozenset(value["engines"]),
        gpus=_gpus(value["gpus"]),
        listening=tuple(_listening(entry) for entry in value["listeners"]),
        venvs={path: _venv(path, found) for path, found in value["venvs"].items()},
        instances={name: _instance(name, found) for name, found in value["instances"].items()},
        lock=LockFacts(**{key: lock.get(key) for key in LockFacts.__dataclass_fields__}) if lock else None,
    )


def _systemd(version: Mapping[str, Any], state: str) -> int | None:
    """The version of the systemd that runs; None if none does, whatever programs are installed."""
    found = re.match(r"systemd (\d+)", version["out"]) if version["rc"] == 0 else None
    return int(found.group(1)) if found and state not in ("offline", "unknown", "") else None


def _root_problem(state: Mapping[str, Any]) -> str:
    if state["read_only"]:
        return "it is on a read-only file system"
    return "" if state["writable"] else f"no permission to write in {state['nearest']}"


def _gpus(value: Mapping[str, Any]) -> tuple[Gpu, ...] | None:
    """GPUs and their users, from nvidia-smi's CSV; None if there is no nvidia-smi or it does not work."""
    if value["query"]["rc"] != 0:
        return None
    users: dict[str, list[GpuUser]] = {}
    apps = value["apps"]["out"] if value["apps"] and value["apps"]["rc"] == 0 else ""
    for row in _csv(apps, 4):
        about = value["owners"].get(row[1]) or {}
        user = GpuUser(int(row[1]), _int(row[3]), command_of(about) or row[2], about.get("unit") or "")
        users.setdefault(row[0], []).append(user)
    return tuple(
        Gpu(int(row[0]), row[1], row[2], _int(row[3]), _int(row[4]), tuple(users.get(row[1], ())))
        for row in _csv(value["query"]["out"], 5)
    )


def _csv(text: str, columns: int) -> list[list[str]]:
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]
    return [row for row in rows if len(row) >= columns]


def _int(text: str) -> int:
    return int(text) if text.isdigit() else 0


def _listening(entry: Mapping[str, Any]) -> Listening:
    holder = entry["processes"][0] if entry["processes"] else {}
    return Listening(entry["port"], holder.get("pid", 0), command_of(holder), holder.get("unit") or "")


def command_of(about: Mapping[str, Any]) -> str:
    """A process as a person would name it: its program, or the module that Python runs."""
    argv = about.get("argv") or []
    if "-m" in argv[1:-1]:
        return f"{argv[argv.index('-m') + 1]}"
    return argv[0].rpartition("/")[2] if argv else ""


def _venv(path: str, value: Mapping[str, Any]) -> Venv:
    return Venv(path, value["python"] is not None, value["sglang"][0] if value["sglang"] else None)


def _instance(name: str, value: Mapping[str, Any]) -> InstanceFacts:
    unit, state, armed = parse_show(value["show"]), value["state"], value["armed"] or {}
    kind = value["current_kind"]
    main = [about for about in value["processes"] if about["pid"] == unit.main_pid]
    return InstanceFacts(
        name=name,
        unit=unit,
        unit_text=value["unit_text"],
        current=value["current"],
        current_problem="is a real folder, not a link" if kind not in ("link", "absent") else "",
        masked=bool(value.get("unit_masked")),
        running=weight_version_of(main[0]["argv"]) if main else None,
        previous=state["previous"],
        proven=state["proven"],
        taken_back={release: str(mark.get("reason", "")) for release, mark in state["taken_back"].items()},
        releases={release: _on_disk(found) for release, found in value["releases"].items()},
        armed_until=armed.get("deadline"),
        processes=tuple(about["pid"] for about in value["processes"]),
    )


def weight_version_of(argv: Sequence[str]) -> str | None:
    """The release that a server's own command line names."""
    for flag, following in zip(argv, [*argv[1:], ""], strict=True):
        if flag == "--weight-version":
            return following or None
        if flag.startswith("--weight-version="):
            return flag.partition("=")[2] or None
    return None


def _on_disk(value: Mapping[str, Any]) -> OnDisk:
    return OnDisk(
        engine=(value["manifest"] or {}).get("engine"),
        settings=_settings(value["settings"]),
        gates=value["gates"],
        damage=tuple(value["damage"]),
        staged=value["staged"],
    )


def _settings(value: object) -> Settings | None:
    """The settings of a release; None if another version of this program wrote what we cannot read."""
    try:
        return Settings.model_validate_json(json.dumps(value))
    except ValidationError:
        return None
