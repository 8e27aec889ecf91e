"""The command, with the helper's answer in place of a host's."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from doctorhosts import DRAFTER, MODEL, VENV, healthy
from typer.testing import CliRunner, Result

from ddtree_ops import wiring
from ddtree_ops.cli.app import build_app
from ddtree_ops.connection import Connection
from ddtree_ops.errors import UnreachableError
from ddtree_ops.model import HostSpec

INVENTORY = f"""
[hosts.one]
address = "one"
gpus = 8
[hosts.one.instances.tree]
mode = "tree"
gpus = [0]
port = 30001
model = "{MODEL}"
drafter = "{DRAFTER}"
venv = "{VENV}"
budget = 16
max_running_requests = 4
extra_args = ["--disable-radix-cache"]

[hosts.two]
address = "two"
gpus = 8
[hosts.two.instances.linear]
mode = "linear"
gpus = [1]
port = 30000
model = "{MODEL}"
drafter = "{DRAFTER}"
venv = "{VENV}"
"""


class Answers:
    token = None

    def __init__(self, raw: dict[str, Any] | None) -> None:
        self.raw = raw

    def call(self, op: str, *_args: Any, **_more: Any) -> dict[str, Any]:
        assert op == "doctor"
        if self.raw is None:
            raise UnreachableError("no route to host", why="it is off", next="ping two")
        return self.raw


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, Any] | None]:
    """The raw answer of each host; None for one that is off."""
    raw: dict[str, dict[str, Any] | None] = {"one": healthy(), "two": healthy()}
    monkeypatch.setenv("DDTREE_INVENTORY", str(tmp_path / "fleet.toml"))
    (tmp_path / "fleet.toml").write_text(INVENTORY)

    def connect(host: HostSpec) -> Connection:
        answers: Any = Answers(raw[host.name])
        return Connection(host, answers, wiring.CLOCK)

    monkeypatch.setattr(wiring, "connect", connect)
    for answer in raw.values():
        assert answer is not None
        answer["at"] = 0.0  # a host that does not say what time it is
    return raw


def doctor(*args: str) -> Result:
    return CliRunner().invoke(build_app(), ["doctor", *args], prog_name="ddtree-ops")


def test_yellow_warns(hosts: dict[str, dict[str, Any] | None]) -> None:
    one = hosts["one"]
    assert one is not None
    one["proofs"] = {}
    shown = doctor("one")
    assert shown.exit_code == 0, shown.output
    assert "one: 8 GPUs" in shown.output
    assert "yellow one:tree: tree mode is not proven on this combination" in shown.output
    assert "ddtree-ops selftest one:tree" in shown.output


def test_red_refuses_and_one_host_hides_no_other(hosts: dict[str, dict[str, Any] | None]) -> None:
    one = hosts["one"]
    assert one is not None
    one["disk"]["free"] = 1 << 20
    hosts["two"] = None
    shown = doctor("--json")
    data = json.loads(shown.stdout)
    assert shown.exit_code == data["exit_code"]
    assert [host["host"] for host in data["hosts"]] == ["one"]
    assert data["hosts"][0]["findings"][0]["id"] == "disk-low"
    assert data["errors"][0]["host"] == "two"
    hosts["two"] = healthy() | {"at": 0.0}
    assert doctor().exit_code == 4


@pytest.mark.usefixtures("hosts")
def test_settings_can_be_tried_before_they_are_deployed() -> None:
    shown = doctor("one:tree", "--budget", "64", "--states", "snapshots", "--memory")
    assert "4 requests of 32768 tokens with budget 64 need" in shown.output
    assert "does not fit" in shown.output
    assert "state snapshots" in shown.output
    assert "tree 32, records" in shown.output
    kept = doctor("one:tree", "--budget", "64", "--memory")
    assert "state records" in kept.output
    assert "states kept as records\n" in kept.output
    assert "does not fit" not in kept.output
    wide = doctor("one:tree", "--budget", "65", "--memory")
    assert "one:tree: budget 65 is above 64 nodes: a hybrid target's states are kept as snapshots" in wide.output
    assert "states kept as snapshots: records are written for at most 64 nodes and the budget is 65" in wide.output


@pytest.mark.usefixtures("hosts")
def test_limits_that_fit_are_written_into_the_inventory(tmp_path: Path) -> None:
    shown = doctor("two", "--save")
    assert "max_running_requests" in shown.output
    text = (tmp_path / "fleet.toml").read_text()
    linear = tomllib.loads(text)["hosts"]["two"]["instances"]["linear"]
    assert linear["max_running_requests"] < 16, "16 do not fit on 96 GiB"
    assert 0.8 < linear["mem_fraction_static"] < 0.9
    slots = str(5 * linear["max_running_requests"])
    assert linear["extra_args"] == ["--max-mamba-cache-size", slots, "--mamba-ssm-dtype", "float32"]
    assert "memory-tight" not in {f["id"] for f in json.loads(doctor("two", "--json").stdout)["hosts"][0]["findings"]}
    doctor("two", "--save")
    assert (tmp_path / "fleet.toml").read_text() == text, "the second time nothing changes"


@pytest.mark.usefixtures("hosts")
def test_memory_for_programs() -> None:
    data = json.loads(doctor("two", "--json").stdout)["hosts"][0]
    assert data["pairs"]["linear"]["fits"] is True
    memory = data["memory"]["linear"]
    assert memory["fits"] is False, "16 requests, the default, are too many for 96 GiB"
    rows = {row["mode"]: row for row in memory["alternatives"]}
    assert rows.keys() >= {"ar", "linear", "tree 32, snapshots", "tree 32, records"}
    assert rows["tree 32, records"]["kv_tokens"] > rows["tree 32, snapshots"]["kv_tokens"]
    assert (memory["states"], memory["states_why"]) == ("snapshots", ""), "of a chain"
