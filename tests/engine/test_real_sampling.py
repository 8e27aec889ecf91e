"""The real engine on the CPU, drawing tokens: a seed's draws are plain decoding's in a tree too, and requests with
penalties keep their output beside them. See test_real_hybrid.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import real_engine
from real_engine import Arm, asks

pytestmark = pytest.mark.timeout(1800)  # both arms run in the first test
# A batch in which each request is drawn in another way; the last gets trees of their root alone.
PARAMS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.8, "sampling_seed": 11},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 6, "sampling_seed": 12},
    {"frequency_penalty": 0.7, "repetition_penalty": 1.2, "logit_bias": {"5": 2.0}},
)
ASKS = [{**a, "params": {**a["params"], **p}} for a, p in zip(asks(3, 9), PARAMS, strict=True)]


@pytest.fixture(scope="module")
def results(real_site: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("arms")
    plain = {"job": "tokens", "asks": ASKS, "together": True}
    told = {**plain, "job": "told_tokens", "answers": str(folder / "ar.out.json")}
    arms = {"ar": Arm("ar", (plain,), seeded=True), "tree": Arm("tree", (told,), budget=8, cap=4, seeded=True)}
    return {name: jobs[0] for name, jobs in real_engine.run(arms, real_site, folder).items()}


@pytest.mark.parametrize("row", range(len(ASKS)))
def test_a_drawn_token_is_plain_decodings(results: dict[str, Any], row: int) -> None:
    assert results["tree"]["ids"][row] == results["ar"]["ids"][row]


def test_trees_were_accepted_off_the_spine(results: dict[str, Any]) -> None:
    assert results["tree"]["counters"]["counters"]["accepted_off_spine"] > 2
    assert results["tree"]["rounds"][0] < len(results["ar"]["ids"][0]) - 1
    assert results["tree"]["rounds"][2] == len(results["ar"]["ids"][2]) - 1, "one token a round with penalties"


def test_draws_are_not_the_likeliest_tokens(results: dict[str, Any]) -> None:
    """The seeds act: two requests alike but for the seed part ways."""
    assert results["ar"]["ids"][0] != results["ar"]["ids"][1]
