"""Batches, when a rollout stops, and what it says of what it did not begin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import pytest
from fakehost import host_of, settings
from hypothesis import given
from hypothesis import strategies as st

from ddtree_ops import rolling
from ddtree_ops.clock import FakeClock
from ddtree_ops.errors import ExitCode, RolledBackError, UnreachableError, UsageError
from ddtree_ops.interrupt import Token
from ddtree_ops.model import HostSpec, Settings
from ddtree_ops.outcome import Outcome, Status, worst
from ddtree_ops.rollout import REST, Rollout, Rules, parse_batches, split
from ddtree_ops.status import Health

HOSTS = [f"h{number}" for number in range(1, 9)]


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("rest", [8]),
        ("1,25%,rest", [1, 2, 5]),
        ("1,1,50%", [1, 1, 4, 2]),
        ("100%", [8]),
        ("3", [3, 5]),
        ("20", [8]),
        ("1%,rest", [1, 7]),
    ],
)
def test_batches(text: str, sizes: list[int]) -> None:
    assert [len(batch) for batch in split(HOSTS, parse_batches(text))] == sizes


@pytest.mark.parametrize("text", ["", "0", "-1", "x", "0%", "101%", "1,,rest", "rest,1", "1.5"])
def test_what_is_no_batch(text: str) -> None:
    with pytest.raises(UsageError):
        parse_batches(text)


@given(
    st.integers(0, 50),
    st.lists(st.one_of(st.integers(1, 9).map(str), st.integers(1, 100).map(lambda n: f"{n}%")), max_size=5),
    st.booleans(),
)
def test_every_host_is_in_exactly_one_batch(count: int, batches: list[str], rest: bool) -> None:
    hosts = [f"h{number}" for number in range(count)]
    parts = split(hosts, [*batches, *([REST] if rest else [])])
    assert [host for part in parts for host in part] == hosts


def rollout(ends: dict[str, Status], rules: Rules, **more: object) -> tuple[Rollout, list[Outcome], list[str]]:
    said: list[str] = []
    clock = FakeClock()

    def deploy(batch: Sequence[str]) -> list[Outcome]:
        clock.sleep(10)
        return [Outcome(host, "a", ends.get(host, Status.DEPLOYED)) for host in batch]

    def soak(outcomes: Sequence[Outcome], seconds: float) -> list[Outcome]:
        clock.sleep(seconds)
        return [Outcome(each.host, "a", ends.get(f"{each.host} soaking", each.status)) for each in outcomes]

    made = Rollout(
        rules=rules,
        deploy=deploy,
        soak=soak,
        not_begun=lambda batch: [Outcome(host, "a", Status.NOT_BEGUN) for host in batch],
        clock=clock,
        check=lambda: bool(more.get("interrupted")) and clock.now > 5,
        say=said.append,
    )
    return made, made.run(HOSTS), said


def statuses(outcomes: list[Outcome]) -> dict[str, str]:
    return {each.host: str(each.status) for each in outcomes}


CANARY = parse_batches("1,25%,rest")


def test_canary_then_the_rest() -> None:
    _, outcomes, said = rollout({}, Rules(CANARY, soak_s=60))
    assert set(statuses(outcomes).values()) == {"deployed"}
    assert said == [
        "batch 1 of 3: h1",
        "soaking for 60 s",
        "batch 2 of 3: h2, h3",
        "soaking for 60 s",
        "batch 3 of 3: h4, h5, h6, h7, h8",
    ]


def test_second_host_broken_stops_the_rest() -> None:
    made, outcomes, said = rollout({"h2": Status.ROLLED_BACK}, Rules(CANARY))
    assert statuses(outcomes) == {
        "h1": "deployed",
        "h2": "rolled back",
        "h3": "deployed",
        **dict.fromkeys(HOSTS[3:], "not begun"),
    }
    assert made.stopped == "1 failed, 0 are allowed"
    assert said[-1] == "stopped: 1 failed, 0 are allowed"


def test_as_many_failures_as_are_allowed() -> None:
    ends = {"h1": Status.ROLLED_BACK, "h3": Status.ROLLED_BACK}
    assert not rollout(ends, Rules(CANARY, max_failures=2))[0].stopped
    assert rollout(ends, Rules(CANARY, max_failures=1))[0].stopped


def test_a_host_that_does_not_answer_has_not_failed() -> None:
    made, outcomes, _ = rollout({"h1": Status.UNREACHABLE}, Rules(CANARY))
    assert made.stopped == "no answer from h1; 0 may be away"
    assert statuses(outcomes)["h2"] == "not begun"
    made, outcomes, _ = rollout({"h1": Status.UNREACHABLE}, Rules(CANARY, max_unreachable=1))
    assert not made.stopped
    assert statuses(outcomes)["h8"] == "deployed"


def test_a_canary_that_dies_in_the_soak_stops_the_rest() -> None:
    _, outcomes, _ = rollout({"h1 soaking": Status.ROLLED_BACK}, Rules(CANARY, soak_s=60))
    assert statuses(outcomes)["h1"] == "rolled back"
    assert statuses(outcomes)["h2"] == "not begun"


@pytest.mark.parametrize(("dying", "seconds"), [({"h1", "h2"}, 2 * rolling.LOOK_EVERY_S), ({"h1"}, 600.0)])
def test_a_batch_is_watched_for_as_long_as_something_of_it_lives(
    dying: set[str], seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[list[str]] = []

    def statuses(watched: Sequence[tuple[HostSpec, Sequence[Settings]]]) -> list[SimpleNamespace]:
        looked.append([host.name for host, _ in watched])
        ends = {name: Health.DOWN if name in dying else Health.HEALTHY for name in looked[-1]}
        return [SimpleNamespace(target=f"{name}:a", health=health, line="") for name, health in ends.items()]

    class Watcher(rolling.Soak):
        def _back(self, outcome: Outcome, _why: str) -> Outcome:
            return replace(outcome, status=Status.ROLLED_BACK)

    monkeypatch.setattr(rolling, "statuses", statuses)
    clock, each = FakeClock(), settings()
    names = {name: (host_of(each, name=name), [each]) for name in ("h1", "h2")}
    watcher = Watcher(SimpleNamespace(clock=clock), Token(), names)  # type: ignore[arg-type]
    outcomes = watcher([Outcome(name, "a", Status.DEPLOYED) for name in names], 600.0)
    assert {each.host for each in outcomes if each.status is Status.ROLLED_BACK} == dying
    assert clock.now == seconds
    assert looked[:2] == [["h1", "h2"]] * 2  # one bad look is none
    assert all(watched == ["h2"] for watched in looked[2:])


def test_the_whole_has_a_deadline() -> None:
    made, outcomes, _ = rollout({}, Rules(CANARY, deadline_s=15))
    assert made.stopped == "the rollout's 15 s are over"
    assert [str(each.status) for each in outcomes] == ["deployed"] * 3 + ["not begun"] * 5
    assert worst(outcomes) is ExitCode.REFUSED  # 0 would say that everything runs as wanted


def test_what_stopped_a_rollout_decides_its_exit_code() -> None:
    away = Outcome("h1", "a", Status.UNREACHABLE, error=UnreachableError("silent"))
    assert worst([away, Outcome("h2", "a", Status.NOT_BEGUN)]) is ExitCode.UNREACHABLE
    back = Outcome("h3", "a", Status.ROLLED_BACK, error=RolledBackError("it died"))
    assert worst([away, back, Outcome("h4", "a", Status.DEPLOYED)]) is ExitCode.ROLLED_BACK
    assert worst([Outcome("h4", "a", Status.DEPLOYED)]) is ExitCode.DONE


def test_an_interrupt_begins_no_other_batch() -> None:
    made, outcomes, _ = rollout({}, Rules(CANARY), interrupted=True)
    assert made.stopped == "interrupted"
    assert statuses(outcomes)["h2"] == "not begun"


def test_a_failure_in_the_last_batch_stops_nothing() -> None:
    assert not rollout({"h8": Status.ROLLED_BACK}, Rules(CANARY))[0].stopped
