"""Stopping on a real host: running requests finish, the limit holds, nothing of the old server keeps the GPU."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fleet import Cli, outcomes, result, running
from waiting import until

from ddtree_ops.lab.machine import Machine

TREE = ("--mode", "tree", "--budget", "32")
ASK = """
import json, sys, urllib.request
body = {"text": "hello", "sampling_params": {"max_new_tokens": int(sys.argv[1]), "temperature": 0, "ignore_eos": True}}
request = urllib.request.Request("http://127.0.0.1:30000/generate", json.dumps(body).encode())
print(json.load(urllib.request.urlopen(request, timeout=120))["meta_info"]["completion_tokens"])
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

    def serve(*faults: str) -> None:
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


def test_a_running_request_finishes_before_the_server_ends(cli: Cli, one: Machine, served: Callable[..., None]) -> None:
    served("ONLY=linear")
    client = asking(one, 600)
    done = change(cli)
    said, wrong = client.communicate(timeout=60)
    assert said.strip() == "600", wrong
    assert done["status"] == "deployed"
    assert not [note for note in done["notes"] if "cut off" in note]


def test_a_request_longer_than_the_limit_is_cut_off_and_counted(
    cli: Cli, one: Machine, served: Callable[..., None]
) -> None:
    served("ONLY=linear")
    client = asking(one, 9000)
    done = change(cli)
    client.communicate(timeout=60)
    assert client.returncode != 0
    assert "1 request cut off after 10 s" in done["notes"]
    gates = one.inside("cat", f"/opt/ddtree/instances/main/releases/{done['release']}/gates.json").stdout
    assert json.loads(gates)["cut_off"] == 1


def test_a_child_that_ignores_the_signal_keeps_no_gpu(cli: Cli, one: Machine, served: Callable[..., None]) -> None:
    served("ONLY=linear", "STRAY_CHILD=1", "SLOW_STOP_S=40")
    before = result(cli, "status", "lab1")["instances"][0]["gpu_memory_mib"]["used"]
    began = time.monotonic()
    done = change(cli)
    assert done["status"] == "deployed"
    assert time.monotonic() - began < 60
    assert running(one, "main") == done["release"]
    after = result(cli, "status", "lab1")["instances"][0]["gpu_memory_mib"]["used"]
    assert after < before + 2000
