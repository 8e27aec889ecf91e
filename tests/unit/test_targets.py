"""TARGET and options to instances."""

from __future__ import annotations

from typing import Any

import pytest

from ddtree_ops.errors import ExitCode, UsageError
from ddtree_ops.inventory import parse_fleet
from ddtree_ops.model import Mode
from ddtree_ops.targets import Overrides, changed_targets, one_target, resolve_targets

FLEET = parse_fleet(
    """
    [defaults.instance]
    model = "/m"
    drafter = "/d"
    [hosts.ct200]
    address = "ct200"
    gpus = 8
    default_instance = "tree"
    instances.linear = {mode = "linear", gpus = [0], port = 30000}
    instances.tree = {mode = "tree", gpus = [1], port = 30001}
    [hosts.two]
    address = "two"
    gpus = 2
    instances.a = {mode = "linear", gpus = [0], port = 30000}
    instances.b = {mode = "linear", gpus = [1], port = 30001}
    [hosts.one]
    address = "one"
    instances.bare = {mode = "ar", gpus = [0], port = 30000, drafter = ""}
    [hosts.none]
    address = "none"
    [groups]
    prod = ["ct200:linear", "one"]
    """,
    "fleet.toml",
)


def names(*targets: str, **options: object) -> list[str]:
    return [t.name for t in resolve_targets(FLEET, targets, Overrides(**options)).targets]  # type: ignore[arg-type]


def refused(*targets: str, **options: object) -> UsageError:
    with pytest.raises(UsageError) as caught:
        names(*targets, **options)
    assert caught.value.exit_code == ExitCode.USAGE
    assert caught.value.next
    return caught.value


def test_a_bare_host_is_all_its_instances() -> None:
    assert names("ct200") == ["ct200:linear", "ct200:tree"]


def test_with_options_a_bare_host_is_its_default_instance() -> None:
    assert names("ct200", mode=Mode.TREE, budget=32) == ["ct200:tree"]
    assert names("one", port=31000) == ["one:bare"]


def test_a_reason_alone_changes_nothing() -> None:
    assert names("ct200", unsafe_reason="skip a gate") == ["ct200:linear", "ct200:tree"]


def test_options_arrive() -> None:
    [target] = resolve_targets(FLEET, ["ct200"], Overrides(mode=Mode.TREE, budget=32, gpus=(2, 3), port=30005)).targets
    s = target.settings
    assert (s.mode, s.budget, s.topk_cap, s.gpus, s.port) == (Mode.TREE, 32, 8, (2, 3), 30005)


def test_groups_all_and_repetition() -> None:
    assert names("prod", "one", "ct200:linear") == ["ct200:linear", "one:bare"]
    assert names("all") == ["ct200:linear", "ct200:tree", "two:a", "two:b", "one:bare"]
    assert refused("none").found == "host none has no instances"


def test_more_than_one_instance_and_no_default() -> None:
    error = refused("two", mode=Mode.TREE)
    assert "it has a, b" in error.found
    assert error.next == "name it: two:a"


@pytest.mark.parametrize(
    ("target", "options", "found"),
    [
        ("ct20", {}, "unknown host or group 'ct20'. Did you mean 'ct200'?"),
        ("ct20:tree", {}, "unknown host 'ct20'. Did you mean 'ct200'?"),
        ("ct200:tre", {}, "host ct200 has no instance 'tre'. Did you mean 'tree'?"),
        ("ct200:", {}, "host ct200 has no instance ''."),
        ("ct200", {"budget": 0}, "budget 0 is out of range"),
        ("ct200", {"budget": -1}, "budget -1 is out of range"),
        ("ct200", {"budget": 256}, "budget 256 is out of range"),
        ("ct200", {"topk_cap": 0}, "topk_cap 0 is out of range"),
        ("ct200", {"mode": Mode.AUTO, "widths": (8, 0)}, "widths (8, 0) is out of range"),
        ("ct200", {"mode": Mode.AUTO, "widths": (8, 8)}, "widths [8, 8] names one width twice"),
        ("ct200", {"mode": Mode.AUTO, "states": "records", "widths": (8, 65)}, "states as records with width 65"),
        ("ct200", {"mode": Mode.AUTO, "gpus": (2, 3)}, "2 GPUs in mode auto"),
        ("ct200", {"states": "rings"}, "states 'rings' is neither 'snapshots' nor 'records'"),
        ("ct200", {"gpus": (8,)}, "GPU 8 is out of range: the host has 8 (0 to 7)"),
        ("ct200", {"gpus": (0,)}, "GPU 0 is already instance linear's"),
        ("ct200", {"port": 30000}, "port 30000 is already instance linear's"),
        ("ct200", {"port": 0}, "port 0 must be at least 1"),
        ("ct200", {"allow_hybrid_unsafe": True}, "the unsafe flag is set without a reason"),
        ("ct200", {"allow_hybrid_unsafe": True, "unsafe_reason": " "}, "the unsafe flag is set without a reason"),
        ("one", {"mode": Mode.TREE}, "mode tree has no drafter"),
    ],
)
def test_bad_targets_and_options(target: str, options: dict[str, object], found: str) -> None:
    assert refused(target, **options).found == found


def test_two_changed_instances_conflict_with_each_other() -> None:
    assert "already instance" in refused("two:a", "two:b", port=31000).found


def test_moving_two_instances_apart_is_checked_against_the_change() -> None:
    assert names("two:a", "two:b", mode=Mode.TREE) == ["two:a", "two:b"]


def test_topk_cap_above_budget_is_capped_and_said() -> None:
    selection = resolve_targets(FLEET, ["ct200"], Overrides(budget=8, topk_cap=16))
    assert selection.targets[0].settings.topk_cap == 8
    assert selection.notices == ("ct200:tree: topk-cap 16 is above the budget; capped at 8",)


def test_a_budget_without_a_tree_is_said() -> None:
    selection = resolve_targets(FLEET, ["ct200"], Overrides(mode=Mode.LINEAR, budget=8))
    assert "--budget 8 has no effect in mode linear" in selection.notices[-1]


def test_mode_auto_takes_widths_and_trees_take_a_budget() -> None:
    selection = resolve_targets(FLEET, ["ct200"], Overrides(mode=Mode.AUTO, widths=(4, 16), topk_cap=16))
    [target] = selection.targets
    assert (target.settings.widths, target.settings.nodes, selection.notices) == ((4, 16), 16, ())
    said = resolve_targets(FLEET, ["ct200"], Overrides(mode=Mode.AUTO, budget=8)).notices
    assert said == ("ct200:tree: --budget has no effect in mode auto; there it is --width",)
    said = resolve_targets(FLEET, ["ct200"], Overrides(mode=Mode.TREE, widths=(8,))).notices
    assert said == ("ct200:tree: --width has no effect in mode tree; there it is --budget",)


def test_how_states_are_kept_is_an_option_of_trees() -> None:
    [target] = resolve_targets(FLEET, ["ct200"], Overrides(mode=Mode.TREE, states="records")).targets
    assert target.settings.states == "records"
    [target] = resolve_targets(FLEET, ["ct200"], Overrides(mode=Mode.AUTO, states="records", gpus=(2,))).targets
    assert target.settings.states == "records"
    selection = resolve_targets(FLEET, ["ct200"], Overrides(mode=Mode.SHADOW_LINEAR, states="records"))
    assert "--states records has no effect in mode shadow-linear" in selection.notices[-1]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"budget": 65}, "budget 65 is above 64 nodes: a hybrid target's states are kept as snapshots, not as records"),
        ({"mode": Mode.AUTO, "widths": (16, 128), "gpus": (2,)}, "width 128 is above 64 nodes: "),
        ({"budget": 64}, None),
        ({"budget": 65, "states": "snapshots"}, None),
        ({"budget": 65, "mode": Mode.SHADOW_LINEAR}, None),
    ],
)
def test_a_tree_too_wide_for_records_is_said_where_nobody_chose(options: dict[str, Any], said: str | None) -> None:
    selection = resolve_targets(FLEET, ["ct200"], Overrides(**{"mode": Mode.TREE, **options}))
    assert selection.targets[0].settings.states == options.get("states")
    assert len(selection.notices) == (said is not None)
    assert said is None or selection.notices[0].startswith(f"ct200:tree: {said}")
    assert refused("ct200", mode=Mode.TREE, states="records", budget=65).found == "states as records with budget 65"


def test_one_target() -> None:
    assert one_target(FLEET, "ct200").name == "ct200:tree"
    assert one_target(FLEET, "two:b").name == "two:b"
    with pytest.raises(UsageError, match="means 2 instances"):
        one_target(FLEET, "prod")


def test_a_change_of_several_takes_each_once_and_a_hosts_default() -> None:
    found = changed_targets(FLEET, ["ct200", "two:a", "ct200:tree", "ct200:linear"])
    assert [target.name for target in found] == ["ct200:tree", "two:a", "ct200:linear"]
