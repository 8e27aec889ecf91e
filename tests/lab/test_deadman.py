"""The dead-man switch on real systemd: nobody confirms, and the host is back on its old release by itself."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from labagent import agent, current, deploy, do, runs
from waiting import until

from ddtree_ops.agent import Agent
from ddtree_ops.errors import RolledBackError
from ddtree_ops.lab.lab import Lab
from ddtree_ops.lab.machine import Machine

WITHIN_S = 6
ARMED = "/opt/ddtree/instances/qwen/armed.json"


def until_back(host: Machine, release: str, seconds: float = 240) -> None:
    until(lambda: current(host) == release and not armed(host), "it is taken back", limit_s=seconds, every_s=0.3)


def armed(host: Machine) -> bool:
    return host.inside("test", "-e", ARMED, ok=(0, 1)).returncode == 0


def said_by_the_switch(host: Machine) -> str:
    """The journal of what the timers of this boot ran."""
    return host.inside("journalctl", "-o", "cat", "--unit", "ddtree-takeback-qwen-*.service", ok=(0, 1)).stdout


def armed_change(host: Machine, within_s: float) -> tuple[Agent, str, str]:
    """A proven release, then an armed switch to another one; the lock is still held, as when a client dies."""
    caller = agent(host)
    wanted: dict[str, Any] = {"token": "client", "owner": "op@desk", "purpose": "deploy", "lease_s": 300}
    do(caller, "lock", **wanted)
    caller.token = "client"
    first = deploy(caller, 1001)
    do(caller, "systemctl", verb="enable", instance="qwen")
    do(caller, "record", instance="qwen", release=first, outcome="proven")
    do(caller, "arm", instance="qwen", to=first, within_s=600)  # a slow machine needs its time for what follows
    second = deploy(caller, 1002)
    until(lambda: runs(host) == "/bin/sleep 1002", "the new server runs")
    do(caller, "arm", instance="qwen", to=first, within_s=within_s)
    return caller, first, second


def test_a_client_that_vanished_and_a_cut_cable(host: Machine) -> None:
    caller, first, second = armed_change(host, WITHIN_S)
    host.cut()
    caller.remote.close()
    until_back(host, first)
    assert runs(host) == "/bin/sleep 1001"
    host.heal()
    facts = do(agent(host), "facts")
    assert second in facts["instances"]["qwen"]["state"]["taken_back"]
    assert facts["lock"] is None
    assert "ddtree-takeback" not in host.inside("systemctl", "list-timers", "--all").stdout
    with pytest.raises(RolledBackError, match="the host took it back by itself"):
        do(caller, "confirm", instance="qwen")


def test_a_full_disk_keeps_nothing_from_being_taken_back_or_pruned(host: Machine) -> None:
    _caller, first, _second = armed_change(host, WITHIN_S)
    host.fill()
    try:
        until_back(host, first)
        until(lambda: runs(host) == "/bin/sleep 1001", "the server before runs")
        other = agent(host)
        with other.locked("prune"):
            assert do(other, "prune", keep=0)["releases"] == {"qwen": []}  # both may still be returned to
    finally:
        host.empty()


def test_a_confirmed_release_stays_and_nothing_is_left_waiting(host: Machine) -> None:
    within = 3 * WITHIN_S  # not over before it is confirmed
    caller, _first, second = armed_change(host, within)
    assert "ddtree-takeback-qwen" in host.inside("systemctl", "list-timers", "--all").stdout
    assert do(caller, "confirm", instance="qwen")["was_armed"] is True
    time.sleep(within + 2)
    assert current(host) == second
    assert runs(host) == "/bin/sleep 1002"
    assert "ddtree-takeback" not in host.inside("systemctl", "list-timers", "--all").stdout


def test_arming_again_keeps_a_living_change_alive(host: Machine) -> None:
    within = 3 * WITHIN_S
    caller, first, second = armed_change(host, within)
    for _ in range(2):
        time.sleep(within / 2 + 0.5)  # twice more than once
        assert do(caller, "arm", instance="qwen", to=second, within_s=within)["to"] == first
    assert current(host) == second
    until_back(host, first)


def test_another_change_that_holds_the_lock_is_waited_for(host: Machine) -> None:
    caller, first, second = armed_change(host, 3 * WITHIN_S)  # not over before the other one holds the lock
    do(caller, "unlock", token="client")
    caller.token = None
    do(caller, "lock", token="other", owner="eve@elsewhere", purpose="deploy other", lease_s=600)
    until(lambda: "eve@elsewhere" in said_by_the_switch(host), "it is due and was refused", every_s=0.5)
    assert current(host) == second
    assert armed(host)
    do(caller, "unlock", token="other")
    until_back(host, first)


def test_a_reboot_in_between_before_the_deadline(host: Machine, lab: Lab) -> None:
    """By a power cut, the hardest kind: what was not flushed is lost."""
    _caller, first, second = armed_change(host, 45)
    deadline = json.loads(host.inside("cat", ARMED).stdout)["deadline"]
    host.powercut()
    lab.power_on(host)
    until_back(host, first)
    assert runs(host) == "/bin/sleep 1001"
    taken_back = do(agent(host), "facts")["instances"]["qwen"]["state"]["taken_back"]
    assert taken_back[second]["at"] >= deadline  # not as it booted


def test_a_host_that_was_off_past_the_deadline_takes_back_when_it_boots(host: Machine, lab: Lab) -> None:
    _caller, first, second = armed_change(host, WITHIN_S)
    host.kill()
    time.sleep(WITHIN_S + 1)
    lab.power_on(host)
    until_back(host, first)
    assert second in do(agent(host), "facts")["instances"]["qwen"]["state"]["taken_back"]


def test_the_host_dies_while_it_takes_back(host: Machine, lab: Lab) -> None:
    _caller, first, _second = armed_change(host, 4)
    end = time.monotonic() + 4
    for moment in (0.1, 0.4, 0.8):
        time.sleep(max(0.0, end + moment - time.monotonic()))
        host.powercut()
        lab.power_on(host)
        end = time.monotonic()
    until_back(host, first)
    assert runs(host) == "/bin/sleep 1001"
