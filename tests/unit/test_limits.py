"""The limits of a tree: written once here, and held equal to the engine's own."""

from __future__ import annotations

import ast
import importlib.util
import sys
from types import ModuleType
from typing import get_args

import pytest
from pydantic import ValidationError

from ddtree_ops.data import data_dir
from ddtree_ops.engine import engine_module
from ddtree_ops.lab.standin import settings as standin
from ddtree_ops.model import MAX_BUDGET, MAX_RECORDS_BUDGET, MAX_TOPK_CAP, Mode, Settings, States, most_nodes


@pytest.fixture(scope="module")
def engine() -> ModuleType:
    """``sglang_ddtree.config``, without the package around it, which needs torch."""
    path = data_dir("patches") / "sglang-ddtree/src/sglang_ddtree/config.py"
    spec = importlib.util.spec_from_file_location("test_limits_engine_config", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def ours(**size: int) -> bool:
    try:
        Settings(instance="tree", mode=Mode.TREE, gpus=(0,), port=30000, model="/m", drafter="/d", **size)
    except ValidationError:
        return False
    return True


def theirs(engine: ModuleType, **size: int) -> bool:
    try:
        engine.DDTreeConfig(mode="tree", **size)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("name", ["budget", "topk_cap"])
def test_the_inventory_takes_what_the_engine_takes_and_nothing_else(engine: ModuleType, name: str) -> None:
    around = range(-1, MAX_BUDGET + 20)
    assert [ours(**{name: value}) for value in around] == [theirs(engine, **{name: value}) for value in around]


def test_records_are_kept_of_trees_as_wide_as_the_engine_says() -> None:
    tree = ast.parse((data_dir("patches") / "sglang-ddtree/src/sglang_ddtree/states.py").read_text())
    values = {ast.unparse(n.targets[0]): ast.unparse(n.value) for n in tree.body if isinstance(n, ast.Assign)}
    assert values["MAX_BUDGET"] == str(MAX_RECORDS_BUDGET)
    assert values["(SNAPSHOTS, RECORDS)"] == str(get_args(States))
    rule = engine_module("keeping")
    assert get_args(States) == (rule.SNAPSHOTS, rule.RECORDS)


def test_the_stand_in_has_the_same_limits() -> None:
    assert (standin.MAX_BUDGET, standin.MAX_TOPK_CAP) == (MAX_BUDGET, MAX_TOPK_CAP)
    assert standin.MAX_RECORDS_BUDGET == MAX_RECORDS_BUDGET


@pytest.mark.parametrize(
    ("cap", "block", "nodes"), [(1, 16, 15), (2, 4, 2 + 4 + 8), (3, 2, 3), (16, 1, 0), (8, 16, MAX_BUDGET)]
)
def test_what_a_tree_can_hold(cap: int, block: int, nodes: int) -> None:
    assert most_nodes(cap, block) == nodes
