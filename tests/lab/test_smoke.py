"""A smoke test on a real host: whatever it finds, the host is as it was before."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from xml.etree import ElementTree

from fleet import Disk
from waiting import until

from ddtree_ops.lab.machine import Machine

from .conftest import Cli


def state(host: Machine) -> tuple[str, str]:
    """What runs: the unit's state, and where ``current`` points."""
    unit = host.ssh("systemctl is-active sglang-ddtree-main.service").stdout.strip()
    current = host.ssh("readlink /opt/ddtree/instances/main/current").stdout.strip()
    return unit, current


def venv(host: Machine) -> str:
    """Everything of the venv that a write would change: names, sizes, times, inodes, modes."""
    listed = host.ssh("find /opt/sglang/venv -printf '%p %i %m %s %T@\\n' | LC_ALL=C sort | sha256sum")
    return listed.stdout.strip()


def kill_after_the_gates(cli: Cli, *words: str) -> None:
    """Start a smoke test and end it with SIGKILL when the release has passed its gates."""
    client = cli.start("smoke", *words, "--dead-man", "30")
    assert client.stdout is not None
    said = []
    for line in client.stdout:
        said.append(line)
        if "  record: " in line:
            break
    else:
        raise AssertionError(f"it was never recorded: {''.join(said)}")
    os.killpg(client.pid, signal.SIGKILL)
    client.wait(timeout=30)


def test_a_smoke_test_that_is_killed_after_the_gates_is_put_back_by_the_host(cli: Cli, host: Machine) -> None:
    def nothing_waits() -> bool:
        return not Disk.of(host).instance("main")["armed"]

    cli("deploy", host.name, timeout=300)
    before = state(host)
    kill_after_the_gates(cli, host.name, "--port", "30100")
    until(lambda: state(host) == before and nothing_waits(), "the release before is back", limit_s=240, every_s=0.5)
    until(lambda: cli("status", host.name, expect=(0, 8)).returncode == 0, "it is healthy and proven", limit_s=120)
    Disk.of(host).invariants()
    cli("smoke", host.name, "--port", "30100", timeout=300)
    assert state(host) == before
    assert nothing_waits()


def test_a_first_smoke_test_that_is_killed_leaves_nothing(cli: Cli, host: Machine) -> None:
    kill_after_the_gates(cli, host.name)
    until(lambda: state(host)[1] == "", "nothing is deployed again", limit_s=240, every_s=0.5)
    until(lambda: not Disk.of(host).instance("main")["armed"], "nothing waits", limit_s=60, every_s=0.5)
    assert state(host)[0] in ("inactive", "unknown")


def test_smoke_leaves_a_host_as_it_was(cli: Cli, host: Machine, tmp_path: Path) -> None:
    untouched = venv(host)
    first = cli("smoke", host.name, "--json", timeout=300)
    seen = json.loads(first.stdout)
    assert seen["before"] is None
    assert {case["verdict"] for case in seen["cases"]} <= {"passed", "skipped"}
    assert state(host)[0] in ("inactive", "unknown")
    assert state(host)[1] == ""

    cli("deploy", host.name, timeout=300)
    before = state(host)
    assert before[0] == "active"
    xml, page = tmp_path / "smoke.xml", tmp_path / "smoke.md"
    cli("smoke", host.name, "--port", "30100", "--junit", str(xml), "--markdown", str(page), timeout=300)
    assert state(host) == before
    assert venv(host) == untouched, "the venv is only ever read"
    suite = ElementTree.parse(xml).getroot().find("testsuite")
    assert suite is not None
    assert suite.get("failures") == "0"
    assert "put back | passed" in page.read_text()
