"""A lab host as the agent reaches it, and small releases whose server is ``sleep``: for tests below ``deploy``."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from typing import Any

import paramiko

from ddtree_ops.agent import Agent
from ddtree_ops.lab.machine import Machine
from ddtree_ops.model import Address, HostSpec
from ddtree_ops.remote.ssh import SshRemote

UNIT = "sglang-ddtree-qwen.service"
NOTHING = paramiko.SSHConfig.from_text("Host *\n  IdentitiesOnly yes\n  UserKnownHostsFile none\n")


def spec(machine: Machine, **change: Any) -> HostSpec:
    lab = machine.names.lab
    given = {
        "name": machine.name,
        "address": Address(host=machine.address, user=change.pop("user", "root")),
        "identity": (str(lab.identity),),
        "known_hosts": str(lab.known_hosts),
    }
    return HostSpec(**{**given, **change})


def remote(machine: Machine, *, silence_s: float = 10.0, connect_s: float = 10.0, **change: Any) -> SshRemote:
    """Nothing of the tester's own SSH configuration; short clocks, so that a cut link is a short test."""
    host = spec(machine, **change)
    return SshRemote(host, config=NOTHING, connect_s=connect_s, silence_s=silence_s, probe_every_s=1.0)


def agent(machine: Machine, **change: Any) -> Agent:
    return Agent(remote(machine, **change), spec(machine, **change))


def do(caller: Agent, op: str, payload: bytes | None = None, **args: Any) -> dict[str, Any]:
    return caller.call(op, args, payload, deadline_s=120)


def release(seconds: int) -> tuple[str, bytes]:
    """A release whose server sleeps for ``seconds``: digest and tar."""
    unit = f"[Unit]\nDescription=sleeps\n[Service]\nType=exec\nExecStart=/bin/sleep {seconds}\n"
    unit += "[Install]\nWantedBy=multi-user.target\n"
    parts = {"unit": unit.encode(), "settings.json": b"{}\n"}
    manifest = {"files": {n: hashlib.sha256(d).hexdigest() for n, d in parts.items()}, "engine": None}
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for name, content in {"manifest.json": json.dumps(manifest).encode(), **parts}.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return hashlib.sha256(packed.getvalue()).hexdigest(), packed.getvalue()


def deploy(caller: Agent, seconds: int) -> str:
    """Stage, switch, write, reload, start; the caller holds the lock."""
    digest, tar = release(seconds)
    do(caller, "stage_release", tar, instance="qwen", release=digest)
    do(caller, "switch", instance="qwen", release=digest)
    do(caller, "write_unit", instance="qwen")
    do(caller, "systemctl", verb="daemon-reload")
    do(caller, "systemctl", verb="restart", instance="qwen")
    return digest


def current(machine: Machine) -> str:
    """What ``current`` points at, seen without the network; empty if there is none."""
    shown = machine.inside("readlink", "/opt/ddtree/instances/qwen/current", ok=(0, 1)).stdout.strip()
    return shown.rpartition("/")[2]


def runs(machine: Machine) -> str:
    """The command line of the unit's main process."""
    pid = machine.inside("systemctl", "show", "-P", "MainPID", UNIT).stdout.strip()
    if pid in ("", "0"):
        return ""
    return machine.inside("cat", f"/proc/{pid}/cmdline", ok=(0, 1)).stdout.replace("\0", " ").strip()
