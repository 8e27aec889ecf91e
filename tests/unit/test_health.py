"""Health by identity: what one look says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ddtree_ops.clock import FakeClock
from ddtree_ops.facts.unit import UnitState
from ddtree_ops.health import (
    Before,
    Completion,
    Listener,
    Observation,
    State,
    UnhealthyError,
    Waiting,
    judge,
    judge_completion,
)

OURS, PORT = "r" * 64, 30000
UP = UnitState(load="loaded", active="active", sub="running", main_pid=7, invocation="new")
READY = Observation(UP, Listener(7, ours=True), ready=200, release=OURS)
OLD = Before("old")


def unit(**changes: Any) -> Observation:
    return replace(READY, unit=replace(UP, **changes))


@pytest.mark.parametrize(
    ("seen", "state", "said"),
    [
        (READY, State.ANSWERING, "asking for a completion"),
        (unit(invocation="old"), State.BEFORE, "waiting for systemd to restart it"),
        (unit(invocation="old", active="deactivating"), State.BEFORE, "stopping the server before"),
        (unit(invocation="old", active="inactive"), State.BEFORE, "waiting for systemd"),
        (unit(active="failed", result="exit-code", exit_status=1), State.FAILED, "exited with status 1"),
        (unit(active="failed", result="start-limit-hit", invocation="old"), State.FAILED, "restarted too often"),
        (unit(active="activating", sub="auto-restart"), State.FAILED, "systemd is restarting it"),
        (unit(restarts=1), State.FAILED, "systemd is restarting it"),
        (unit(active="inactive"), State.FAILED, "the unit is not running"),
        (unit(active="deactivating"), State.WAITING, "the server is stopping"),
        (replace(READY, listener=Listener(9, "nginx")), State.FAILED, "port 30000 is held by nginx (pid 9)"),
        (replace(READY, ready=None, listener=None), State.WAITING, "starting"),
        (replace(READY, ready=503, lines=("Load weight begin.",)), State.WAITING, "loading weights"),
        (replace(READY, release=None), State.FAILED, "does not say which release"),
        (replace(READY, release="x" * 64), State.FAILED, "is release xxxxxxxxxxxx, not rrrrrrrrrrrr"),
    ],
)
def test_one_look_after_a_restart(seen: Observation, state: State, said: str) -> None:
    verdict = judge(seen, OURS, PORT, OLD)
    assert verdict.state is state
    assert said in verdict.line


def test_a_server_that_we_did_not_restart_may_have_been_restarted_by_systemd() -> None:
    assert judge(unit(restarts=3), OURS, PORT).state is State.ANSWERING
    assert judge(unit(active="failed"), OURS, PORT).state is State.FAILED


def test_why_it_died_is_said_in_its_own_words() -> None:
    seen = replace(unit(active="failed", result="exit-code", exit_status=1), lines=("ValueError: no such budget",))
    expected = "the unit failed: the process exited with status 1: ValueError: no such budget"
    assert judge(seen, OURS, PORT, OLD).line == expected


@pytest.mark.parametrize(
    ("completion", "said"),
    [
        (Completion(8, OURS), ""),
        (Completion(8, None), ""),
        (Completion(4, OURS), "returned 4 tokens where 8 were asked for"),
        (Completion(8, "x" * 64), "came from release xxxxxxxxxxxx"),
        (Completion(0, error="timed out"), "a completion failed: timed out"),
    ],
)
def test_completion(completion: Completion, said: str) -> None:
    verdict = judge_completion(completion, OURS, 8)
    assert said in verdict
    assert bool(said) == bool(verdict)


class Scripted:
    """Looks that take a second each, one after the other; the last one stays."""

    def __init__(self, clock: FakeClock, *looks: Observation, completion: Completion | None = None) -> None:
        self.clock, self.looks = clock, list(looks)
        self.completion = completion or Completion(8, OURS)

    def observe(self) -> Observation:
        self.clock.sleep(1.0)
        return self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]

    def complete(self, tokens: int, deadline_s: float) -> Completion:
        assert tokens == 8
        assert deadline_s > 0
        return self.completion


def wait(*looks: Observation, seconds: float = 60.0, **changes: Any) -> tuple[FakeClock, list[str]]:
    clock, said = FakeClock(), list[str]()
    probe = Scripted(clock, *looks, **changes)
    waiting = Waiting(probe, OURS, PORT, clock, lambda: None, lambda line, _left: said.append(line))
    waiting.until_healthy(seconds, OLD)
    return clock, said


LOADING = replace(READY, ready=None, listener=None)


def test_a_slow_load_is_waited_for_until_its_deadline_and_no_longer() -> None:
    """Ready after 240 s of a deadline of 300: passes; nothing counts attempts."""
    clock, _ = wait(*[LOADING] * 180, READY, seconds=300)
    assert 200 < clock.now < 300
    with pytest.raises(UnhealthyError, match="not healthy after 60 s; last seen: starting"):
        wait(LOADING, seconds=60)


def test_a_long_drain_does_not_eat_the_time_that_loading_needs() -> None:
    old = unit(invocation="old", active="deactivating")
    clock, said = wait(*[old] * 40, *[LOADING] * 20, READY, seconds=40)
    assert clock.now > 80
    assert said[0] == "stopping the server before"
    with pytest.raises(UnhealthyError, match="the server before did not end after 90 s; last seen: stopping"):
        wait(old, seconds=40)


def test_what_cannot_become_healthy_is_not_waited_for() -> None:
    dead, clock = unit(active="failed", result="exit-code", exit_status=1), FakeClock()
    waiting = Waiting(Scripted(clock, LOADING, dead), OURS, PORT, clock, lambda: None, lambda _line, _left: None)
    with pytest.raises(UnhealthyError, match="exited with status 1"):
        waiting.until_healthy(900.0, OLD)
    assert clock.now < 10


def test_a_bad_completion_fails_at_once() -> None:
    with pytest.raises(UnhealthyError, match="4 tokens"):
        wait(READY, completion=Completion(4, OURS))
