"""A rollout over four real hosts: the second is broken, a canary dies after it was healthy, one host is away."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from fleet import Cli, Disk, main_pid, outcomes, result, running, until_said
from waiting import LIMIT_S

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
    client = cli.start("deploy", "all", *TREE, "--batches", "1,rest", "--soak", "600")
    until_said(client, "soaking for 600 s")
    deployed = Disk.of(four[0]).instance("main")["current"]
    four[0].set_faults(["ONLY=tree", "CRASH_AT_START=1"])  # for when systemd starts it again
    four[0].inside("kill", "-KILL", str(main_pid(four[0], "main")))
    said, _ = client.communicate(timeout=2 * LIMIT_S)  # long before the soak is over
    assert client.returncode == 5, said
    assert "did not stay healthy after the deploy" in said
    assert running(four[0], "main") == linear["lab1:main"] != deployed
    assert deployed in Disk.of(four[0]).instance("main")["state"]["taken_back"]
    for number, machine in enumerate(four[1:], 2):
        assert running(machine, "main") == linear[f"lab{number}:main"]


@pytest.mark.usefixtures("linear")
def test_a_host_that_is_away_has_not_failed(cli: Cli, four: list[Machine]) -> None:
    four[0].cut()
    ends, value = rollout(cli, "all", *TREE, "--batches", "1,rest", "--max-unreachable", "1", expect=3)
    assert ends == {"lab1": "unreachable", **dict.fromkeys(("lab2", "lab3", "lab4"), "deployed")}
    assert value["stopped"] == ""


@pytest.mark.usefixtures("linear")
def test_one_host_has_a_deadline_of_its_own(cli: Cli, four: list[Machine]) -> None:
    began = time.monotonic()
    rollout(cli, "lab1", "lab2", "--mode", "tree", "--budget", "40", expect=0)
    limit = max(15, round(5 * (time.monotonic() - began)))  # what it takes here and now, several times
    four[0].set_faults(["ONLY=budget=32", "HANG_LOADING=1"])  # what it goes back to is a tree, too
    ends, value = rollout(
        cli, "lab1", "lab2", *TREE, "--host-deadline", str(limit), "--health-timeout", "600", expect=5
    )
    assert ends == {"lab1": "rolled back", "lab2": "deployed"}
    assert f"not done after the {limit} s" in value["outcomes"][0]["error"]["found"]
