"""GPUs by UUID, what is wrong with them and who uses them: nvidia-smi, the kernel's log and cgroups. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ddtree_ops.facts.answer import Answer, listing, mapping

COLUMNS = (
    "index", "uuid", "name", "memory.total", "memory.used", "compute_cap", "driver_version", "mig.mode.current",
    "persistence_mode", "ecc.mode.current", "ecc.errors.uncorrected.volatile.total", "temperature.gpu", "pci.bus_id",
)  # fmt: skip
UUID = re.compile(r"GPU-[0-9a-f]{8}-[0-9a-f-]{20,40}")
CONTAINER = re.compile(
    r"(?:docker|cri-containerd|crio|libpod)-([0-9a-f]{12,64})\.scope|/docker/([0-9a-f]{64})|/kubepods[^\n]*/([0-9a-f]{64})"
)
XID = re.compile(r"Xid \((?:PCI:)?([0-9A-Fa-f:.]+)\): (\d+)")
FALLEN = re.compile(r"The NVIDIA GPU ([0-9A-Fa-f:.]+)\s[^\0]*?fallen off the bus")
BUS = re.compile(r"(?:[0-9a-fA-F]{4,8}:)?[0-9a-fA-F]{2}:[0-9a-fA-F]{2}(?:\.[0-9a-fA-F])?")


SILENT = "nvidia-smi gives no answer"


@dataclass(frozen=True)
class Holder:
    """A process that has memory on a GPU."""

    pid: int
    memory_mib: int | None
    program: str
    unit: str = ""
    container: str = ""
    uid: int | None = None

    def __str__(self) -> str:
        where = f" in container {self.container[:12]}" if self.container else f" of {self.unit}" if self.unit else ""
        user = f", uid {self.uid}" if self.uid is not None else ""
        return f"{self.program or 'a process'} (pid {self.pid}{user}){where}"


@dataclass(frozen=True)
class Card:
    """One GPU. What the driver does not say is None; ``sick`` is what it says in place of a number."""

    index: int
    uuid: str
    name: str
    memory_mib: int | None
    used_mib: int | None
    capability: str | None
    driver: str
    mig: bool | None
    persistent: bool | None
    ecc: bool | None
    uncorrected: int | None
    bus: str
    sick: str = ""
    holders: tuple[Holder, ...] = ()


@dataclass(frozen=True)
class GpuFacts:
    """The GPUs of a host. ``problem`` is why they could not be listed, ``complaints`` what was said beside the list."""

    cards: tuple[Card, ...] = ()
    problem: str = ""
    complaints: tuple[str, ...] = ()
    on_bus: int = 0
    module: bool = False
    xids: tuple[tuple[str, int], ...] = ()

    @property
    def silent(self) -> bool:
        """Cut off before it said anything: slow, or hanging; that cannot be told from here."""
        return self.problem == SILENT

    def card(self, index: int) -> Card | None:
        return next((card for card in self.cards if card.index == index), None)


def parse_gpus(raw: Any, kernel_log: Any = None) -> GpuFacts:
    """The helper's ``gpus`` and ``kernel_log`` answers."""
    found = mapping(raw)
    query, apps = Answer.of(found.get("query")), Answer.of(found.get("apps"))
    holders = _holders(apps.out if apps.rc == 0 else "", mapping(found.get("owners")))
    cards: list[Card] = []
    complaints: list[str] = []
    for line in query.out.splitlines():
        card = _card(line, holders)
        if card is not None:
            cards.append(card)
        elif line.strip():
            complaints.append(line.strip())
    problem = "" if cards else _problem(query, complaints)
    log = Answer.of(kernel_log)
    return GpuFacts(
        tuple(cards),
        problem,
        tuple(complaints),
        on_bus=found["on_bus"] if isinstance(found.get("on_bus"), int) else 0,
        module=bool(found.get("module")),
        xids=_xids(log.out),
    )


def _xids(log: str) -> tuple[tuple[str, int], ...]:
    """(bus, code), each once. Some drivers say "fallen off the bus", which is Xid 79, without the number."""
    found = [(short_bus(bus), int(code)) for bus, code in XID.findall(log)]
    found += [(short_bus(bus), 79) for bus in FALLEN.findall(log)]
    return tuple(dict.fromkeys(found))


def short_bus(bus: str) -> str:
    """``00000000:C1:00.0``, ``0000:c1:00`` and ``c1:00.0`` are one place: ``c1:00``."""
    return re.sub(r"^(?:[0-9a-f]+:)?([0-9a-f]{2}:[0-9a-f]{2})(?:\.\d)?$", r"\1", bus.lower())


def _problem(query: Answer, complaints: Iterable[str]) -> str:
    if query.absent:
        return "nvidia-smi is not installed"
    if query.silent:
        return SILENT
    said = next(iter(complaints), "")
    return said or ("there is no GPU" if query.rc == 0 else query.words)


def _card(line: str, holders: Mapping[str, tuple[Holder, ...]]) -> Card | None:
    cells = [cell.strip() for cell in line.split(",")]
    if len(cells) != len(COLUMNS) or not cells[0].isdigit() or not UUID.fullmatch(cells[1]):
        return None
    cell = dict(zip(COLUMNS, cells, strict=True))
    sick = next((c.strip("[]") for c in cells if re.search(r"requires reset|is lost|Unknown Error|ERR!", c)), "")
    capability = cell["compute_cap"]
    return Card(
        index=int(cells[0]),
        uuid=cells[1],
        name=cell["name"],
        memory_mib=_number(cell["memory.total"]),
        used_mib=_number(cell["memory.used"]),
        capability=capability if re.fullmatch(r"\d+\.\d", capability) else None,
        driver=cell["driver_version"],
        mig=_on(cell["mig.mode.current"]),
        persistent=_on(cell["persistence_mode"]),
        ecc=_on(cell["ecc.mode.current"]),
        uncorrected=_number(cell["ecc.errors.uncorrected.volatile.total"]),
        bus=short_bus(cell["pci.bus_id"]) if BUS.fullmatch(cell["pci.bus_id"]) else "",
        sick=sick,
        holders=holders.get(cells[1], ()),
    )


def _holders(apps: str, owners: Mapping[str, Any]) -> dict[str, tuple[Holder, ...]]:
    """Who has memory on which GPU. A process of another PID namespace has a number that says nothing here."""
    found: dict[str, list[Holder]] = {}
    for line in apps.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) < 4 or not UUID.fullmatch(cells[0]) or not cells[1].isdigit():
            continue
        about = mapping(owners.get(cells[1]))
        argv = listing(about.get("argv"))
        uid = about.get("uid")
        holder = Holder(
            pid=int(cells[1]),
            memory_mib=_number(cells[-1]),
            program=str(argv[0]).rpartition("/")[2] if argv else cells[2].rpartition("/")[2],
            unit=str(about.get("unit") or ""),
            container=container_of(str(about.get("cgroup") or "")),
            uid=uid if isinstance(uid, int) else None,
        )
        found.setdefault(cells[0], []).append(holder)
    return {uuid: tuple(those) for uuid, those in found.items()}


def container_of(cgroup: str) -> str:
    """The id of the container that a process runs in, from /proc/PID/cgroup; empty if it runs in none."""
    found = CONTAINER.search(cgroup)
    return next((group for group in found.groups() if group), "") if found else ""


def _number(text: str) -> int | None:
    return int(text) if text.isdigit() else None


def _on(text: str) -> bool | None:
    return {"enabled": True, "disabled": False}.get(text.lower())
