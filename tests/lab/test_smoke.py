"""A smoke test on a real host: whatever it finds, the host is as it was before."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

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
