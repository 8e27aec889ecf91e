"""The real engine on a hybrid target, on the CPU: SGLang's scheduler, pools, model, attention and recurrence with the
plugin's worker and kernels. Float32, so a tree's tokens must be plain decoding's, one by one.

The drafter has random weights; where it is told the answers it puts them at changing ranks, so that paths leave the
spine. Nothing it says may change what is emitted.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import real_engine
from real_engine import Arm, asks

pytestmark = pytest.mark.timeout(1800)  # all arms run in the first test
# Two run at a time, of different lengths; the third takes the slot of the first that ends.
ASKS = [
    {**ask, "params": {**ask["params"], "max_new_tokens": n}} for ask, n in zip(asks(3, 0), (7, 14, 11), strict=True)
]
PLAIN = {"job": "tokens", "asks": ASKS, "together": True}
CELLS = {"tree-3-2": (3, 2), "tree-4-1": (4, 1), "tree-9-4": (9, 4)}  # below the block's depths, a chain, above
FAULTS = ("commit_of_the_root", "rows_in_a_chain", "keys_left_in_place")


def arms(folder: Path) -> dict[str, Arm]:
    told = {"job": "told_tokens", "asks": ASKS, "together": True, "answers": str(folder / "ar.out.json")}
    alone = {"asks": ASKS[1:2]}
    made = {name: Arm(name, (PLAIN,), requests=2) for name in ("ar", "dflash", "linear")}
    made["shadow-linear"] = Arm("shadow-linear", ({**PLAIN, **alone},), requests=2)
    made |= {name: Arm("tree", (told,), budget=b, cap=c, requests=2) for name, (b, c) in CELLS.items()}
    made["overlap"] = Arm("tree", (told,), budget=6, requests=2, overlap=True)
    made |= {fault: Arm("tree", ({**told, **alone},), budget=6, cap=4, requests=2, fault=fault) for fault in FAULTS}
    return made


@pytest.fixture(scope="module")
def results(real_site: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("arms")
    ran = real_engine.run(arms(folder), real_site, folder)
    return {name: jobs[0] for name, jobs in ran.items()}


def test_linear_is_sglangs_own_dflash_token_for_token(results: dict[str, Any]) -> None:
    for shown in ("ids", "rounds"):
        assert results["linear"][shown] == results["dflash"][shown]
        assert results["shadow-linear"][shown] == results["dflash"][shown][1:2]
    assert results["dflash"]["ids"] == results["ar"]["ids"]


@pytest.mark.parametrize("cell", CELLS)
def test_a_tree_gives_plain_decodings_tokens(results: dict[str, Any], cell: str) -> None:
    assert results[cell]["ids"] == results["ar"]["ids"]
    assert results[cell]["finish"] == results["ar"]["finish"]
    counters = results[cell]["counters"]["counters"]
    assert counters["accepted_per_tree"] > 0.5, "else nothing but roots was committed"


def test_paths_leave_the_spine(results: dict[str, Any]) -> None:
    assert results["tree-9-4"]["counters"]["counters"]["accepted_off_spine"] > 5
    assert results["tree-4-1"]["counters"]["counters"]["accepted_off_spine"] == 0


def test_the_overlapped_loop_gives_the_same_tokens(results: dict[str, Any]) -> None:
    """The scheduler prepares a round before it has the last one's result: lengths and slots lag as on a GPU."""
    assert results["overlap"]["overlap"]
    assert not results["tree-9-4"]["overlap"]
    assert results["overlap"]["ids"] == results["ar"]["ids"]


@pytest.mark.parametrize("name", ["ar", "dflash", "linear", "shadow-linear", "overlap", *CELLS])
def test_memory_is_back_where_it_was(results: dict[str, Any], name: str) -> None:
    assert results[name]["memory_after"] == results[name]["memory_before"]
    assert set(results[name]["memory_before"]) == {"kv", "requests", "states", "cached"}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_round_is_seen(results: dict[str, Any], fault: str) -> None:
    assert results[fault]["ids"] != results["ar"]["ids"][1:2]
