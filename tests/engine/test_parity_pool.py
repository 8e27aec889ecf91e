"""Arms as processes: order, deadline, what is asked again and what is kept. A small program stands in for an arm."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sglang_ddtree.parity import pool
from sglang_ddtree.parity.plan import Arm

# Answers what its spec's first job says: "hang", "crash", or a result with its name.
FAKE = """
import json, pathlib, sys, time
spec = json.loads(pathlib.Path(sys.argv[1]).read_text())
what = spec["jobs"][0]["say"]
with open(pathlib.Path(sys.argv[1]).parent / "order", "a") as order:
    order.write(what + "\\n")
if what == "hang":
    pathlib.Path(sys.argv[1]).with_name("hangs").touch()
    time.sleep(600)
if what == "crash" or what == "crash-rank-1" and sys.argv[3] == "1":
    sys.exit("Boom: the arm fell over")
if what == "crash-rank-1":
    time.sleep(600)  # it waits for the one that fell
if spec["tp"] > 1:
    pathlib.Path(spec["store"]).open("x") if sys.argv[3] == "0" else None
    sums = [1, 2 if what == "agree" else int(sys.argv[3])]
    found = {"ok": True, "sums": sums, "results": [{"said": what, "ids": [], "rank": int(sys.argv[3])}]}
    pathlib.Path(sys.argv[2]).write_text(json.dumps(found))
    sys.exit()
pathlib.Path(sys.argv[2]).write_text(json.dumps({"ok": True, "results": [{"said": what}]}))
"""


def arm(name: str, say: str, tp: int = 1) -> Arm:
    return Arm(name, "ar", "hybrid", ({"job": "tokens", "say": say},), tp=tp)


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    program = tmp_path / "fake.py"
    program.write_text(FAKE)
    monkeypatch.setattr(pool, "PROGRAM", (str(program),))
    out = tmp_path / "out"

    def ask(arms: list[Arm], seconds: float = 600.0, parallel: int = 1, **more: Any) -> tuple[Any, list[str]]:
        order = out / "order"
        order.unlink(missing_ok=True)
        results = pool.run_arms(arms, out, parallel, time.monotonic() + seconds, **more)
        return results, order.read_text().split() if order.exists() else []

    return ask


def test_arms_run_in_order_and_a_crash_stops_none(asked: Any) -> None:
    results, order = asked([arm("a/1", "one"), arm("a/2", "crash"), arm("a/3", "three")])
    assert order == ["one", "crash", "three"]
    assert [result["ok"] for result in results.values()] == [True, False, True]
    assert "Boom: the arm fell over" in results["a/2"]["error"]
    assert not results["a/2"].get("late")


def test_at_the_deadline_what_runs_is_killed_and_what_waits_is_not_started(
    asked: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, hangs = time.monotonic(), tmp_path / "out" / "hangs"

    def monotonic() -> float:
        return began + 1000.0 * hangs.exists()  # the time is up as soon as it hangs, however long it takes to start

    monkeypatch.setattr(pool, "time", SimpleNamespace(monotonic=monotonic, sleep=time.sleep))
    results, order = asked([arm("a/1", "hang"), arm("a/2", "two")])
    assert order == ["hang"]
    assert "ran out of time" in results["a/1"]["error"]
    assert "not started" in results["a/2"]["error"]
    assert results["a/1"]["late"]
    assert results["a/2"]["late"]


def test_a_second_question_comes_before_what_waits(asked: Any) -> None:
    def more(found: dict[str, Any]) -> list[Arm]:
        return [arm("a/again", "again")] if "a/1" in found else []

    results, order = asked([arm("a/1", "one"), arm("a/2", "two")], more=more)
    assert order == ["one", "again", "two"]
    assert set(results) == {"a/1", "a/2", "a/again"}


def test_an_arm_on_two_gpus_is_two_processes_and_one_answer(asked: Any) -> None:
    arms = [arm("a/1", "agree", 2), arm("a/2", "differ", 2)]
    results, order = asked(arms, sources="x")
    assert sorted(order) == ["agree", "agree", "differ", "differ"]
    assert results["a/1"]["results"][0]["rank"] == 0
    assert (results["a/1"]["ranks"], results["a/1"]["apart"]) == (2, [])
    assert results["a/2"]["apart"] == ["rank 1 parted from rank 0 in tree round 1 of 2"]
    assert asked(arms, sources="x") == (results, [])  # kept, and compared once more
    assert len(asked(arms, sources="y")[1]) == 4  # where ranks met before is no hindrance


@pytest.mark.parametrize(
    ("running", "tp", "room"), [([2], 1, True), ([2], 2, False), ([2, 1], 1, False), ([1], 2, True), ([], 4, True)]
)
def test_as_many_processes_run_at_once_as_were_asked_for(running: list[int], tp: int, room: bool) -> None:
    found: Any = {str(number): [None] * ranks for number, ranks in enumerate(running)}
    assert pool._room(arm("a/1", "one", tp), found, 3) == room


def test_a_rank_that_fell_ends_its_partners(asked: Any) -> None:
    results, _ = asked([arm("a/1", "crash-rank-1", 2), arm("a/2", "two")])
    assert "Boom: the arm fell over" in results["a/1"]["error"]
    assert not results["a/1"].get("late")
    assert results["a/2"]["ok"]


def test_answers_are_kept_for_the_same_question_and_sources_only(asked: Any, tmp_path: Path) -> None:
    arms = [arm("a/1", "one"), arm("a/2", "crash")]
    assert asked(arms, sources="x")[1] == ["one", "crash"]
    kept, order = asked(arms, sources="x")
    assert order == ["crash"]  # a failure is no answer
    assert kept["a/1"]["results"] == [{"said": "one"}]
    assert asked([arm("a/1", "other"), arm("a/2", "crash")], sources="x")[1] == ["other", "crash"]
    assert asked([arm("a/1", "other")], sources="y")[1] == ["other"]
    assert asked([arm("a/1", "other")])[1] == ["other"]  # nobody asked to keep
    spec = json.loads((tmp_path / "out" / "a_1.spec.json").read_text())
    assert spec["gpu_lock"] == str(tmp_path / "out" / "gpu.lock")
