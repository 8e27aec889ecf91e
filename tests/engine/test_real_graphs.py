"""Decode graphs in the real engine on the CPU: SGLang's own graph runners over passes that are recorded and replayed.

Two requests run in a graph of three, so that one is padding, and the one that is left at the end in a graph of one.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import graphs_on_cpu
import pytest
import real_engine
import torch
from real_engine import Arm

ASKS = [{**ask, "params": {**ask["params"], "max_new_tokens": new}}
        for ask, new in zip(real_engine.asks(2, 0), (7, 14), strict=True)]  # fmt: skip
WIDTHS = (2, 4, 9)


def arms(folder: Path) -> dict[str, Arm]:
    told = {"job": "told_tokens", "asks": ASKS, "together": True, "answers": str(folder / "ar.out.json")}
    kept = Arm("tree", (told,), budget=6, graphs=(1, 3), states="records", overlap=True)
    timed = {**told, "job": "timed_and_told_tokens"}
    return {
        "ar": Arm("ar", ({"job": "tokens", "asks": ASKS, "together": True},)),
        "records": kept,
        "auto": Arm("auto", (timed,), widths=WIDTHS, graphs=(1, 3)),
        "auto-records": Arm("auto", (timed,), widths=WIDTHS, graphs=(1, 3), states="records", overlap=True),
        "replaced": dataclasses.replace(kept, fault="trees_replaced_after_capture"),
    }


@pytest.fixture(scope="module")
def results(real_site: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("arms")
    return {name: jobs[0] for name, jobs in real_engine.run(arms(folder), real_site, folder, limit=1500).items()}


@pytest.mark.timeout(1800)  # all arms run in the first test
@pytest.mark.parametrize("name", ["records", "auto", "auto-records"])
def test_replayed_rounds_give_plain_decodings_tokens(name: str, results: dict[str, Any]) -> None:
    found = results[name]
    assert found["ids"] == results["ar"]["ids"]
    assert found["counters"]["counters"]["accepted_off_spine"] >= 1
    assert found["memory_after"] == found["memory_before"]
    assert set(found["replays"]) == {"1", "3"}
    # The drafter's graph and the target's in every round.
    assert sum(found["replays"].values()) >= 2 * max(found["rounds"])


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ["auto", "auto-records"])
def test_every_width_was_replayed_at_the_start_and_then_in_turn(name: str, results: dict[str, Any]) -> None:
    assert results[name]["batches"] == [1, 3]
    assert set(results[name]["counters"]["auto"]["rounds"]) == {*map(str, WIDTHS), "chain"}
    assert min(results[name]["counters"]["auto"]["rounds"].values()) >= 1


@pytest.mark.timeout(1800)
def test_a_buffer_that_is_replaced_after_capture_is_seen(results: dict[str, Any]) -> None:
    assert results["replaced"]["ids"] != results["ar"]["ids"]


def test_a_recorded_pass_runs_again_in_the_same_memory() -> None:
    static, flag = torch.ones(3), [True]
    with graphs_on_cpu.Recorder() as pass_:
        doubled = static * 2 if flag[0] else static * 0
        rows = doubled.view(3, 1)[1:]
        total = rows.sum()
        static.add_(1)
    flag[0] = False
    where = total.data_ptr()
    for step in pass_.steps:
        step()
    assert doubled.tolist() == [4.0, 4.0, 4.0]
    assert (total.item(), total.data_ptr(), static.tolist()) == (8.0, where, [3.0, 3.0, 3.0])


@pytest.mark.parametrize(
    "forbidden",
    [
        lambda x: x.sum().item(),
        lambda x: bool((x > 0).all()),
        lambda x: x.tolist(),
        lambda x: x[x > 0],
        lambda x: torch.tensor([1.0, 2.0]) + x[:2],
    ],
    ids=["item", "bool", "tolist", "mask", "host-data"],
)
def test_what_no_graph_can_hold_is_refused(forbidden: Any) -> None:
    with pytest.raises(graphs_on_cpu.CaptureError, match="in a captured pass"), graphs_on_cpu.Recorder():
        forbidden(torch.ones(3))
