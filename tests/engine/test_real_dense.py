"""The real engine on a dense target, on the CPU. See test_real_hybrid.py."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import real_engine
from real_engine import Arm, asks

pytestmark = pytest.mark.timeout(1800)  # all arms run in the first test
ASKS = asks(2, 12)
LIVELY = 7  # weights under which the small model does not repeat itself: a repeated token hides a wrong slot


@pytest.fixture(scope="module")
def results(real_site: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("arms")
    plain = {"job": "tokens", "asks": ASKS, "together": True}
    told = {**plain, "job": "told_tokens", "answers": str(folder / "ar.out.json")}
    arms = {
        "ar": Arm("ar", (plain,)),
        "dflash": Arm("dflash", (plain,)),
        "linear": Arm("linear", (plain,)),
        "tree": Arm("tree", (told,), budget=7),
        "broken": Arm("tree", (told,), budget=7, fault="keys_left_in_place"),
    }
    arms = {name: dataclasses.replace(arm, target="dense", seed=LIVELY) for name, arm in arms.items()}
    return {name: jobs[0] for name, jobs in real_engine.run(arms, real_site, folder).items()}


def test_every_mode_gives_plain_decodings_tokens(results: dict[str, Any]) -> None:
    for name in ("dflash", "linear", "tree"):
        assert results[name]["ids"] == results["ar"]["ids"], name
    assert results["linear"]["rounds"] == results["dflash"]["rounds"]
    assert results["tree"]["counters"]["counters"]["accepted_off_spine"] > 2


def test_memory_is_back_where_it_was(results: dict[str, Any]) -> None:
    for name in ("ar", "dflash", "linear", "tree"):
        assert results[name]["memory_after"] == results[name]["memory_before"], name


def test_a_broken_round_is_seen(results: dict[str, Any]) -> None:
    assert results["broken"]["ids"] != results["ar"]["ids"]
