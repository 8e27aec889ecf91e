"""Every finding a doctor can make, why it matters, the one command that repairs it. docs/doctor.md is made of this."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from ddtree_ops.facts.root import REPAIR, WHY


class Level(StrEnum):
    """Red refuses a deploy, yellow warns."""

    RED = "red"
    YELLOW = "yellow"


@dataclass(frozen=True)
class Check:
    """One kind of finding. ``repair`` is a command; words in braces are filled in with what was found."""

    id: str
    level: Level
    title: str
    why: str
    repair: str


RED, YELLOW = Level.RED, Level.YELLOW

_TABLE = (
    # -- the system
    Check("systemd-absent", RED, "systemd does not run", "a server is a systemd unit; without it nothing starts, "
          "watches or stops one", "ps -p 1 -o comm="),
    Check("systemd-old", RED, "systemd is older than 240", "units need Type=exec, which tells a program that cannot "
          "be run from one that runs", "apt-get install --only-upgrade systemd"),
    Check("user-absent", RED, "the service's user does not exist", "systemd cannot start the unit as nobody it knows",
          "ddtree-ops bootstrap {host} --create-user"),
    Check("root-unwritable", RED, "the layout's folder cannot be written", "engines and releases are staged there",
          "ddtree-ops bootstrap {host}"),
    Check("root-open", RED, "others may write in the layout's folder, or above it", WHY, REPAIR),
    Check("disk-low", RED, "too little space for two releases", "the release that runs must stay beside the new one, "
          "or there is no way back", "ddtree-ops prune {host}"),
    Check("inodes-low", YELLOW, "few inodes are left", "an engine is about 5000 names, folders among them",
          "ddtree-ops prune {host}"),
    Check("clock-skew", YELLOW, "the clock differs from this machine's", "deadlines and histories of several hosts "
          "cannot be compared", "timedatectl set-ntp true"),
    Check("clock-free", YELLOW, "nothing keeps the clock", "it will drift apart from the other hosts'",
          "timedatectl set-ntp true"),
    # -- the venv
    Check("venv-absent", RED, "the virtual environment is missing", "SGLang and its libraries come from it",
          "ddtree-ops bootstrap {host}"),
    Check("sglang-absent", RED, "SGLang is not installed", "the engine is an overlay over the venv's SGLang",
          "ddtree-ops bootstrap {host}"),
    Check("sglang-other", RED, "another SGLang is installed", "the patches are made for one version, file by file",
          "{venv}/bin/python -m pip install --no-deps sglang=={wanted}"),
    Check("torch-absent", RED, "torch is not installed", "the server cannot start without it",
          "ddtree-ops bootstrap {host}"),
    Check("torch-cpu", RED, "torch was built without CUDA", "it sees no GPU and the server stops at start",
          "{venv}/bin/python -m pip install --force-reinstall torch"),
    Check("driver-old", RED, "the driver is older than torch's CUDA needs", "torch stops with 'driver too old' after "
          "the server was taken down", "apt-get install --only-upgrade nvidia-driver"),
    # -- kernels that are compiled on the host
    Check("nvcc-absent", YELLOW, "nvcc is not on the units' PATH", "kernels that are compiled at first use "
          "(FlashInfer's, SGLang's own) fail minutes into the start", "apt-get install cuda-nvcc-{cuda}"),
    Check("nvcc-other", YELLOW, "nvcc is of another CUDA than torch", "what it compiles may not load beside torch's "
          "libraries", "apt-get install cuda-nvcc-{cuda}"),
    Check("ninja-absent", YELLOW, "ninja is not on the units' PATH", "kernels that are compiled at first use are built "
          "with it", "{venv}/bin/python -m pip install ninja"),
    Check("compiler-absent", YELLOW, "there is no C++ compiler on the units' PATH", "nvcc and torch.compile call it",
          "apt-get install g++"),
    Check("cache-volatile", YELLOW, "the cache lies on a file system that does not last", "after a reboot every "
          "kernel is compiled again, which takes minutes", "findmnt -T {path}"),
    # -- GPUs
    Check("gpu-driver", RED, "the GPUs cannot be listed", "there is nothing for a server to run on", "nvidia-smi"),
    Check("gpu-silent", YELLOW, "nvidia-smi gives no answer", "a GPU or the driver hangs, or wakes up slowly "
          "for want of persistence mode", "nvidia-smi -pm 1"),
    Check("gpu-absent", RED, "an instance wants a GPU that is not there", "the server would find no device",
          "nvidia-smi -L"),
    Check("gpu-lost", YELLOW, "fewer GPUs answer than are on the bus", "one fell off; the numbers of the others may "
          "have moved", "dmesg | grep -i xid"),
    Check("gpu-sick", RED, "a GPU of an instance does not work", "the server hangs or stops when it touches it",
          "nvidia-smi -i {gpu} -pm 0 && nvidia-smi -i {gpu} -r"),
    Check("gpu-busy", RED, "a GPU is used by somebody else", "two servers on one GPU take each other's memory",
          "ps -fp {pid}"),
    Check("gpu-shared", YELLOW, "somebody else has a little memory on a GPU", "figures measured beside it waver",
          "ps -fp {pid}"),
    Check("gpu-mig", RED, "a GPU is split (MIG)", "its number names no device a server could use whole",
          "nvidia-smi -i {gpu} -mig 0"),
    Check("gpu-ecc", YELLOW, "a GPU counted uncorrected memory errors", "results may be wrong, and the next error may "
          "stop the server", "nvidia-smi -q -d ECC,ROW_REMAPPER -i {gpu}"),
    Check("gpu-xid", YELLOW, "the driver logged errors since the boot", "a GPU that reports Xids often fails again",
          "journalctl -k -b -g Xid"),
    Check("gpu-persistence", YELLOW, "persistence mode is off", "the driver unloads the GPU between processes; every "
          "start takes seconds more, and settings are lost", "nvidia-smi -i {gpu} -pm 1"),
    Check("gpu-mixed", YELLOW, "an instance spans GPUs of different kinds", "the slowest sets the pace, the smallest "
          "the memory", "nvidia-smi -L"),
    Check("unproven", YELLOW, "tree mode is not proven on this combination", "the parity suite has not passed for it; "
          "the engine asks for a self-test on this GPU, or for --allow-hybrid-unsafe", "ddtree-ops selftest {target}"),
    Check("backend", RED, "flags that cannot work together", "SGLang would refuse them, some only after minutes of "
          "loading", "ddtree-ops render {target}"),
    Check("tree-size", RED, "a tree that can never be as large as its budget", "its empty rows would be verified in "
          "every round; raise --topk-cap, or lower the budget", "ddtree-ops deploy {target} --budget {budget}"),
    # -- ports
    Check("port-taken", RED, "the port is somebody else's", "the server could not listen on it, or another would "
          "answer in its place", "ss -ltnp sport = :{port}"),
    Check("port-ephemeral", YELLOW, "the port may be given to an outgoing connection", "then the server cannot listen "
          "on it after a restart", "sysctl -w net.ipv4.ip_local_reserved_ports={port}"),
    # -- models
    Check("model-absent", RED, "a model folder is missing", "the server loads from it", "ls -ld {path}"),
    Check("model-unreadable", RED, "the service's user cannot read a model", "the server stops at start",
          "namei -l {path}/config.json"),
    Check("model-incomplete", RED, "files of a model are missing or cut short", "loading stops when it comes to them",
          "ls {path}"),
    Check("model-config", RED, "a model's configuration cannot be used", "shapes, memory and the pair are judged by "
          "it", "cat {path}/config.json"),
    Check("pair", RED, "target and drafter do not belong together", "the server stops after loading, or drafts "
          "nonsense", "ddtree-ops doctor {host}"),
    Check("pair-odd", YELLOW, "target and drafter differ in something", "accept length or speed may suffer",
          "ddtree-ops doctor {host}"),
    Check("memory-short", RED, "the model does not fit into the GPU", "the server stops after loading the weights",
          "ddtree-ops deploy {target} {option}"),
    Check("memory-tight", YELLOW, "fewer requests fit than were asked for", "SGLang starts and "
          "serves fewer at a time, though the settings promise otherwise", "ddtree-ops deploy {target} {option}"),
    # -- neighbours
    Check("gpu-containers", YELLOW, "GPU containers depend on systemd's device rules", "a daemon-reload, which a "
          "deploy that changes the unit needs, can take their GPUs away", "docker ps"),
)  # fmt: skip

CHECKS = {check.id: check for check in _TABLE}


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong: what kind, what was seen, on which host or instance, and the command that repairs it."""

    check: Check
    target: str
    seen: str
    repair: str

    @property
    def refuses(self) -> bool:
        return self.check.level is Level.RED


def finding(id: str, target: str, seen: str, **known: object) -> Finding:
    """A finding of the catalogue; ``known`` fills in the repair."""
    check = CHECKS[id]
    words = {"host": target.partition(":")[0], "target": target, **known}
    return Finding(check, target, seen, check.repair.format_map(words))
