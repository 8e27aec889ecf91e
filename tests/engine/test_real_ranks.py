"""The real engine on two ranks: a scheduler in each of two processes, half of the heads and of the vocabulary in each,
gloo between them. Float32, so a tree's tokens must be plain decoding's on one rank, one by one.

Three requests, two at a time; the drafter is told the answers, at changing ranks of its distribution, so that accepted
paths leave the spine and end at different depths.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import real_engine
from real_engine import Arm, asks
from sglang_ddtree.parity.verdicts import apart

ASKS = [{**ask, "params": {**ask["params"], "max_new_tokens": n}} for ask, n in zip(asks(3, 0), (5, 9, 7), strict=True)]
pytestmark = pytest.mark.timeout(1800)  # all arms run in the first test
PLAIN = {"job": "tokens", "asks": ASKS, "together": True}
DRAWN = {"job": "tokens", "asks": asks(2, 5, temperature=1.0), "together": True}  # a seed of its own on each rank
RANKS = 2
TREES = {"tree": "snapshots", "records": "records"}  # arms, by how they keep recurrent states


@pytest.fixture(scope="module")
def answers(real_site: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """By arm, what each rank answered."""
    folder = tmp_path_factory.mktemp("ranks")
    told = {"job": "told_tokens", "asks": ASKS, "together": True, "answers": str(folder / "ar.out.json")}
    shape: dict[str, Any] = {"target": "hybrid-80", "saved": True, "requests": 2}
    arms = {"ar": Arm("ar", (PLAIN,), **shape)}
    for name, kept in TREES.items():
        jobs = (told, DRAWN) if name == "tree" else (told,)
        arms[name] = Arm("tree", jobs, budget=7, cap=4, tp=RANKS, states=kept, **shape)
    real_engine.run(arms, real_site, folder)
    found = {name: [json.loads((folder / f"{name}.out.json").read_text())] for name in arms}
    for name in TREES:
        found[name].append(json.loads((folder / f"{name}.out.json.1").read_text()))
    return found


@pytest.mark.parametrize("arm", TREES)
def test_two_ranks_emit_what_one_rank_decodes(answers: dict[str, Any], arm: str) -> None:
    (plain,) = answers["ar"]
    assert any(token >= 64 for ids in plain["results"][0]["ids"] for token in ids), "else rank 1 had no say"
    for rank in answers[arm]:
        assert rank["states"] == TREES[arm]
        assert rank["results"][0]["ids"] == plain["results"][0]["ids"]
        assert rank["results"][0]["finish"] == plain["results"][0]["finish"]
        assert not rank["results"][0]["leaked"]


@pytest.mark.parametrize("arm", TREES)
def test_paths_beside_the_spine_were_taken_on_both(answers: dict[str, Any], arm: str) -> None:
    counted = [rank["results"][0]["counters"]["counters"] for rank in answers[arm]]
    assert counted[0] == counted[1]
    assert counted[0]["accepted_off_spine"] > 0
    assert counted[0]["accepted_per_tree"] > 0.5


def test_draws_without_a_seed_are_the_same_on_both(answers: dict[str, Any]) -> None:
    drawn = [rank["results"][1] for rank in answers["tree"]]
    assert drawn[0]["ids"] == drawn[1]["ids"]
    assert all(len(ids) == 5 for ids in drawn[0]["ids"])


@pytest.mark.parametrize("arm", TREES)
def test_every_round_of_both_had_the_same_trees_targets_walks_and_slots(answers: dict[str, Any], arm: str) -> None:
    first, second = answers[arm]
    assert len(first["sums"]) >= 4
    assert apart([first, second]) == []
    assert len(set(first["sums"])) == len(first["sums"])
