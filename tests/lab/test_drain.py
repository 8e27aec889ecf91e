"""Stopping on a real host: running requests finish, the limit holds, nothing of the old server keeps the GPU."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fleet import Cli, outcomes, result, running
from waiting import LIMIT_S, until

from ddtree_ops.lab.machine import Machine

TREE = ("--mode", "tree", "--budget", "32")
ASK = """
import json, sys, urllib.request
body = {"text": "hello", "sampling_params": {"max_new_tokens": int(sys.argv[1]), "temperature": 0, "ignore_eos": True}}
request = urllib.request.Request("http://127.0.0.1:30000/generate", json.dumps(body).encode())
print(json.load(urllib.request.urlopen(request, timeout=600))["meta_info"]["completion_tokens"])
"""
COUNT = """
import re, urllib.request
text = urllib.request.urlopen("http://127.0.0.1:30000/metrics", timeout=60).read().decode()
print("".join(re.findall(r"^sglang:num_running_reqs(?:\\{[^}]*\\})? (\\S+)", text, re.M)))
"""


@pytest.fixture(scope="module")
def one(fleet: Callable[[int], list[Machine]]) -> Machine:
    return fleet(1)[0]


@pytest.fixture
def served(cli: Cli, one: Machine) -> Iterator[Callable[..., None]]:
    """``served(*faults)``: a proven linear server with these faults."""

    def serve(*faults: str, cli: Cli = cli) -> None:
        one.set_faults(list(faults) or None)
        outcomes(cli, "deploy", "lab1", "--restart")

    yield serve
    one.set_faults(None)


def asking(machine: Machine, tokens: int) -> subprocess.Popen[str]:
    """A request that runs for ``tokens`` / 94 seconds, sent from the host itself."""
    argv = ["nsenter", "--target", str(machine.leader()), "--all", "--", "python3", "-c", ASK, str(tokens)]
    client = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        until(lambda: requests(machine) == 1, "the request runs")
    except BaseException:
        client.kill()
        raise
    return client


def requests(machine: Machine) -> int:
    """How many requests the server works on, by its own count."""
    shown = machine.inside("python3", "-c", COUNT).stdout
    return round(float(shown)) if shown.strip() else 0


def change(cli: Cli) -> dict[str, Any]:
    return outcomes(cli, "deploy", "lab1", *TREE)["lab1:main"]


def test_a_running_request_finishes_before_the_server_ends(
    cli: Any, one: Machine, served: Callable[..., None], tmp_path: Path
) -> None:
    patient = replace(cli, inventory=tmp_path / "fleet.toml")  # its limit is no matter of this test
    patient.inventory.write_text(cli.inventory.read_text().replace("drain_timeout_s = 10", "drain_timeout_s = 240"))
    served("ONLY=linear", cli=patient)
    client = asking(one, 600)
    done = change(patient)
    said, wrong = client.communicate(timeout=LIMIT_S)
    assert said.strip() == "600", wrong
    assert done["status"] == "deployed"
    assert not [note for note in done["notes"] if "cut off" in note]


def test_a_request_longer_than_the_limit_is_cut_off_and_counted(
    cli: Cli, one: Machine, served: Callable[..., None]
) -> None:
    served("ONLY=linear")
    client = asking(one, 30000)  # five minutes
    done = change(cli)
    client.communicate(timeout=LIMIT_S)
    assert client.returncode != 0
    assert "1 request cut off after 10 s" in done["notes"]
    gates = one.inside("cat", f"/opt/ddtree/instances/main/releases/{done['release']}/gates.json").stdout
    assert json.loads(gates)["cut_off"] == 1


def test_a_child_that_ignores_the_signal_keeps_no_gpu(cli: Cli, one: Machine, served: Callable[..., None]) -> None:
    served("ONLY=linear", "STRAY_CHILD=1", "SLOW_STOP_S=6000")  # nobody lives to see it end by itself
    before = result(cli, "status", "lab1")["instances"][0]["gpu_memory_mib"]["used"]
    done = change(cli)
    assert done["status"] == "deployed"
    assert running(one, "main") == done["release"]
    after = result(cli, "status", "lab1")["instances"][0]["gpu_memory_mib"]["used"]
    assert after < before + 2000
