"""Records on the real engine, on the CPU: as test_real_hybrid.py, with this package's kernels in the place of SGLang's
recurrence and convolution, and no snapshot anywhere.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import real_engine
from real_engine import Arm
from test_real_hybrid import ASKS, PLAIN

pytestmark = pytest.mark.timeout(1300)
FAULTS = ("commit_of_the_root", "records_in_a_chain")
IDLE_FAULT = "rows_in_a_chain"  # in the links, which only SGLang's kernels read
# Budget, cap, fault, how states are to be kept: above the block's depths, as a server keeps them by itself; and below.
CELLS = {"records-9-4": (9, 4, None, None), "records-3-2": (3, 2, IDLE_FAULT, "records")}


def arms(folder: Path) -> dict[str, Arm]:
    told = {"job": "told_tokens", "asks": ASKS, "together": True, "answers": str(folder / "ar.out.json")}
    tree = Arm("tree", (told,), budget=6, requests=2, states="records")
    made = {"ar": Arm("ar", (PLAIN,), requests=2)}
    made |= {
        name: dataclasses.replace(tree, budget=b, cap=c, fault=f, states=asked)
        for name, (b, c, f, asked) in CELLS.items()
    }
    return made | {fault: dataclasses.replace(tree, fault=fault) for fault in FAULTS}


@pytest.fixture(scope="module")
def results(real_site: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """By arm: what its job gave, and how it kept states by what it had allocated."""
    folder = tmp_path_factory.mktemp("arms")
    ran = real_engine.run(arms(folder), real_site, folder, limit=1200)
    kept = {name: json.loads((folder / f"{name}.out.json").read_text())["states"] for name in ran}
    return {name: {**jobs[0], "states": kept[name]} for name, jobs in ran.items()}


@pytest.mark.parametrize("cell", CELLS)
def test_a_tree_gives_plain_decodings_tokens(results: dict[str, Any], cell: str) -> None:
    assert results[cell]["states"] == "records"
    assert results[cell]["ids"] == results["ar"]["ids"]
    assert results[cell]["finish"] == results["ar"]["finish"]
    assert results[cell]["counters"]["counters"]["accepted_per_tree"] > 0.5, "else nothing but roots was committed"


def test_paths_leave_the_spine(results: dict[str, Any]) -> None:
    assert results["records-9-4"]["counters"]["counters"]["accepted_off_spine"] > 5


@pytest.mark.parametrize("cell", CELLS)
def test_memory_is_back_where_it_was(results: dict[str, Any], cell: str) -> None:
    assert results[cell]["memory_after"] == results[cell]["memory_before"]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_round_is_seen(results: dict[str, Any], fault: str) -> None:
    assert results[fault]["states"] == "records"
    assert results[fault]["ids"] != results["ar"]["ids"]
