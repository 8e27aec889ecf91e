"""The prefix cache on the real engine, on the CPU: as test_real_hybrid.py, with states that SGLang keeps at every 64th
token, on the paths of trees, and second turns that go on from there.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import real_engine
from real_engine import Arm

pytestmark = pytest.mark.timeout(1300)
INTERVAL = 64
ASKS = real_engine.asks(2, 20, length=50)
TAIL = [5, 6, 7]
FAULT = "kept_behind_the_path"
EXTRA = (
    *("--mamba-radix-cache-strategy", "extra_buffer", "--mamba-track-interval", str(INTERVAL)),
    *("--max-mamba-cache-size", "12"),
)


def arms(folder: Path) -> dict[str, Arm]:
    turns = {"asks": ASKS, "tail": TAIL}
    told = {"job": "told_turns", **turns, "answers": str(folder / "ar.out.json")}
    tree = Arm("tree", (told,), budget=6, requests=1, extra=EXTRA, cached=True)
    return {
        "ar": Arm("ar", ({"job": "multi_turn", **turns},), requests=1, extra=EXTRA, cached=True),
        "snapshots": tree,
        "records": dataclasses.replace(tree, states="records"),
        "snapshots, late": dataclasses.replace(tree, fault=FAULT),
        "records, late": dataclasses.replace(tree, states="records", fault=FAULT),
    }


@pytest.fixture(scope="module")
def results(real_site: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """By arm: what its job gave, and what the server said of how it keeps states."""
    folder = tmp_path_factory.mktemp("arms")
    ran = real_engine.run(arms(folder), real_site, folder, limit=1200)
    said = {name: json.loads((folder / f"{name}.out.json").read_text()) for name in ran}
    return {name: {**jobs[0], **{key: said[name][key] for key in ("states", "prefix_cache")}}
            for name, jobs in ran.items()}  # fmt: skip


def test_every_second_turn_goes_on_from_a_state_of_its_first_answer(results: dict[str, Any]) -> None:
    for found in results.values():
        assert found["prefix_cache"] == "extra_buffer"
        assert found["cached"] == [INTERVAL] * len(ASKS)
        assert all(prompt < INTERVAL for prompt in found["prompts"])


@pytest.mark.parametrize("kept", ["snapshots", "records"])
def test_second_turns_get_plain_decodings_tokens(results: dict[str, Any], kept: str) -> None:
    assert results[kept]["states"] == kept
    assert results[kept]["ids"] == results["ar"]["ids"]
    assert results[kept]["finish"] == results["ar"]["finish"]
    counters = results[kept]["counters"]["counters"]
    assert counters["accepted_per_tree"] > 1
    assert counters["accepted_off_spine"] > 2


@pytest.mark.parametrize("kept", ["snapshots", "records"])
def test_a_state_from_behind_its_place_is_seen_in_the_second_turn(results: dict[str, Any], kept: str) -> None:
    wrong, right = results[f"{kept}, late"]["ids"], results["ar"]["ids"]
    assert wrong[: len(ASKS)] == right[: len(ASKS)]
    assert wrong[len(ASKS) :] != right[len(ASKS) :]
