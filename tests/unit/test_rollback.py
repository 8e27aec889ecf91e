"""Rollback: what is chosen, what is refused and why, and the way there."""

from __future__ import annotations

from pathlib import Path

import pytest
from fakehost import ENGINE, FakeHost, deployer, host_of, settings

from ddtree_ops.connection import Connection
from ddtree_ops.errors import DdtreeError, ExitCode, RefusedError, UsageError
from ddtree_ops.facts.host import HostFacts, InstanceFacts, OnDisk
from ddtree_ops.model import Mode, Settings
from ddtree_ops.outcome import Outcome, Status
from ddtree_ops.release import Release
from ddtree_ops.rollback import choose, other_mode, release_on_host

LINEAR, TREE = settings(), settings(mode=Mode.TREE, budget=32)
HOST = host_of(LINEAR)


def there(**releases: OnDisk) -> InstanceFacts:
    return InstanceFacts("a", current="c0", releases=releases, taken_back={"b0": "slower than linear"})


GOOD = OnDisk("e", LINEAR, {"at": 1.0})


def test_the_last_proven_release_is_chosen() -> None:
    assert choose(HOST, there(c0=GOOD, a0=GOOD, a1=OnDisk("e", LINEAR, {"at": 2.0})), None) == "a1"


def test_a_release_may_be_named_by_its_beginning_even_one_that_was_taken_back() -> None:
    assert choose(HOST, there(c0=GOOD, b0=GOOD), "b") == "b0"


@pytest.mark.parametrize(
    ("known", "to", "error", "said"),
    [
        (InstanceFacts("a"), None, RefusedError, "nothing is deployed here"),
        (there(c0=GOOD), None, RefusedError, "only the current release is on the host"),
        (there(c0=GOOD, b0=GOOD), None, RefusedError, "b0 was taken back: slower than linear"),
        (there(c0=GOOD, d0=OnDisk("e", LINEAR)), None, RefusedError, "d0 was never proven"),
        (there(c0=GOOD, d0=OnDisk("e", LINEAR, {"at": 1}, ("unit differs",))), None, RefusedError, "d0 is damaged"),
        (there(c0=GOOD), "x", UsageError, "no release of h1:a begins with 'x'"),
        (there(a1=GOOD, a2=GOOD), "a", UsageError, "2 releases of h1:a begin with 'a'"),
        (there(d0=OnDisk("e", LINEAR, None, ("unit differs",))), "d0", RefusedError, "damaged: unit differs"),
    ],
)
def test_refused_with_the_reason(known: InstanceFacts, to: str | None, error: type[DdtreeError], said: str) -> None:
    with pytest.raises(error) as raised:
        choose(HOST, known, to)
    assert said in f"{raised.value.found} {raised.value.why}"
    assert raised.value.next


def test_mode_alone_keeps_engine_and_settings() -> None:
    facts = HostFacts("h1", instances={"a": InstanceFacts("a", current="c", releases={"c": OnDisk("e9", TREE)})})
    changed, engine = other_mode(facts, "a", Mode.LINEAR)
    assert engine == "e9"
    assert changed == TREE.model_copy(update={"mode": Mode.LINEAR})
    with pytest.raises(RefusedError, match="nothing is deployed"):
        other_mode(HostFacts("h1"), "a", Mode.LINEAR)


def go_back(fake: FakeHost, tmp: Path, to: str | None = None) -> Outcome:
    run = deployer(fake, tmp=tmp)

    def pick(connection: Connection, facts: HostFacts) -> Release:
        chosen = choose(connection.host, facts.instance("a"), to)
        return release_on_host(facts, "a", chosen, connection.unit_of("a", chosen))

    def act(connection: Connection, wanted: Settings) -> Outcome:
        return run.back(connection, wanted, pick, "by hand")

    return run.run([(HOST, [LINEAR])], act)[0]


@pytest.fixture
def on_tree(tmp_path: Path) -> FakeHost:
    """Linear was proven, then tree; tree runs."""
    fake = FakeHost()
    for wanted in (LINEAR, TREE):
        assert deployer(fake, tmp=tmp_path).run([(host_of(wanted), [wanted])])[0].status is Status.DEPLOYED
    fake.ops.clear()
    return fake


def test_back_to_the_release_before_unit_included(on_tree: FakeHost, tmp_path: Path) -> None:
    left = on_tree.current["a"]
    outcome = go_back(on_tree, tmp_path)
    assert outcome.status is Status.DEPLOYED
    assert on_tree.runs() == on_tree.current["a"] == outcome.release != left
    assert "linear" in on_tree.units["a"]
    assert "stage_release" not in on_tree.ops
    assert on_tree.engines == {ENGINE}


def test_what_proved_a_release_is_not_forgotten_when_it_comes_back(on_tree: FakeHost, tmp_path: Path) -> None:
    linear = next(name for name in on_tree.releases["a"] if name != on_tree.current["a"])
    on_tree.releases["a"][linear]["gates"] = {"at": 1.0, "gates": {"throughput": {"verdict": "passed"}}}
    assert go_back(on_tree, tmp_path).release == linear
    proof = on_tree.releases["a"][linear]["gates"]
    assert proof["gates"]["throughput"] == {"verdict": "passed"}
    assert proof["gates"]["completion"]["tokens"] == 8
    assert proof["at"] > 1.0


def test_what_was_left_by_hand_is_not_returned_to_by_itself(on_tree: FakeHost, tmp_path: Path) -> None:
    left = on_tree.current["a"]
    go_back(on_tree, tmp_path)
    assert {"what": "taken-back", "release": left} in on_tree.history
    outcome = go_back(on_tree, tmp_path)
    assert outcome.code is ExitCode.REFUSED
    assert outcome.error is not None
    assert "was taken back" in outcome.error.why
    assert go_back(on_tree, tmp_path, to=str(left)).status is Status.DEPLOYED


def test_rollback_that_fails_returns_to_what_ran(on_tree: FakeHost, tmp_path: Path) -> None:
    before = on_tree.runs()
    on_tree.faults["linear"] = "crash"
    outcome = go_back(on_tree, tmp_path)
    assert outcome.code is ExitCode.ROLLED_BACK
    assert on_tree.runs() == on_tree.current["a"] == before
