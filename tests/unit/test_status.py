"""Status: states that need different things done about them are told apart."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from fakehost import settings

from ddtree_ops.errors import ExitCode, UnreachableError
from ddtree_ops.facts.host import Gpu, HostFacts, InstanceFacts, LockFacts, OnDisk
from ddtree_ops.facts.server import Resolved, Served
from ddtree_ops.facts.unit import UnitState
from ddtree_ops.health import Listener, Observation
from ddtree_ops.model import Mode
from ddtree_ops.status import GpuMemory, Health, InstanceStatus, assess, unreachable
from ddtree_ops.ui.status import remarks

WANTED = settings(mode=Mode.TREE, budget=32)
OURS = "r" * 64
UP = UnitState(load="loaded", active="active", sub="running", main_pid=7, invocation="i")
TREE = Resolved("DDTREE", Mode.TREE, 32, 8, "0.5.17", False, {})
SEEN = Observation(UP, Listener(7, ours=True), ready=200, release=OURS, resolved=TREE, served=Served(6.25, 141.5, 3, 1))
THERE = InstanceFacts("a", UP, "unit", OURS, running=OURS, proven=OURS, releases={OURS: OnDisk("e", WANTED)})
FACTS = HostFacts("h1", gpus=(Gpu(0, "GPU-0", memory_used=100, memory_total=200), Gpu(1, "GPU-1")))


def status(seen: Observation = SEEN, there: InstanceFacts = THERE, **facts: Any) -> InstanceStatus:
    return assess(WANTED, replace(FACTS, instances={"a": there}, **facts), seen)


def unit(**changes: Any) -> Observation:
    return replace(SEEN, unit=replace(UP, **changes))


def test_healthy() -> None:
    found = status()
    assert (found.health, found.code) == (Health.HEALTHY, ExitCode.DONE)
    assert (found.mode, found.budget, found.accept_length, found.tokens_per_s) == ("tree", 32, 6.25, 141.5)
    assert found.gpu_memory == GpuMemory(100, 200)
    assert found.as_json()["gpu_memory_mib"] == {"used": 100, "total": 200}


@pytest.mark.parametrize(
    ("seen", "there", "health", "said"),
    [
        (unit(active="inactive"), THERE, Health.DOWN, "the unit is not running"),
        (unit(active="failed", result="signal", exit_status=9), THERE, Health.FAILED, "killed by signal 9"),
        (unit(active="activating", sub="auto-restart"), THERE, Health.RESTARTING, "systemd is restarting it"),
        (unit(active="deactivating"), THERE, Health.STOPPING, "stopping"),
        (replace(SEEN, ready=503, lines=("Load weight begin.",)), THERE, Health.STARTING, "loading weights"),
        (replace(SEEN, release="x" * 64), THERE, Health.WRONG, "is release xxxxxxxxxxxx"),
        (replace(SEEN, listener=Listener(9, "nginx")), THERE, Health.WRONG, "held by nginx"),
        (replace(SEEN, resolved=replace(TREE, mode=Mode.LINEAR)), THERE, Health.WRONG, "it runs mode linear"),
        (replace(SEEN, resolved=replace(TREE, budget=8)), THERE, Health.WRONG, "it runs budget 8"),
        (SEEN, replace(THERE, proven=None), Health.UNPROVEN, "no deploy has proven"),
        (Observation(UnitState()), InstanceFacts("a"), Health.ABSENT, "nothing is deployed"),
    ],
)
def test_told_apart(seen: Observation, there: InstanceFacts, health: Health, said: str) -> None:
    found = status(seen, there)
    assert found.health is health
    assert said in found.line
    assert found.code is ExitCode.MOVED


def test_what_is_not_well_names_a_command_unless_somebody_is_at_it() -> None:
    found = status(unit(active="failed"), THERE)
    assert remarks(found)[-1] == "next: ddtree-ops logs h1:a"
    assert found.as_json()["next"] == "ddtree-ops logs h1:a"
    assert status(SEEN).next == ""
    lock = LockFacts("eve@laptop", 1, "deploy a", 0.0, 1.0, live=True)
    assert status(unit(active="failed"), THERE, lock=lock).next == ""


def test_a_server_that_was_restarted_is_said_though_it_is_healthy() -> None:
    found = status(unit(restarts=2))
    assert found.health is Health.HEALTHY
    assert "it died and was restarted 2 times: ddtree-ops logs h1:a" in remarks(found)
    assert not any("died" in line for line in remarks(status(SEEN)))


def test_host_that_is_down_is_its_own_state() -> None:
    found = unreachable("h1", "a", UnreachableError("no answer within 15 s", "h1"))
    assert (found.health, found.code) == (Health.UNREACHABLE, ExitCode.UNREACHABLE)


def test_what_runs_otherwise_than_the_inventory_wants() -> None:
    there = replace(THERE, releases={OURS: OnDisk("e", settings(mode=Mode.TREE, budget=16))})
    found = status(replace(SEEN, resolved=replace(TREE, budget=16)), there)
    assert found.health is Health.HEALTHY
    assert found.differs == ("budget: 16 there, 32 wanted",)
    assert found.code is ExitCode.DONE


def test_what_a_person_should_know() -> None:
    there = replace(THERE, taken_back={OURS: "slower"}, armed_until=12.0)
    lock = LockFacts("eve@laptop", 1, "deploy a", 0.0, 1.0, live=True)
    found = status(unit(drop_ins=("/etc/x.conf",), needs_reload=True), there, lock=lock)
    assert "drop-ins change the unit: /etc/x.conf" in found.notes
    assert "this release was taken back: slower" in found.notes
    assert not found.loaded
    assert found.locked_by == "eve@laptop (deploy a)"
    assert found.armed_until == 12.0
    assert "not confirmed yet: the host takes it back by itself at 00:00:12 UTC" in remarks(found)


def test_a_stand_in_is_called_one() -> None:
    found = status(replace(SEEN, resolved=replace(TREE, stand_in=True)))
    assert found.stand_in
    assert "a stand-in answers, not SGLang" in found.notes
