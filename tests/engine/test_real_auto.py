"""Mode auto in the real engine on the CPU: SGLang's scheduler and models on a hybrid target, and a width that changes
every round. What test_real_hybrid shows of trees of one width must hold across the changes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import real_engine
from real_engine import Arm
from test_real_hybrid import ASKS, PLAIN

pytestmark = pytest.mark.timeout(1800)  # all arms run in the first test
WIDTHS = (2, 4, 9)  # beside the chain of the block's four depths


@pytest.fixture(scope="module")
def results(real_site: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("arms")
    told = {"job": "told_tokens", "asks": ASKS, "together": True, "answers": str(folder / "ar.out.json")}
    arms = {
        "ar": Arm("ar", (PLAIN,), requests=2),
        "auto": Arm("auto", (told,), widths=WIDTHS, requests=2),
        "broken": Arm("auto", (told,), widths=WIDTHS, requests=2, fault="rows_in_a_chain"),
    }
    ran = real_engine.run(arms, real_site, folder)
    return {name: jobs[0] for name, jobs in ran.items()}


def test_a_width_that_changes_every_round_gives_plain_decodings_tokens(results: dict[str, Any]) -> None:
    assert results["auto"]["ids"] == results["ar"]["ids"]
    assert results["auto"]["finish"] == results["ar"]["finish"]
    shown = results["auto"]["counters"]
    assert set(shown["auto"]["rounds"]) == {*map(str, WIDTHS), "chain"}
    assert min(shown["auto"]["rounds"].values()) >= 2
    assert shown["counters"]["accepted_off_spine"] >= 3


def test_memory_is_back_where_it_was(results: dict[str, Any]) -> None:
    assert results["auto"]["memory_after"] == results["auto"]["memory_before"]


def test_a_node_that_continues_its_siblings_state_is_seen(results: dict[str, Any]) -> None:
    assert results["broken"]["ids"] != results["ar"]["ids"]
