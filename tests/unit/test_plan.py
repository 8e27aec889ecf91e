"""The plan: wanted release and facts to an exact change."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from fakehost import ENGINE, host_of, render, settings
from hypothesis import given
from hypothesis import strategies as st

from ddtree_ops.errors import MovedError, UsageError
from ddtree_ops.facts.host import HostFacts, InstanceFacts, OnDisk
from ddtree_ops.facts.unit import UnitState
from ddtree_ops.model import Mode, Settings
from ddtree_ops.plan import (
    Effect,
    Options,
    Plan,
    PlanFile,
    StepName,
    fingerprint,
    last_good,
    make_plan,
    read_plan_file,
    require_unmoved,
)
from ddtree_ops.release import Release, make_release

UP = UnitState(load="loaded", active="active", sub="running", main_pid=7, invocation="i", file_state="enabled")


def release(**changes: Any) -> Release:
    wanted = settings(**changes)
    return make_release(wanted, ENGINE, host_of(wanted), systemd_version=252, render=render)


LINEAR, TREE = release(), release(mode=Mode.TREE, budget=32)


def on_disk(made: Release, at: float | None = 1.0) -> OnDisk:
    return OnDisk(made.engine, made.settings, {"at": at} if at is not None else None)


def there(made: Release = LINEAR, **changes: Any) -> InstanceFacts:
    known = InstanceFacts(
        "a",
        unit=UP,
        unit_text=made.unit,
        current=made.id,
        running=made.id,
        proven=made.id,
        releases={made.id: on_disk(made)},
    )
    return replace(known, **changes)


def facts(instance: InstanceFacts | None = None, **changes: Any) -> HostFacts:
    known = HostFacts("h1", systemd=252, engines=frozenset({ENGINE}))
    return replace(known, instances={"a": instance} if instance else {}, **changes)


def names(plan: Plan) -> list[str]:
    return [step.name.value for step in plan.steps]


def test_nothing_to_do() -> None:
    plan = make_plan(LINEAR, facts(there()))
    assert (plan.effect, plan.why, plan.unit_diff, plan.settings_diff, plan.travels) == (
        Effect.NOTHING,
        (),
        "",
        (),
        (),
    )
    assert names(plan) == ["check", "health"]


def test_a_switch_that_a_change_before_left_armed_is_told_that_the_release_stays() -> None:
    plan = make_plan(LINEAR, facts(there(armed_until=12.0)))
    assert plan.effect is Effect.NOTHING
    assert names(plan) == ["lock", "check", "health", "confirm"]


def test_a_switch_that_is_held_stays_armed() -> None:
    held = Options(arm=True, hold=True)
    plan = make_plan(TREE, facts(there()), options=held)
    assert "arm" in names(plan)
    assert "confirm" not in names(plan)
    again = make_plan(TREE, facts(there(armed_until=12.0)), options=held)
    assert "confirm" not in names(again)
    assert again.notes == ()  # it is ours, no earlier deploy's


def test_first_deploy() -> None:
    plan = make_plan(LINEAR, facts(engines=frozenset()), engine_size=4096)
    assert plan.effect is Effect.RELOAD_RESTART
    assert plan.before is plan.back is None
    assert [travel.what for travel in plan.travels] == [f"engine {ENGINE[:12]}", f"release {LINEAR.short}"]
    assert plan.unit_diff.startswith("--- /dev/null\n+++ b/sglang-ddtree-a.service\n")
    assert names(plan)[:4] == ["lock", "check", "stage engine", "stage release"]


def test_mode_change() -> None:
    plan = make_plan(TREE, facts(there()))
    assert plan.effect is Effect.RELOAD_RESTART
    assert plan.why == (f"release {LINEAR.short} is there, {TREE.short} is wanted",)
    assert [(c.setting, c.before, c.after) for c in plan.settings_diff] == [
        ("mode", '"linear"', '"tree"'),
        ("budget", "16", "32"),
    ]
    assert plan.back == plan.before == LINEAR.id


@pytest.mark.parametrize(
    ("changes", "effect", "why"),
    [
        ({"unit": UnitState(load="loaded")}, Effect.RESTART, "the unit is down"),
        ({"unit": replace(UP, active="failed")}, Effect.RESTART, "the unit is failed"),
        ({"unit": replace(UP, active="activating", sub="auto-restart")}, Effect.RESTART, "the unit is restarting"),
        ({"running": TREE.id}, Effect.RESTART, f"the process that runs is of release {TREE.short}"),
        ({"unit": replace(UP, needs_reload=True)}, Effect.RELOAD_RESTART, "systemd has an older unit loaded"),
        ({"unit_text": "edited"}, Effect.RELOAD_RESTART, "the unit on disk is not the release's own"),
        ({"running": None}, Effect.NOTHING, ""),
    ],
)
def test_same_release_that_is_not_as_it_should_be(changes: dict[str, Any], effect: Effect, why: str) -> None:
    plan = make_plan(LINEAR, facts(there(**changes)))
    assert plan.effect is effect
    assert plan.why == ((why,) if why else ())
    assert (StepName.RELOAD.value in names(plan)) == (effect is Effect.RELOAD_RESTART)


def test_restart_on_request_needs_no_reload() -> None:
    plan = make_plan(LINEAR, facts(there()), options=Options(restart=True))
    assert plan.effect is Effect.RESTART
    assert "daemon-reload" not in names(plan)


def test_release_that_was_never_proven_is_proven_without_a_restart() -> None:
    plan = make_plan(LINEAR, facts(there(proven=None)), options=Options(gates=("lossless",)))
    assert plan.effect is Effect.NOTHING
    assert names(plan) == ["lock", "check", "switch", "health", "gates", "record"]
    assert plan.back is None  # nothing good was there before


def test_way_back_of_an_unproven_release_is_the_last_good_one() -> None:
    known = there(TREE, proven=LINEAR.id, releases={TREE.id: on_disk(TREE, None), LINEAR.id: on_disk(LINEAR)})
    assert make_plan(TREE, facts(known)).back == LINEAR.id


def test_slots_for_the_switch_that_the_host_arms_and_for_draining() -> None:
    plan = make_plan(TREE, facts(there()), options=Options(arm=True, drain=True, gates=("soak",)))
    order = names(plan)
    assert order.index("arm") < order.index("drain") < order.index("switch") < order.index("gates")
    assert order[-2:] == ["confirm", "record"]


def test_nothing_that_runs_is_not_drained() -> None:
    down = there(unit=UnitState(load="loaded"))
    assert "drain" not in names(make_plan(TREE, facts(down), options=Options(drain=True)))


def test_a_damaged_release_travels_again() -> None:
    broken = there(current=None, releases={LINEAR.id: OnDisk(damage=("unit is missing",))})
    assert [travel.what for travel in make_plan(LINEAR, facts(broken)).travels] == [f"release {LINEAR.short}"]


def test_a_release_that_was_taken_back_is_said_to_be() -> None:
    plan = make_plan(TREE, facts(there(taken_back={TREE.id: "health: it crashed"})))
    assert plan.notes == (f"release {TREE.short} was taken back before: health: it crashed",)


def test_last_good_is_the_newest_that_was_proven_and_never_taken_back() -> None:
    old, new, bad, unproven = (release(budget=budget) for budget in (1, 2, 3, 4))
    known = there(
        releases={
            old.id: on_disk(old, 10.0),
            new.id: on_disk(new, 20.0),
            bad.id: on_disk(bad, 30.0),
            unproven.id: on_disk(unproven, None),
            LINEAR.id: replace(on_disk(LINEAR, 40.0), damage=("unit differs",)),
        },
        taken_back={bad.id: "slower"},
    )
    assert last_good(known, None) == new.id
    assert last_good(known, new.id) == old.id
    assert last_good(there(releases={}), None) is None


def test_plan_survives_its_file() -> None:
    plan = make_plan(TREE, facts(there()))
    kept = PlanFile(inventory="i.toml", plans=(plan,), settings={plan.target: TREE.settings})
    assert read_plan_file(kept.model_dump_json(), "p.json") == kept


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"format": 1, "inventory": 3, "plans": [], "settings": {}}'])
def test_what_is_no_plan_is_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError, match=r"p\.json is not a plan"):
        read_plan_file(text, "p.json")


def test_plan_of_another_format() -> None:
    with pytest.raises(UsageError, match="format 2"):
        read_plan_file('{"format": 2, "inventory": "", "plans": [], "settings": {}}', "p.json")


def test_moved_host_is_told_from_moved_settings() -> None:
    kept = make_plan(TREE, facts(there()))
    require_unmoved(kept, make_plan(TREE, facts(there())))
    with pytest.raises(MovedError, match="the host has changed"):
        require_unmoved(kept, make_plan(TREE, facts(there(unit_text="edited"))))
    other = release(mode=Mode.TREE, budget=8)
    with pytest.raises(MovedError, match="its settings now make"):
        require_unmoved(kept, make_plan(other, facts(there())))


@given(
    current=st.sampled_from([None, LINEAR.id, TREE.id]),
    text=st.sampled_from([None, LINEAR.unit, TREE.unit, "edited"]),
    active=st.sampled_from(["active", "inactive", "failed", "activating"]),
    running=st.sampled_from([None, LINEAR.id, TREE.id]),
    proven=st.sampled_from([None, LINEAR.id, TREE.id]),
    reload=st.booleans(),
)
def test_a_plan_that_changes_nothing_means_that_all_is_as_wanted(
    current: str | None, text: str | None, active: str, running: str | None, proven: str | None, reload: bool
) -> None:
    unit = UnitState(load="loaded", active=active, sub="running", needs_reload=reload)
    releases = {made.id: on_disk(made) for made in (LINEAR, TREE)}
    known = InstanceFacts("a", unit, unit_text=text, current=current, running=running, proven=proven, releases=releases)
    plan = make_plan(LINEAR, facts(known))
    as_wanted = (
        (current, text, reload) == (LINEAR.id, LINEAR.unit, False)
        and active in ("active", "activating")
        and running in (None, LINEAR.id)
    )
    assert (plan.effect is Effect.NOTHING) == as_wanted
    assert plan.has(StepName.RESTART) == (not as_wanted)
    assert plan.has(StepName.RECORD) == (not as_wanted or proven != LINEAR.id)
    assert plan.back != LINEAR.id or current == LINEAR.id
    assert fingerprint(facts(known), "a") == plan.fingerprint


def test_settings_of_a_release_are_not_needed_to_plan() -> None:
    """A release that another version wrote, with settings that we cannot read, can still be replaced."""
    unreadable = there(releases={LINEAR.id: OnDisk(ENGINE, None, {"at": 1.0})})
    plan = make_plan(TREE, facts(unreadable))
    assert {change.before for change in plan.settings_diff} == {None}
    assert isinstance(TREE.settings, Settings)
