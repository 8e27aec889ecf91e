"""A GPU session's report becomes the tables of a page; what is written around them stays."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import collect, pack, tables

STAGES_US = {
    "draft": 900.4,
    "head": 620.0,
    "build": 30.0,
    "verify": 3900.0,
    "commit": 150.0,
    "gaps": 80.0,
    "rounds": 20,
}


def timed(batch: int, ms: float) -> dict[str, Any]:
    return {"job": "timed", "batch": batch, "ms_per_round": ms, "spread_ms": [ms - 0.1, ms, ms + 0.1]}


def profiled(batch: int, stages: dict[str, Any] | None) -> dict[str, Any]:
    return {"job": "profiled", "batch": batch, "stages_us": stages, "timeline": [[0, 1, 2, 3]], "names": ["a"]}


def row(arm: str, kind: str, **more: Any) -> dict[str, Any]:
    return {
        "arm": arm,
        "kind": kind,
        "budget": 16,
        "cap": 8,
        "dtype": "float32",
        "states": "snapshots",
        "wrong": [],
        **more,
    }


def on_two() -> dict[str, Any]:
    suite = [
        row("hybrid/ar", "ar"),
        row("hybrid/tree-16-8", "tree", ranks=2, rounds_compared=310, off_spine=7, accept_length=1.3),
        row("dense/tree-64-8", "tree", ranks=2, rounds_compared=9, wrong=["rank 1 parted from rank 0 in tree round 4"]),
    ]
    laws = {"arm": "pair/oracle-16/laws", "kind": "oracle", "wrong": [], "laws": {"max_error": 0.0001}}
    record = {"suite": {"rows": [row("pair/tree-4", "tree", ranks=2, rounds_compared=80, accept_length=2.1), laws]}}

    def arm(mode: str, gpus: int, ms: float, **more: Any) -> dict[str, Any]:
        figures = [{**timed(batch, ms * batch), "tok_per_s": 1000 / ms, "tokens_per_round": 2.5} for batch in (1, 8)]
        measured = {} if "wrong" in more else {"measured": figures}
        return row(f"pair/{mode}-on-{gpus}", "tree", mode=mode, gpus=gpus, **measured, **more)

    shared = {"ranks": 2, "rounds_compared": 95, "compared": 12}
    pair = [
        arm("tree-16", 1, 2.0), arm("tree-16", 2, 1.6, differences=[{"gap": 0.02}], **shared),
        arm("ar", 1, 1.0), arm("ar", 2, 0.9, wrong=["ran out of time"], late=True),
        arm("linear", 1, 1.0), arm("linear", 2, 1.0, differences=[], ranks=2, rounds_compared=0, compared=12),
    ]  # fmt: skip
    return {"parity-two": suite, "selftest-two": record, "pair-two": pair}


def report() -> dict[str, Any]:
    parity = [
        row("hybrid/ar", "ar", informed={"accept_length": []}),
        row("hybrid/tree-16-2", "tree", accept_length=1.1, informed={"accept_length": [2.2, 2.0]}, off_spine=7),
        row("hybrid/tree-10k", "tree", wrong=["ran out of time"], late=True),
        row("hybrid/tree-radix", "tree", wrong=["job 0 request 1 differs at token 3"], states="records"),
        {"arm": "hybrid/oracle-16/laws", "kind": "oracle", "wrong": [],
         "laws": {"nodes": 40, "nodes_with_elder_sibling": 9, "max_error": 0.00013}},
        {"arm": "hybrid/bf16-tree/ties", "kind": "ties", "wrong": [], "differences": [{"gap": 0.02}, {"gap": 0.05}]},
    ]  # fmt: skip
    costs = [
        row("shape-27b/cost-ar", "ar", measured=[timed(1, 14.6), profiled(1, None)]),
        row("shape-27b/cost-linear", "linear", measured=[timed(1, 21.0), profiled(1, STAGES_US)]),
        row("shape-27b/cost-tree-64@records", "tree", budget=64, measured=[timed(1, 23.1), profiled(1, STAGES_US)]),
        row("shape-27b/cost-tree-64", "tree", budget=64, wrong=["not started: the time was up"], late=True),
    ]
    cell = {"arm": "tree-16", "temperature": 0.0, "concurrency": 8, "user_tok_s": 500.2, "total_tok_s": 3000.0,
            "round_ms": 3.21, "accept_length": 2.5, "speedup": {"value": 1.24, "low": 1.2, "high": 1.3}}  # fmt: skip
    facts = {"python": "3.12", "packages": {"torch": "2.11.0", "sglang": "0.5.17", "numpy": None},
             "torch": {"cuda": "13.0"}, "smi": ["NVIDIA H200, 580"]}  # fmt: skip
    results = {
        "host": facts, "parity": parity, "parity-rest": [row("hybrid/ar", "ar", wrong=["told once"])], "costs": costs,
        "benchmark": {"baseline": "linear", "cells": [cell]},
        "kernel-times": {"kernels": [{"kernel": "gdn_tree", "batch": 1, "rows": 17, "us": 30.1, "bound_us": 9.0,
                                      "state": "float32", "torch_us": 900.0}]},
        "server": {"memory": ["Load weight end. mem usage=0.1 GB"]},
    }  # fmt: skip
    results |= on_two()
    about = {"commit": "abc", "sources": "0" * 64, "command": "python -m benchmarks.gpu", "patches": ["1", "2"]}
    stages = {
        name: {"status": "green", "reasons": [], "why": "why", "seconds": 1.0, "sources": "x", "result": found}
        for name, found in results.items()
    }
    return {"schema": 1, "about": about, "stages": stages}


def lines(part: str) -> list[str]:
    return [line for line in tables.PARTS[part](report()).splitlines() if line.startswith("| ")][2:]


def test_parity_tells_each_arm_once_with_its_verdict() -> None:
    found = lines("parity")
    assert len(found) == 4
    assert found[0] == "| hybrid/ar |  | float32 | equal |  |  |  |"
    assert found[1] == "| hybrid/tree-16-2 | snapshots | float32 | equal | 1.1 | 2.2, 2.0 | 7 |"
    assert "not run to its end: ran out of time" in found[2]
    assert "| records | float32 | **wrong**: job 0 request 1 differs" in found[3]
    assert lines("laws") == ["| hybrid/oracle-16/laws | 40 | 9 | 0.00013 | holds |"]
    assert lines("ties") == ["| hybrid/bf16-tree/ties | 2 | 0.05 | near ties |"]


def test_of_an_arm_in_two_stages_the_later_one_that_ended_is_told() -> None:
    twice = report()
    arms = ["hybrid/tree-10k", "hybrid/tree-radix", "hybrid/tree-16-2"]
    again = [row(arm, "tree", accept_length=1.4) for arm in arms]
    again[2] |= {"wrong": ["ran out of time"], "late": True}
    twice["stages"]["parity"]["when"] = "2026-11-30T10:00:00Z"
    twice["stages"]["parity-rest"] = {**twice["stages"]["parity"], "when": "2026-12-01T10:00:00Z", "result": again}
    told = [line.split(" | ")[3:5] for line in tables.parity(twice).splitlines()[3:] if "/tree-" in line]
    assert told == [["equal", "1.1"], ["equal", "1.4"], ["equal", "1.4"]]


def test_arms_that_the_time_did_not_reach_are_named_in_one_line() -> None:
    late = report()
    late["stages"]["parity"]["result"] += [
        row(f"dense/tree-{budget}-8", "tree", wrong=["not started: the time was up"], late=True) for budget in (1, 4)
    ]
    told = tables.parity(late)
    assert "| dense/" not in told
    assert told.endswith("\n\nNot started, the time was up: `dense/tree-1-8`, `dense/tree-4-8`.")
    assert "Not started" not in tables.parity(report())
    assert "| not run to its end: ran out of time |" in told


def test_a_part_whose_stages_found_nothing_says_why() -> None:
    cut = report()
    cut["stages"]["costs"] |= {"status": "not run", "reasons": ["15 s were left, it needs 300"], "result": None}
    page = tables.fill(tables.blank(), cut)
    told = [
        "`costs`: not run; 15 s were left, it needs 300.",
        "`costs-slice` did not run.",
        "`costs-of-eight` did not run.",
    ]
    assert "".join(f"* {line}\n" for line in told) + "<!--" in page
    assert "| ms a round | samples |" not in page
    assert "| ms a round | samples |" in tables.fill(tables.blank(), report())


def test_memory_is_told_by_server_and_without_progress() -> None:
    two = report()
    lines = ["\x1b[4mcoloured\x1b[0m", "Capturing batches (bs=8): 12%", "Memory pool end. avail mem=1 GB"]
    two["stages"]["server-records"] = {**two["stages"]["server"], "result": {"memory": lines}}
    told = tables.memory(two)
    assert "Capturing" not in told
    assert told.index("Stage `server`:") < told.index("mem usage=0.1") < told.index("Stage `server-records`:")
    assert "Memory pool end. avail mem=1 GB" in told


def test_the_kept_report_has_no_timelines_colours_or_paths_of_its_host() -> None:
    raw = report()
    raw["about"]["command"] = "python -m benchmarks.gpu --out /data/gpu --limit-s 540"
    raw["stages"]["host"]["command"] = [
        "/opt/x/bin/python3",
        "-m",
        "benchmarks.gpu.host",
        "--out",
        "/data/gpu/work/host",
    ]
    raw["stages"]["parity"]["command"] = [
        "--junitxml=/data/gpu/work/kernels/junit.xml",
        "tests/gpu/test_kernels_gpu.py",
    ]
    raw["stages"]["host"]["result"]["links"] = ["\x1b[4mGPU0\x1b[0m X"]
    kept = tables.trimmed(raw)
    assert kept["about"]["command"] == "python -m benchmarks.gpu --out DIR --limit-s 540"
    assert kept["stages"]["host"]["command"] == ["python", "-m", "benchmarks.gpu.host", "--out", "DIR/work/host"]
    assert kept["stages"]["parity"]["command"] == [
        "--junitxml=DIR/work/kernels/junit.xml",
        "tests/gpu/test_kernels_gpu.py",
    ]
    assert kept["stages"]["host"]["result"]["links"] == ["GPU0 X"]
    assert "timeline" not in json.dumps(kept)


def test_costs_stand_against_linear_of_the_same_shapes_and_are_split() -> None:
    plain, linear, tree, missing = lines("costs")
    assert plain.startswith("| shape-27b/cost-ar | 1 | 1 | 14.60 | 14.50 to 14.70 | 0.70 |  |")
    assert "| 16 | 21.00 | 20.90 to 21.10 | 1.00 | 900 | 620 | 30 | 3,900 | 150 | 80 |" in linear
    assert tree.startswith("| shape-27b/cost-tree-64@records | 1 | 65 | 23.10 | 23.00 to 23.20 | 1.10 | 900 |")
    assert "not run to its end: not started" in missing
    assert len({line.count("|") for line in (plain, linear, tree, missing)}) == 1


def test_two_gpus_stand_beside_one_by_mode_and_requests() -> None:
    found = lines("pair-two")
    assert found[0] == (
        "| tree-16 | 1 | 2.50 | 2.50 | 2.00 | 1.60 | 500 | 625 | 1.25 | 1 of 12, at most 0.020 nats | 95 | holds |"
    )
    assert found[1].startswith("| tree-16 | 8 | 2.50 | 2.50 | 16.00 | 12.80 |")
    assert found[2] == "| ar | 1 | 2.50 |  | 1.00 |  | 1000 |  |  |  |  | 2: not run to its end: ran out of time |"
    assert "| 0 of 12 |  | holds |" in found[4]
    assert len(found) == 6


def test_what_was_proven_on_two_gpus_is_told_by_stage_beside_what_one_showed() -> None:
    one, tree, parted, pair, law = lines("two")
    assert one == "| parity-two | hybrid/ar | 1 | holds |  |  |  |  |"
    assert tree == "| parity-two | hybrid/tree-16-8 | 2 | holds | 1.3 | 7 | 310 |  |"
    assert parted.startswith(
        "| parity-two | dense/tree-64-8 | 2 | **wrong**: rank 1 parted from rank 0 in tree round 4 |"
    )
    assert parted.endswith("|  |  |  |  |")  # no rounds are the same on both where one was not
    assert pair == "| selftest-two | pair/tree-4 | 2 | holds | 2.1 |  | 80 |  |"
    assert law == "| selftest-two | pair/oracle-16/laws |  | holds |  |  |  | 0.00010 |"


def test_the_other_parts() -> None:
    assert lines("benchmark") == ["| tree-16 | 0 | 8 | 500 | 3000 | 3.21 | 2.50 | 1.24 (1.20 to 1.30) |"]
    assert lines("kernels") == ["| gdn_tree float32 | 1 | 17 | 30.1 | 9.0 | 900.0 |"]
    assert "NVIDIA H200, 580; Python 3.12" in tables.host(report())
    assert "torch 2.11.0, sglang 0.5.17, with 2 patches" in tables.host(report())
    assert "mem usage=0.1 GB" in tables.memory(report())
    assert len(lines("stages")) == len(report()["stages"])


def test_an_empty_report_fills_the_page_too() -> None:
    empty = {"schema": 1, "about": {"sources": "x", "command": "c"}, "stages": {}}
    page = tables.fill(tables.blank(), empty)
    assert page.count("<!-- gpu-") == len(tables.PARTS)
    assert "is not known" in page


def test_a_page_is_filled_between_its_marks_only_and_the_same_again() -> None:
    page = "# Mine\n\n<!-- gpu-laws -->\nstale\n<!-- /gpu-laws -->\n\nMy words.\n"
    once = tables.fill(page, report())
    assert once.startswith("# Mine")
    assert once.endswith("My words.\n")
    assert "stale" not in once
    assert tables.fill(once, report()) == once
    with pytest.raises(ValueError, match="has a part gpu-speed"):
        tables.fill("<!-- gpu-speed -->\n<!-- /gpu-speed -->", report())
    with pytest.raises(ValueError, match="has no end"):
        tables.fill("<!-- gpu-laws -->\n", report())


def test_results_are_put_where_they_are_committed(tmp_path: Path) -> None:
    session, results = tmp_path / "session", tmp_path / "results"
    work = session / "work"
    for name in ("benchmark/result.json", "selftest/proofs/selftest-a.json", "server/captures/exchanges.json",
                 "server/captures/startup.log", "parity/hybrid_ar.out.json"):  # fmt: skip
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        (work / name).write_text(f"of {name}")
    (work / "benchmark/result.json").write_text('{"command": "bench --out /data/gpu/work/benchmark/result.json --cut"}')
    (session / "report.json").write_text(json.dumps(report()))
    pack.pack(work, session, lambda _text: None)
    written = collect.collect(session, results)
    assert set(written) == {
        "gpu.json", "gpu.md", "gpu/benchmark.json", "gpu/proofs/selftest-a.json", "gpu/server/exchanges.json",
        "gpu/server/startup.log",
    }  # fmt: skip
    assert (results / "gpu/server/startup.log").read_text() == "of server/captures/startup.log"
    assert (results / "gpu/benchmark.json").read_text() == (
        '{"command": "bench --out DIR/work/benchmark/result.json --cut"}\n'
    )
    assert "timeline" not in (results / "gpu.json").read_text()
    assert "| hybrid/tree-16-2 |" in (results / "gpu.md").read_text()
    page = (results / "gpu.md").read_text().replace("# A session on a GPU", "# My words")
    (results / "gpu.md").write_text(page)
    collect.collect(session, results)
    assert (results / "gpu.md").read_text() == page
