"""From facts to findings. Pure: a host, its instances and what is known of it in, findings out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ddtree_ops.bundle.wheel import SGLANG_VERSION
from ddtree_ops.doctor.catalogue import Finding, Level, finding
from ddtree_ops.doctor.machine import Machine
from ddtree_ops.doctor.models import check_models
from ddtree_ops.facts.cuda import driver_too_old, major
from ddtree_ops.facts.gpu import Card
from ddtree_ops.facts.ports import may_be_taken
from ddtree_ops.facts.python import VenvFacts
from ddtree_ops.model import HostSpec, Settings, unit_name

OLDEST_SYSTEMD = 240
TWO_RELEASES = 512 << 20  # two engines, copied where links cannot be made
FEW_INODES = 20_000
SKEW_S = 5.0
SHARED_MIB = 512
SGLANG = "sglang.launch_server"


def examine(host: HostSpec, settings: Sequence[Settings], machine: Machine, now: float | None = None) -> list[Finding]:
    """Everything that is wrong with a host for these instances. ``now`` is this machine's clock at the same instant.

    What only SGLang needs (torch, GPUs, models that load) is not asked of an instance that runs another module.
    """
    real = [each for each in settings if each.launch_module == SGLANG]
    found = [*_system(host, machine, now), *(f for each in settings for f in _ports(host, each, machine))]
    for path in dict.fromkeys(each.venv for each in settings):
        found += _venv(host, path, machine, torch=any(each.venv == path for each in real))
    if real:
        found += [*_building(host, real, machine), *_cards(host, real, machine), *_containers(host, machine)]
    for user in dict.fromkeys(each.user for each in settings if each.user):
        if machine.users.get(user) is False:
            found.append(finding("user-absent", host.name, f"there is no user {user}"))
    for each in real:
        found += [*_gpus(host, each, machine), *check_models(host, each, machine)]
    return sorted(found, key=lambda f: f.check.level is not Level.RED)


def _system(host: HostSpec, machine: Machine, now: float | None) -> Iterator[Finding]:
    if machine.systemd is None or not machine.systemd_runs:
        yield finding("systemd-absent", host.name, "systemd is not the init of this host")
    elif machine.systemd < OLDEST_SYSTEMD:
        yield finding("systemd-old", host.name, f"systemd {machine.systemd}")
    if machine.unwritable:
        yield finding("root-unwritable", host.name, f"{host.root}: {machine.unwritable}")
    for each in machine.open_folders:
        yield finding("root-open", host.name, str(each), **each.words)
    if machine.free_bytes is not None and machine.free_bytes < TWO_RELEASES:
        yield finding("disk-low", host.name, f"{machine.free_bytes >> 20} MiB free under {host.root}")
    # a file system without a fixed table of inodes reports none at all
    if machine.free_inodes and machine.free_inodes < FEW_INODES:
        yield finding("inodes-low", host.name, f"{machine.free_inodes} inodes free under {host.root}")
    if now is not None and machine.at and abs(machine.at - now) > SKEW_S:
        yield finding("clock-skew", host.name, f"its clock is {machine.at - now:+.0f} s from this machine's")
    elif machine.synchronized is False:
        yield finding("clock-free", host.name, "timedatectl: NTPSynchronized=no")


def _venv(host: HostSpec, path: str, machine: Machine, *, torch: bool) -> Iterator[Finding]:
    venv = machine.venvs.get(path)
    if venv is None:
        return
    if not venv.runs:
        yield finding("venv-absent", host.name, f"{path} has no bin/python that runs")
        return
    if venv.sglang is None:
        yield finding("sglang-absent", host.name, f"no sglang in {path}")
    elif venv.sglang != SGLANG_VERSION:
        seen = f"SGLang {venv.sglang} in {path}, the engine is made for {SGLANG_VERSION}"
        yield finding("sglang-other", host.name, seen, venv=path, wanted=SGLANG_VERSION)
    if not torch:
        return
    if venv.torch is None:
        yield finding("torch-absent", host.name, f"no torch in {path}")
    elif venv.cuda is None:
        yield finding("torch-cpu", host.name, f"torch {venv.torch} in {path} names no CUDA", venv=path)
    else:
        for driver in sorted({card.driver for card in machine.gpus.cards}):
            need = driver_too_old(driver, venv.cuda)
            if need:
                seen = f"driver {driver}; torch {venv.torch} is built for CUDA {venv.cuda}, which needs {need} or newer"
                yield finding("driver-old", host.name, seen)


def _building(host: HostSpec, settings: Sequence[Settings], machine: Machine) -> Iterator[Finding]:
    """What is needed where kernels are compiled on the host; nothing to say about a host without GPUs."""
    if not machine.gpus.cards:
        return
    venvs = [(path, machine.venvs.get(path, VenvFacts())) for path in dict.fromkeys(s.venv for s in settings)]
    cuda = next((venv.cuda for _, venv in venvs if venv.cuda), None)
    if machine.tools.get("nvcc") is None:
        yield finding("nvcc-absent", host.name, "no nvcc in /usr/local/cuda/bin or beside the system's programs",
                      cuda=(cuda or "12.8").replace(".", "-"))  # fmt: skip
    elif machine.nvcc and cuda and major(machine.nvcc) != major(cuda):
        seen = f"nvcc is of CUDA {machine.nvcc}, torch of {cuda}"
        yield finding("nvcc-other", host.name, seen, cuda=cuda.replace(".", "-"))
    for path, venv in venvs:
        if venv.runs and not venv.ninja and machine.tools.get("ninja") is None:
            yield finding("ninja-absent", host.name, f"no ninja in {path}/bin or on the system's PATH", venv=path)
    if not any(machine.tools.get(name) for name in ("g++", "c++")):
        yield finding("compiler-absent", host.name, "neither g++ nor c++")
    for path, cache in machine.caches.items():
        if not cache.lasts:
            yield finding("cache-volatile", host.name, f"{path} is on {cache.type} ({cache.mount})", path=path)


def _cards(host: HostSpec, settings: Sequence[Settings], machine: Machine) -> Iterator[Finding]:
    gpus = machine.gpus
    if gpus.problem:
        if gpus.on_bus or any(each.gpus for each in settings):
            yield finding("gpu-silent" if gpus.silent else "gpu-driver", host.name, gpus.problem)
        return
    if gpus.on_bus > len(gpus.cards) or gpus.complaints:
        said = f": {gpus.complaints[0]}" if gpus.complaints else ""
        seen = f"{len(gpus.cards)} of {max(gpus.on_bus, len(gpus.cards) + bool(gpus.complaints))} answer{said}"
        yield finding("gpu-lost", host.name, seen)
    names = {card.bus: f"GPU {card.index}" for card in gpus.cards}
    for bus, code in gpus.xids:
        yield finding("gpu-xid", host.name, f"Xid {code} of {names.get(bus, 'the GPU')} at {bus}")
    for card in gpus.cards:
        if card.uncorrected:
            seen = f"GPU {card.index} ({card.name}): {card.uncorrected} since the driver was loaded"
            yield finding("gpu-ecc", host.name, seen, gpu=card.index)
    off = [card.index for card in gpus.cards if card.persistent is False]
    if off:
        yield finding("gpu-persistence", host.name, f"off on GPU {_list(off)}", gpu=_list(off, ","))


def _gpus(host: HostSpec, settings: Settings, machine: Machine) -> Iterator[Finding]:
    target = f"{host.name}:{settings.instance}"
    if not machine.gpus.cards:
        return
    cards = [(index, machine.gpus.card(index)) for index in settings.gpus]
    there = [card for _, card in cards if card is not None]
    absent = [index for index, card in cards if card is None]
    if absent:
        yield finding("gpu-absent", target, f"no GPU {_list(absent)}; {len(machine.gpus.cards)} answer")
    for card in there:
        yield from _card(target, settings, card)
    if len({card.name for card in there}) > 1:
        seen = ", ".join(f"{card.index}: {card.name}" for card in there)
        yield finding("gpu-mixed", target, seen)


def _card(target: str, settings: Settings, card: Card) -> Iterator[Finding]:
    if card.sick:
        yield finding("gpu-sick", target, f"GPU {card.index} ({card.uuid}): {card.sick}", gpu=card.index)
    if card.mig:
        yield finding("gpu-mig", target, f"GPU {card.index} ({card.name}) is in MIG mode", gpu=card.index)
    for holder in card.holders:
        if holder.unit != unit_name(settings.instance) or holder.container:
            memory = f", {holder.memory_mib} MiB" if holder.memory_mib is not None else ""
            little = holder.memory_mib is not None and holder.memory_mib < SHARED_MIB
            seen = f"GPU {card.index}: {holder}{memory}"
            yield finding("gpu-shared" if little else "gpu-busy", target, seen, pid=holder.pid)


def _ports(host: HostSpec, settings: Settings, machine: Machine) -> Iterator[Finding]:
    target, port = f"{host.name}:{settings.instance}", settings.port
    unit, who = machine.listening.get(port, (unit_name(settings.instance), ""))
    if unit != unit_name(settings.instance):
        yield finding("port-taken", target, f"{who}{f' of {unit}' if unit else ''} listens on {port}", port=port)
    if may_be_taken(port, machine.port_range, machine.reserved):
        first, last = machine.port_range or (0, 0)
        seen = f"{port} is inside {first}-{last}, the range for outgoing connections"
        yield finding("port-ephemeral", target, seen, port=port)


def _containers(host: HostSpec, machine: Machine) -> list[Finding]:
    """Docker's own list, and whatever uses a GPU from a scope of systemd (containerd, CRI-O, Podman)."""
    named = machine.containers.names if machine.containers.at_risk else ()
    holders = [holder for card in machine.gpus.cards for holder in card.holders]
    scopes = {h.container[:12] for h in holders if h.container and h.unit.endswith(".scope")}
    if not named and not scopes:
        return []
    return [finding("gpu-containers", host.name, f"{', '.join(named or sorted(scopes))} in scopes of systemd")]


def _list(numbers: Sequence[int], between: str = ", ") -> str:
    return between.join(map(str, numbers))
