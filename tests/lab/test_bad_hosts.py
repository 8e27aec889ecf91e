"""Hosts that a deploy cannot work on: what the person reads, the exit code, and that nothing was touched.

Each case breaks one thing, deploys, reads the message, mends the thing; the last test deploys to the same host.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from fleet import Cli, Disk, outcomes

from ddtree_ops.errors import ExitCode
from ddtree_ops.lab.machine import Machine

SITE = "/opt/sglang/venv/lib/python3.11/site-packages"
EDITED = f"{SITE}/sglang/srt/speculative/dflash_info.py"
NOT_BOOTED = "#!/bin/sh\\necho System has not been booted with systemd as init system. Failed. >&2\\nexit 1\\n"


@dataclass(frozen=True)
class Case:
    """``inventory`` replaces text of the inventory; ``broken`` and ``mended`` are lines of shell in the host."""

    code: ExitCode
    found: str
    next: str = ""
    inventory: tuple[str, str] | None = None
    broken: str = "true"
    mended: str = "true"


CASES = {
    "no ssh server": Case(
        ExitCode.UNREACHABLE, "refuses connections", "systemctl start ssh",
        broken="systemctl stop ssh.service", mended="systemctl start ssh.service",
    ),
    "unknown host key": Case(
        ExitCode.UNREACHABLE, "is not known", "ddtree-ops trust lab1", inventory=("known_hosts = ", "#known_hosts = "),
    ),
    "wrong host key": Case(
        ExitCode.UNREACHABLE, "but {wrong}, line 1 has ssh-ed25519", "ddtree-ops trust lab1 --replace",
        inventory=("{known}", "{wrong}"),
    ),
    "wrong user": Case(
        ExitCode.UNREACHABLE, "does not let nobody-here in", "ssh -v", inventory=("root@", "nobody-here@"),
    ),
    "a key that the host does not know": Case(
        ExitCode.UNREACHABLE, "id_other (refused)", "ssh -v", inventory=("{identity}", "{other}"),
    ),
    "no sudo": Case(ExitCode.REFUSED, "sudo", "NOPASSWD", inventory=("root@", "visitor@")),
    "no python3": Case(
        ExitCode.REFUSED, "python3 is not on the host", "apt-get install python3-minimal",
        broken="mv /usr/bin/python3 /usr/bin/away", mended="mv /usr/bin/away /usr/bin/python3",
    ),
    "no systemd": Case(
        ExitCode.REFUSED, "systemd does not run here", "ddtree-ops doctor lab1",
        broken=f"mv /usr/bin/systemctl /usr/bin/away && printf '{NOT_BOOTED}' >/usr/bin/systemctl"
               " && chmod 755 /usr/bin/systemctl",
        mended="mv /usr/bin/away /usr/bin/systemctl",
    ),
    "no venv": Case(
        ExitCode.REFUSED, "there is no virtual environment at /opt/sglang/venv", "ddtree-ops bootstrap lab1",
        broken="mv /opt/sglang/venv /opt/sglang/away", mended="mv /opt/sglang/away /opt/sglang/venv",
    ),
    "another SGLang": Case(
        ExitCode.REFUSED, "has SGLang 0.5.23; the engine is made for 0.5.17", "",
        broken=f"mv {SITE}/sglang-0.5.17.dist-info {SITE}/sglang-0.5.23.dist-info",
        mended=f"mv {SITE}/sglang-0.5.23.dist-info {SITE}/sglang-0.5.17.dist-info",
    ),
    "an edited SGLang": Case(
        ExitCode.REFUSED, "sglang/srt/speculative/dflash_info.py", "pip install --force-reinstall",
        broken=f"cp {EDITED} /root/kept && echo '#' >>{EDITED}",
        mended=f"mv /root/kept {EDITED}",
    ),
    "a read-only root": Case(
        ExitCode.REFUSED, "read-only file system", "",
        broken="mkdir -p /opt/ddtree && mount --bind /opt/ddtree /opt/ddtree && mount -o remount,ro,bind /opt/ddtree",
        mended="umount /opt/ddtree",
    ),
    "a root that others may write in": Case(
        ExitCode.REFUSED, "/opt/ddtree may be written by its owner visitor and every user",
        "on lab1: chown -h root /opt/ddtree && chmod go-w /opt/ddtree",
        broken="mkdir -p /opt/ddtree && chown visitor /opt/ddtree && chmod 757 /opt/ddtree",
        mended="chown -h root /opt/ddtree && chmod go-w /opt/ddtree",
    ),
    "current is a real folder": Case(
        ExitCode.REFUSED, "is a real folder", "",
        broken="mkdir -p /opt/ddtree/instances/main/current", mended="rm -r /opt/ddtree/instances/main",
    ),
    "a port that is taken": Case(
        ExitCode.REFUSED, "port 30000 is taken by", "",
        broken="systemd-run -q --unit=squatter python3 -m http.server 30000 --bind 127.0.0.1"
               " && while ! ss -ltn | grep -q :30000; do sleep 0.1; done",
        mended="systemctl stop squatter",
    ),
    "a masked unit": Case(
        ExitCode.REFUSED, "masked", "systemctl unmask",
        broken="systemctl mask sglang-ddtree-main.service", mended="systemctl unmask sglang-ddtree-main.service",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def one(fleet: Callable[[int], list[Machine]]) -> Machine:
    """One host for all cases; its helper is there already, as it is after the first visit."""
    return fleet(1)[0]


@contextmanager
def broken(host: Machine, case: Case) -> Iterator[None]:
    host.inside("sh", "-c", case.broken)
    try:
        yield
    finally:
        host.inside("sh", "-c", case.mended)


def inventory_of(cli: Any, case: Case, names: dict[str, str], folder: Path) -> Any:
    if case.inventory is None:
        return cli
    before, after = (text.format(**names) for text in case.inventory)
    text = cli.inventory.read_text()
    assert before in text
    path = folder / "fleet.toml"
    path.write_text(text.replace(before, after))
    return replace(cli, inventory=path)


@pytest.mark.parametrize("name", CASES)
def test_a_host_that_cannot_take_it_is_refused_and_nothing_is_touched(
    cli: Cli, one: Machine, tmp_path: Path, name: str
) -> None:
    case, lab = CASES[name], one.names.lab
    wrong, other = tmp_path / "wrong_hosts", tmp_path / "id_other"
    wrong.write_text(f"{one.address} ssh-ed25519 {'A' * 68}\n")
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(other)], check=True)
    names = {"known": str(lab.known_hosts), "wrong": str(wrong), "identity": str(lab.identity), "other": str(other)}
    with broken(one, case):
        outcome = outcomes(inventory_of(cli, case, names, tmp_path), "deploy", "lab1", expect=case.code)["lab1:main"]
    error = outcome["error"]
    assert case.found.format(**names) in error["found"], error
    assert case.next in error["next"], error
    assert error["why"], error
    there = Disk.of(one).instance("main")
    assert (there["current"], there["unit"], there["releases"]) == (None, False, {})
    assert Disk.of(one).seen["lock"] is None


def test_a_full_disk_is_refused_before_anything_is_sent(cli: Cli, one: Machine) -> None:
    cli("status", "lab1", expect=8)
    one.fill(leave_mib=2)
    try:
        named = ("-i", str(cli.inventory))  # by an option: the command to run next repeats it
        error = outcomes(cli, "deploy", "lab1", *named, expect=ExitCode.REFUSED)["lab1:main"]["error"]
    finally:
        one.empty()
    assert "free under /opt/ddtree" in error["found"]
    assert error["next"] == f"ddtree-ops prune -i {cli.inventory} lab1"
    assert Disk.of(one).instance("main")["releases"] == {}


def test_the_same_host_takes_a_deploy_once_it_is_mended(cli: Cli, one: Machine) -> None:
    assert outcomes(cli, "deploy", "lab1")["lab1:main"]["status"] == "deployed"
    Disk.of(one).invariants()
