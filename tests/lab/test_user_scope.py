"""scope = "user": a person's own systemd, without root; also over SSH, where the manager must outlive the session."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from labagent import agent, deploy, do
from waiting import until

from ddtree_ops.agent import Agent
from ddtree_ops.lab.machine import Machine

HOME = "/home/ops/ddtree"


@pytest.fixture
def caller(host: Machine) -> Iterator[Agent]:
    host.inside("loginctl", "enable-linger", "ops")
    made = agent(host, user="ops", scope="user", root="~/ddtree")
    yield made
    made.remote.close()


def of_ops(host: Machine, *words: str) -> str:
    """A command of the user's own manager, from outside any session of theirs."""
    inside = ["runuser", "-u", "ops", "--", "env", "XDG_RUNTIME_DIR=/run/user/1000", *words]
    return host.inside(*inside, ok=(0, 1, 3)).stdout.strip()


def test_a_release_runs_is_taken_back_and_outlives_the_session(host: Machine, caller: Agent) -> None:
    facts = do(caller, "facts")
    assert (facts["host"]["uid"], facts["host"]["root"]) == (1000, HOME)
    assert (facts["host"]["systemd_runs"], facts["host"]["lingers"]) == (True, True)
    with caller.locked("test"):
        first = deploy(caller, 1001)
        do(caller, "record", instance="qwen", release=first, outcome="proven")
        deploy(caller, 1002)
        assert do(caller, "take_back", instance="qwen", reason="test")["to"] == first
    caller.remote.close()
    time.sleep(1)
    assert of_ops(host, "systemctl", "--user", "is-active", "sglang-ddtree-qwen.service") == "active"
    assert of_ops(host, "readlink", f"{HOME}/instances/qwen/current").endswith(first)


def test_the_dead_man_switch_works_there_too(host: Machine, caller: Agent) -> None:
    do(caller, "lock", token="client", owner="op@desk", purpose="deploy", lease_s=300)
    caller.token = "client"
    do(caller, "arm", instance="qwen", to="none", within_s=600)  # a slow machine needs its time for what follows
    deploy(caller, 1002)
    do(caller, "arm", instance="qwen", to="none", within_s=6)
    caller.remote.close()
    until(lambda: of_ops(host, "readlink", f"{HOME}/instances/qwen/current") == "", "it is taken back", every_s=0.5)
    assert of_ops(host, "systemctl", "--user", "is-active", "sglang-ddtree-qwen.service") in ("inactive", "unknown")
