"""The benchmark harness: figures from blocks, the parity verdict, the page. No server is started here."""

from __future__ import annotations

import json
import math
import re
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from benchmarks.engine import bench, launch, measure
from benchmarks.engine.client import Client, ServerError, grown
from benchmarks.engine.measure import Arm, Grid, load_prompts, plan
from benchmarks.engine.page import render
from benchmarks.engine.parity import Law, difference, judge
from benchmarks.engine.summary import accept_length, cells, merge, rate, ratio
from benchmarks.engine.svg import span

ROOT = Path(__file__).parents[2]
LAW = Law(tokens=(5, 6, 7), best=((5, 9), (6, 8), (7, 1)), gaps=(2.0, 0.1, 3.0))


def sample(prompt: int, decode_s: float, histogram: tuple[int, ...] = (1, 2)) -> dict[str, Any]:
    return {
        "prompt": prompt, "tokens": 21, "first_tokens": 1, "ttft_s": 0.1, "decode_s": decode_s,
        "e2e_s": decode_s + 0.1, "rounds": sum(histogram), "histogram": list(histogram),
    }  # fmt: skip


def result(speeds: dict[str, float]) -> dict[str, Any]:
    """A result whose arms decode 20 tokens in 1 / speed seconds, prompts varying by a quarter."""
    blocks = [
        {
            "arm": arm, "temperature": 0.0, "concurrency": 1, "repeat": repeat, "tokens": 84, "wall_s": 4.0,
            "samples": [sample(p, (1 + p / 12) / speed, () if arm == "ar" else (1, 2)) for p in range(4)],
        }
        for arm, speed in speeds.items() for repeat in range(2)
    ]  # fmt: skip
    return {
        "title": "A test", "when": "2026-01-01T00:00:00Z", "command": "bench", "baseline": "linear", "prompt_set": "x",
        "host": {"gpu": [], "cpu": "none", "python": "3.11"}, "grid": {"concurrencies": [1], "tokens": 21},
        "prompts": [{"category": c} for c in ("code", "prose", "code", "prose")],
        "arms": {arm: {"server": {}, "ddtree": None} for arm in speeds}, "trees": dict.fromkeys(speeds),
        "parity": [{"arm": arm, "identical": 4, "near_ties": [], "wrong": []} for arm in speeds], "blocks": blocks,
    }  # fmt: skip


def test_a_difference_is_a_near_tie_only_between_the_two_best() -> None:
    assert difference(LAW, (5, 6, 7)) is None
    tie = difference(LAW, (5, 8, 7))
    assert tie is not None
    assert (tie["at"], tie["near_tie"]) == (1, True)
    third = difference(LAW, (5, 4, 7))
    assert third is not None
    assert not third["near_tie"]
    clear = difference(LAW, (9, 6, 7))
    assert clear is not None
    assert not clear["near_tie"], "both on top, but far apart"
    short = difference(LAW, (5, 6))
    assert short is not None
    assert not short["near_tie"]


def test_a_wrong_answer_makes_the_arm_red() -> None:
    assert not judge("a", [LAW], [(0, (5, 6, 7)), (0, (5, 8, 1))]).red
    assert judge("a", [LAW], [(0, (5, 6, 7)), (0, (9, 6, 7))]).red


def test_rates_leave_out_the_prompt_and_what_came_with_it() -> None:
    assert rate(sample(0, 2.0)) == 10.0
    assert math.isnan(rate({**sample(0, 2.0), "first_tokens": 21}))


def test_ratios_are_paired_by_prompt() -> None:
    slow = {0: 10.0, 1: 100.0, 2: 1000.0}
    found = ratio({p: 1.2 * v for p, v in slow.items()}, slow)
    assert found is not None
    assert found.value == pytest.approx(1.2)
    assert (found.low, found.high) == (pytest.approx(1.2), pytest.approx(1.2))
    assert found.certain
    mixed = ratio({0: 8.0, 1: 120.0, 2: 1000.0}, slow)
    assert mixed is not None
    assert not mixed.certain


def test_accept_length_counts_the_targets_own_token() -> None:
    assert accept_length([sample(0, 1.0, (1, 0, 1))]) == pytest.approx(2.0)
    assert accept_length([{**sample(0, 1.0, ()), "rounds": 0}]) is None
    assert merge([(1, 2), (0, 0, 5)]) == (1, 2, 5)


def test_cells_and_the_page_say_who_is_faster() -> None:
    measured = result({"ar": 1.0, "linear": 2.0, "tree-16": 2.4})
    by_arm = {cell.arm: cell for cell in cells(measured)}
    tree = by_arm["tree-16"].speedup
    assert tree is not None
    assert tree.value == pytest.approx(1.2)
    assert by_arm["linear"].speedup is None
    assert by_arm["linear"].speedup_by_category == {}
    assert by_arm["linear"].accept_length == pytest.approx(5 / 3)
    assert by_arm["ar"].accept_length is None
    kinds = {kind: round(found.value, 6) for kind, found in by_arm["tree-16"].speedup_by_category.items()}
    assert kinds == {"code": 1.2, "prose": 1.2}
    page = render([measured])
    assert "the fastest tree (tree-16) is faster than linear: 1.200 of its speed" in page
    assert "Slower than linear" not in page
    assert "Speed against linear by kind of prompt, 1 user" in page
    assert not re.search(r"(src|href)=|<script|@import|url\(", page), "the page needs nothing from elsewhere"


def test_the_page_also_says_which_trees_lose_and_what_trees_were_like() -> None:
    measured = result({"ar": 1.0, "linear": 2.0, "tree-16": 2.4, "tree-64": 1.5})
    counters = {"trees": 40, "nodes_per_tree": 63.5, "accepted_per_tree": 1.5, "off_spine_share": 0.25}
    measured["trees"]["tree-64"] = {"budget": 64, "counters": counters}
    page = render([measured])
    assert "Slower than linear: tree-64 (0.750)." in page
    assert "<td>tree-64</td><td>40</td><td>63.5</td><td>1.50</td><td>25.0%</td>" in page


@pytest.mark.parametrize(
    ("low", "high", "ends"),
    [(0.9, 1.1, (0.9, 1.1)), (0.73, 1.3, (0.6, 1.4)), (0.9, 1.48, (0.8, 1.6)), (0.2, 31.0, (0.2, 31.0))],
)
def test_an_axis_of_ratios_ends_at_round_numbers_around_them(
    low: float, high: float, ends: tuple[float, float]
) -> None:
    assert span(low, high) == pytest.approx(ends)


def test_times_of_an_engine_that_is_not_real_are_left_out() -> None:
    measured = result({"ar": 1.0, "linear": 2.0, "tree-16": 2.4})
    measured["arms"]["ar"]["server"]["stand_in"] = "not a real one"
    page = render([measured])
    assert "not a real one" in page
    assert "tok/s" not in page
    assert "of its speed" not in page


def test_arms_take_turns_and_turn_round() -> None:
    arms = [Arm("a", ""), Arm("b", "")]
    order = [(c, r, arm.name) for _, c, r, arm in plan(Grid(temperatures=(0.0,), concurrencies=(1,), repeats=2), arms)]
    assert order == [(1, 0, "a"), (1, 0, "b"), (1, 1, "b"), (1, 1, "a")]


def test_prompts_are_mixed_and_of_four_kinds() -> None:
    first = load_prompts(count=8)
    assert [p.category for p in first[:4]] == ["code", "prose", "dialogue", "repetitive"]
    assert len({p.text for p in load_prompts()}) == 32


def test_streams_with_all_ids_and_with_new_ones_read_alike() -> None:
    assert grown([1], [1, 2, 3], 3) == grown([1], [2, 3], 3) == [1, 2, 3]


def test_a_command_line_is_common_flags_and_an_arms_own() -> None:
    table = {"launch": ["python3", "-m", "m"], "common": ["--a"], "speculation": ["--s"]}
    assert launch.command(table, {"port": 7}) == ["python3", "-m", "m", "--a", "--port", "7"]
    assert launch.command(table, {"port": 7, "speculation": ["--t"]})[-2:] == ["--s", "--t"]


class Liar(BaseHTTPRequestHandler):
    """Answers /generate with other tokens when it streams than when it is asked for log-probabilities."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        meta: dict[str, Any] = {"completion_tokens": 2}
        if body.get("stream"):
            data = f"data: {json.dumps({'output_ids': [3, 9], 'meta_info': meta})}\n\ndata: [DONE]\n\n"
        else:
            meta["output_top_logprobs"] = [[[-0.1, 3, None], [-3.0, 4, None]], [[-0.1, 3, None], [-3.0, 4, None]]]
            data = json.dumps({"output_ids": [3, 3], "meta_info": meta})
        self.send_response(200)
        self.end_headers()
        self.wfile.write(data.encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def liar() -> Any:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Liar)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_nothing_is_written_while_parity_is_red(liar: str, tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "result.json"
    args = bench.arguments(["run", "--arm", f"ar={liar}", "--out", str(out), "--prompts", "1", "--concurrencies", "1"])
    assert bench.run([Arm("ar", liar)], args) == 1
    assert "parity is red, nothing is measured" in capsys.readouterr().out
    assert not out.exists()


def test_a_server_that_is_not_there_is_an_error_with_its_address() -> None:
    with socket.socket() as taken:  # nobody else gets the port, and nobody listens on it
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ServerError, match=url):
            Client(url).get("/server_info")


def test_the_committed_page_is_drawn_from_the_committed_result() -> None:
    names = ("gpu/benchmark.json", "pair-cpu.json")
    results = [json.loads((ROOT / "benchmarks/results" / name).read_text()) for name in names]
    assert render(results) == (ROOT / "docs/benchmark.html").read_text()
    assert not any(judged["wrong"] for result in results for judged in result["parity"])


def test_when_time_is_up_whole_rounds_are_left_out_for_every_arm(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def block(arm: Arm, *_cell: Any) -> dict[str, Any]:
        asked.append(arm.name)
        return {"wall_s": 1.0, "samples": [{"tokens": [1, 2]}]}

    monkeypatch.setattr(measure, "block", block)
    arms = [Arm("ar", "http://a"), Arm("linear", "http://b")]
    grid = Grid(temperatures=(0.0, 1.0), concurrencies=(1, 8), repeats=2, tokens=2)
    said: list[str] = []
    # two warm-ups, then two blocks a round: the third round begins in time, the fourth does not
    blocks = measure.measure(arms, [], grid, said.append, lambda: len(asked) >= 2 + 3 * 2)
    assert [(b["concurrency"], b["repeat"], b["arm"]) for b in blocks] == [
        (1, 0, "ar"), (1, 0, "linear"), (1, 1, "linear"), (1, 1, "ar"), (8, 0, "ar"), (8, 0, "linear"),
    ]  # fmt: skip
    assert said[-1] == "time is up before T=0 x8 #1"
    assert measure.measured(grid, blocks) == Grid(temperatures=(0.0,), concurrencies=(1, 8), repeats=2, tokens=2)
    whole = measure.measure(arms, [], grid, said.append)
    assert len(whole) == 16
    assert measure.measured(grid, whole) == grid
