"""The processes of a server besides the one that answers: a scheduler that holds the GPU's memory, and strays."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time

CLAIMS = "/run/ddtree-lab/gpu"
MIB = 81920
STRAY_MIB = 40960


def visible_gpus() -> list[str]:
    """UUIDs of the GPUs this process may use, in CUDA's order; empty without an nvidia-smi."""
    try:
        said = subprocess.run(
            ["nvidia-smi", "--query-gpu=index,uuid", "--format=csv,noheader"],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=10, check=True,
        ).stdout.decode()  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return []
    found = dict(line.split(", ", 1) for line in said.strip().splitlines())
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        return list(found.values())
    names = [name.strip() for name in wanted.split(",") if name.strip()]
    return [found.get(name, name) for name in names if name in found or name in found.values()]


def claim(pid: int, uuid: str, mib: int) -> None:
    """Let nvidia-smi show that a process holds memory of a GPU; ends with the process."""
    if not os.path.isdir(CLAIMS):  # not a lab host
        return
    partial = os.path.join(CLAIMS, f".{pid}")
    with open(partial, "w") as handle:
        json.dump({"uuid": uuid, "mib": mib}, handle)
    os.replace(partial, os.path.join(CLAIMS, f"{pid}.json"))


def fork_scheduler(gpus: list[str]) -> int:
    """A child per server, as SGLang has: it holds the memory, and ends when its parent does. Returns its pid."""
    reading, writing = os.pipe()
    child = os.fork()
    if child:
        os.close(reading)
        os.set_inheritable(writing, False)
        return child
    try:
        os.close(writing)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _name("sglang::schedul")
        for uuid in gpus[:1]:
            claim(os.getpid(), uuid, MIB)
        os.read(reading, 1)  # returns at the parent's end, however it ended
    finally:
        os._exit(0)


def leave_stray(gpus: list[str]) -> None:
    """The fault STRAY_CHILD: a grandchild in a session of its own that ignores SIGTERM and holds memory."""
    if os.fork():
        return
    os.setsid()
    if os.fork():
        os._exit(0)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _name("sglang::stray")
    for uuid in gpus[:1]:
        claim(os.getpid(), uuid, STRAY_MIB)
    while True:
        time.sleep(3600)


def _name(name: str) -> None:
    try:
        with open("/proc/self/comm", "w") as comm:
            comm.write(name)
    except OSError:
        pass  # a name is for people; a system without /proc has none
