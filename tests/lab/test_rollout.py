"""A rollout over four real hosts: the second is broken, a canary dies after it was healthy, one host is away."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest
from fleet import Cli, Disk, outcomes, result, running

from ddtree_ops.lab.machine import Machine

TREE = ("--mode", "tree", "--budget", "32")


@pytest.fixture(scope="module")
def four(fleet: Callable[[int], list[Machine]]) -> list[Machine]:
    return fleet(4)


@pytest.fixture
def linear(cli: Cli, four: list[Machine]) -> dict[str, str]:
    """Linear is proven on all four; nothing of a fault outlives its test."""
    for machine in four:
        machine.heal()
        machine.set_faults(None)
    found = outcomes(cli, "deploy", "all")
    return {target: each["release"] for target, each in found.items()}


def rollout(cli: Cli, *words: str, expect: int) -> tuple[dict[str, str], dict[str, Any]]:
    value = result(cli, "deploy", *words, expect=expect)
    return {each["target"].partition(":")[0]: each["status"] for each in value["outcomes"]}, value


def test_the_second_is_broken_and_the_rest_is_not_begun(cli: Cli, four: list[Machine], linear: dict[str, str]) -> None:
    four[1].set_faults(["ONLY=tree", "CRASH_AT_START=1"])
    ends, value = rollout(cli, "all", *TREE, "--batches", "1,1,rest", expect=5)
    assert ends == {"lab1": "deployed", "lab2": "rolled back", "lab3": "not begun", "lab4": "not begun"}
    assert value["stopped"] == "1 failed, 0 are allowed"
    assert value["resume"] == "ddtree-ops deploy --resume"
    assert running(four[1], "main") == linear["lab2:main"]
    assert running(four[2], "main") == linear["lab3:main"]

    four[1].set_faults(None)
    ends, value = rollout(cli, "--resume", expect=0)
    assert ends == {"lab2": "deployed", "lab3": "deployed", "lab4": "deployed"}
    wanted = {each["release"] for each in value["outcomes"]}
    assert {running(machine, "main") for machine in four} >= wanted
    assert "the last rollout is complete" in cli("deploy", "--resume", expect=2).stderr


def test_a_canary_that_dies_after_it_was_healthy_is_taken_back(
    cli: Cli, four: list[Machine], linear: dict[str, str]
) -> None:
    four[0].set_faults(["ONLY=tree", "CRASH_AFTER_S=8"])
    ends, value = rollout(cli, "all", *TREE, "--batches", "1,rest", "--soak", "25", expect=5)
    assert ends == {"lab1": "rolled back", **dict.fromkeys(("lab2", "lab3", "lab4"), "not begun")}
    assert "did not stay healthy after the deploy" in value["outcomes"][0]["error"]["found"]
    assert running(four[0], "main") == linear["lab1:main"]
    assert value["outcomes"][0]["release"] in Disk.of(four[0]).instance("main")["state"]["taken_back"]


@pytest.mark.usefixtures("linear")
def test_a_host_that_is_away_has_not_failed(cli: Cli, four: list[Machine]) -> None:
    four[0].cut()
    ends, value = rollout(cli, "all", *TREE, "--batches", "1,rest", "--max-unreachable", "1", expect=3)
    assert ends == {"lab1": "unreachable", **dict.fromkeys(("lab2", "lab3", "lab4"), "deployed")}
    assert value["stopped"] == ""


@pytest.mark.usefixtures("linear")
def test_one_host_has_a_deadline_of_its_own(cli: Cli, four: list[Machine]) -> None:
    four[0].set_faults(["ONLY=tree", "HANG_LOADING=1"])
    began = time.monotonic()
    ends, value = rollout(cli, "lab1", "lab2", *TREE, "--host-deadline", "15", expect=5)
    assert ends == {"lab1": "rolled back", "lab2": "deployed"}
    assert "not done after the 15 s" in value["outcomes"][0]["error"]["found"]
    assert time.monotonic() - began < 55
    json.dumps(value)
