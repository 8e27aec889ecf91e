"""Processes and listening sockets, read from /proc: who holds a port, what a unit still runs."""

from __future__ import annotations

import os
import re
import socket
import struct
import time
from typing import Any, Iterable

# include/linux/sched.h: a process that is ending, a thread of the kernel. Neither has words, now or later.
PF_EXITING, PF_KTHREAD = 0x4, 0x00200000
EXEC_S = 1.0
CGROUPS = "/sys/fs/cgroup"
LISTEN = "0A"
UNIT = re.compile(r"/([^/]+\.(?:service|scope))(?:/|$)")


def text(path: str) -> str:
    try:
        with open(path, "rb") as src:
            return src.read().decode("utf-8", "replace")
    except OSError:
        return ""


def pids() -> list[int]:
    return sorted(int(n) for n in os.listdir("/proc") if n.isdigit())


def unit_of(pid: int) -> str | None:
    """The innermost unit whose cgroup holds the process."""
    found = UNIT.findall(text(f"/proc/{pid}/cgroup").replace("\n", "/\n"))
    return found[-1] if found else None


def of_unit(unit: str, control_group: str = "") -> list[dict[str, Any]]:
    """Every process in the unit's cgroup, or below it. Given its path, the kernel's list is read; else all of /proc."""
    for tree in ("", "/unified", "/systemd"):
        folder = CGROUPS + tree + control_group
        if control_group and os.path.isdir(folder):
            lists = [text(os.path.join(below, "cgroup.procs")) for below, _, _ in os.walk(folder)]
            return [about(pid) for pid in sorted(int(word) for found in lists for word in found.split())]
    return [about(pid) for pid in pids() if (f"/{unit}") in text(f"/proc/{pid}/cgroup")]


def about(pid: int) -> dict[str, Any]:
    return {
        "pid": pid,
        "ppid": int(stat_field(pid, 1) or 0),
        "argv": words(pid),
        "unit": unit_of(pid),
        "uid": uid(pid),
        "started": started(pid),
    }


def words(pid: int) -> list[str]:
    """The process's command line; empty for one that has none (ended, a zombie, a thread of the kernel).

    While execve() loads a program the kernel shows no command line, since the new one is not laid out yet. So nothing
    is believed of a process that should have words only after it had ``EXEC_S`` to get them.
    """
    end = time.monotonic() + EXEC_S
    while True:
        found = text(f"/proc/{pid}/cmdline")
        if found or not has_words(pid) or time.monotonic() >= end:
            return [word for word in found.split("\0") if word]
        time.sleep(0.005)


def has_words(pid: int) -> bool:
    """Whether the process runs a program of its own, which has a command line before long."""
    state, flags = stat_field(pid, 0), stat_field(pid, 6)
    return state not in (None, "Z", "X", "x") and not int(flags or 0) & (PF_EXITING | PF_KTHREAD)


def uid(pid: int) -> int | None:
    try:
        return os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return None


def stat_field(pid: int, index: int) -> str | None:
    """Field ``index`` of /proc/PID/stat, counted after the name (which may hold anything, also spaces)."""
    rest = text(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return rest[index] if len(rest) > index else None


def started(pid: int) -> float | None:
    """When the process began, in seconds since the epoch."""
    ticks = stat_field(pid, 19)
    boot = re.search(r"^btime (\d+)", text("/proc/stat"), re.M)
    return int(boot.group(1)) + int(ticks) / os.sysconf("SC_CLK_TCK") if ticks and boot else None


def listeners(ports: set[int], likely: Iterable[int] = ()) -> list[dict[str, Any]]:
    """Sockets that listen on any of ``ports``, with the processes that hold them (as far as we may look).

    If the ``likely`` processes hold them all, no others are looked at: a large host has many open files.
    """
    found = []
    for table, family in (("/proc/net/tcp", socket.AF_INET), ("/proc/net/tcp6", socket.AF_INET6)):
        for line in text(table).splitlines()[1:]:
            parts = line.split()
            address, _, port = parts[1].rpartition(":")
            if parts[3] == LISTEN and int(port, 16) in ports:
                found.append((ip(address, family), int(port, 16), parts[9]))
    inodes = {inode for _, _, inode in found}
    owners = holders(inodes, likely) if found else {}
    if set(owners) != inodes:
        owners = holders(inodes, pids())
    return [
        {"address": address, "port": number, "processes": [about(pid) for pid in owners.get(inode, [])]}
        for address, number, inode in found
    ]


def ip(hexed: str, family: socket.AddressFamily) -> str:
    """The kernel prints addresses as 32-bit words in its own byte order."""
    words = [int(hexed[i : i + 8], 16) for i in range(0, len(hexed), 8)]
    return socket.inet_ntop(family, b"".join(struct.pack("=I", w) for w in words))


def holders(inodes: set[str], among: Iterable[int]) -> dict[str, list[int]]:
    wanted = {f"socket:[{inode}]": inode for inode in inodes}
    found: dict[str, list[int]] = {}
    for pid in among:
        folder = f"/proc/{pid}/fd"
        try:
            links = os.listdir(folder)
        except OSError:
            continue
        for name in links:
            try:
                inode = wanted.get(os.readlink(os.path.join(folder, name)))
            except OSError:
                continue
            if inode is not None and pid not in found.setdefault(inode, []):
                found[inode].append(pid)
    return found
