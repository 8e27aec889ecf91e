"""A host as the doctor sees it: the helper's ``doctor`` answer read into frozen facts. Pure, and never an error."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ddtree_ops.facts.answer import Answer, listing, mapping
from ddtree_ops.facts.containers import GpuContainers, parse_containers
from ddtree_ops.facts.cuda import parse_nvcc
from ddtree_ops.facts.folders import CacheFolder, ModelFolder, parse_model_folder
from ddtree_ops.facts.gpu import GpuFacts, parse_gpus
from ddtree_ops.facts.memory import Reported, parse_memory_log
from ddtree_ops.facts.ports import parse_port_range, parse_reserved
from ddtree_ops.facts.python import VenvFacts, parse_venv
from ddtree_ops.facts.root import OpenFolder, open_folders
from ddtree_ops.facts.systemd import parse_synchronized, parse_systemd_version
from ddtree_ops.proofs import Record


@dataclass(frozen=True)
class Machine:
    """One host at one instant. What was not asked, or could not be, is None or empty."""

    at: float = 0.0
    systemd: int | None = None
    systemd_runs: bool = False
    unwritable: str = ""
    open_folders: tuple[OpenFolder, ...] = ()
    free_bytes: int | None = None
    free_inodes: int | None = None
    synchronized: bool | None = None
    gpus: GpuFacts = field(default_factory=GpuFacts)
    nvcc: str | None = None
    tools: Mapping[str, str | None] = field(default_factory=dict)
    venvs: Mapping[str, VenvFacts] = field(default_factory=dict)
    models: Mapping[str, ModelFolder] = field(default_factory=dict)
    caches: Mapping[str, CacheFolder] = field(default_factory=dict)
    listening: Mapping[int, tuple[str, str]] = field(default_factory=dict)
    port_range: tuple[int, int] | None = None
    reserved: frozenset[int] = frozenset()
    containers: GpuContainers = field(default_factory=GpuContainers)
    users: Mapping[str, bool] = field(default_factory=dict)
    memory_logs: Mapping[str, Reported] = field(default_factory=dict)
    proofs: tuple[Record, ...] = ()


def parse_machine(raw: Any) -> Machine:
    """Read the helper's answer; a part that is missing or broken leaves its facts unknown."""
    value = mapping(raw)
    host, disk = mapping(value.get("host")), mapping(value.get("disk"))
    at = value.get("at")
    return Machine(
        at=float(at) if isinstance(at, int | float) else 0.0,
        systemd=parse_systemd_version(Answer.of(host.get("systemd"))),
        systemd_runs=bool(host.get("systemd_runs")),
        unwritable=_unwritable(mapping(host.get("root_state"))),
        open_folders=open_folders(mapping(host.get("root_state"))),
        free_bytes=_int(disk.get("free")),
        free_inodes=_int(disk.get("inodes_free")),
        synchronized=parse_synchronized(Answer.of(value.get("clock"))),
        gpus=parse_gpus(value.get("gpus"), value.get("kernel_log")),
        nvcc=parse_nvcc(Answer.of(value.get("nvcc")).out),
        tools={str(k): v if isinstance(v, str) else None for k, v in mapping(value.get("tools")).items()},
        venvs={path: parse_venv(found) for path, found in _by_path(value.get("venvs"))},
        models={path: parse_model_folder(found) for path, found in _by_path(value.get("models"))},
        caches={path: _cache(found) for path, found in _by_path(value.get("caches"))},
        listening=_listening(value.get("listeners")),
        port_range=parse_port_range(str(value.get("port_range") or "")),
        reserved=parse_reserved(str(value.get("reserved_ports") or "")),
        containers=parse_containers(value.get("containers")),
        users={str(user): bool(there) for user, there in mapping(value.get("users")).items()},
        memory_logs={unit: parse_memory_log(Answer.of(log).out) for unit, log in _by_path(value.get("memory_logs"))},
        proofs=tuple((str(path), record) for path, record in mapping(value.get("proofs")).items()),
    )


def _by_path(raw: Any) -> list[tuple[str, Mapping[str, Any]]]:
    """(path, answer) of the paths that there is an answer about."""
    return [(str(path), found) for path, found in mapping(raw).items() if isinstance(found, Mapping)]


def _unwritable(state: Mapping[str, Any]) -> str:
    if state.get("read_only"):
        return "it is on a read-only file system"
    return "" if state.get("writable", True) else f"no permission to write in {state.get('nearest')}"


def _cache(raw: Any) -> CacheFolder:
    found = mapping(raw)
    return CacheFolder(str(found.get("mount") or ""), str(found.get("type") or ""))


def _listening(raw: Any) -> dict[int, tuple[str, str]]:
    """port -> (unit, who): the unit that the listener belongs to, and how a person would name it."""
    found: dict[int, tuple[str, str]] = {}
    for entry in map(mapping, listing(raw)):
        port, processes = entry.get("port"), listing(entry.get("processes"))
        holder = mapping(processes[0]) if processes else {}
        argv = listing(holder.get("argv")) or ["a process"]
        if isinstance(port, int):
            pid = f" (pid {holder['pid']})" if "pid" in holder else ""
            found[port] = (str(holder.get("unit") or ""), f"{str(argv[0]).rpartition('/')[2]}{pid}")
    return found


def _int(value: Any) -> int | None:
    return value if isinstance(value, int) else None
