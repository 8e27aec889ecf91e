"""Mode auto in the real engine on the CPU: SGLang's scheduler and models on a hybrid target, and a width that changes
every round. What test_real_hybrid shows of trees of one width must hold across the changes.
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

pytestmark = pytest.mark.timeout(1800)  # all arms run in the first test
WORK = ("auto", "records")  # snapshots, and records with rounds prepared ahead of results
BROKEN = ("broken", "records_in_a_chain", "records_of_the_widest")
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
    records = Arm("auto", (told,), widths=WIDTHS, requests=2, states="records", overlap=True)
    arms |= {"records": records}
    arms |= {fault: dataclasses.replace(records, fault=fault) for fault in BROKEN if fault not in arms}
    ran = real_engine.run(arms, real_site, folder)
    kept = {name: json.loads((folder / f"{name}.out.json").read_text())["states"] for name in ran}
    return {name: {**jobs[0], "states": kept[name]} for name, jobs in ran.items()}


@pytest.mark.parametrize("arm", WORK)
def test_a_width_that_changes_every_round_gives_plain_decodings_tokens(results: dict[str, Any], arm: str) -> None:
    assert results[arm]["ids"] == results["ar"]["ids"]
    assert results[arm]["finish"] == results["ar"]["finish"]
    assert results[arm]["states"] == ("records" if arm == "records" else "snapshots")
    shown = results[arm]["counters"]
    assert set(shown["auto"]["rounds"]) == {*map(str, WIDTHS), "chain"}
    assert min(shown["auto"]["rounds"].values()) >= 2
    assert shown["counters"]["accepted_off_spine"] >= 3


@pytest.mark.parametrize("arm", WORK)
def test_memory_is_back_where_it_was(results: dict[str, Any], arm: str) -> None:
    assert results[arm]["memory_after"] == results[arm]["memory_before"]


@pytest.mark.parametrize("arm", BROKEN)
def test_a_broken_round_is_seen(results: dict[str, Any], arm: str) -> None:
    """A node continues its sibling's state, or a commit reads a narrow round's records as the widest's."""
    assert results[arm]["ids"] != results["ar"]["ids"]
