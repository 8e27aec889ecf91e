"""What is concluded from the files a GPU stage left, and how they travel: green, red, cut and not run, with reasons."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import capture, pack, sanitizer
from benchmarks.gpu.judge import Outcome, judge

JUNIT = """<testsuites><testsuite>
<testcase name="test_parity[topk]" time="1.26"/>
<testcase name="test_graph" time="2"><failure message="assert 1 == 2&#10;more">text</failure></testcase>
</testsuite></testsuites>"""


def put(folder: Path, name: str, content: Any) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))


def row(name: str, *wrong: str, **more: Any) -> dict[str, Any]:
    return {"arm": name, "wrong": list(wrong), **more}


def test_tests_are_judged_by_their_cases(tmp_path: Path) -> None:
    put(tmp_path, "junit.xml", JUNIT)
    found = judge("kernels", Outcome(tmp_path, 1))
    assert (found.status, found.reasons) == ("red", ["test_graph: assert 1 == 2"])
    assert found.result == {"test_parity[topk]": 1.3, "test_graph": "failed"}
    put(tmp_path, "junit.xml", JUNIT.split('<testcase name="test_graph"')[0] + "</testsuite></testsuites>")
    assert judge("kernels", Outcome(tmp_path, 0)).status == "green"
    assert judge("kernels", Outcome(tmp_path, 3)).status == "red"  # pytest itself fell over afterwards
    put(tmp_path, "junit.xml", "<testsuites/>")
    assert judge("kernels", Outcome(tmp_path, 5)).reasons[0] == "no test ran"


@pytest.mark.parametrize("name", ["parity", "kernels", "selftest", "server", "benchmark", "kernel-times", "host"])
def test_a_stage_without_a_result_is_red_and_its_last_words_are_told(tmp_path: Path, name: str) -> None:
    put(tmp_path, "log", "Traceback\n\nImportError: no module named sglang\n")
    crashed = judge(name, Outcome(tmp_path, 1))
    assert crashed.status == "red"
    assert crashed.reasons[-1] == "ImportError: no module named sglang"
    assert judge(name, Outcome(tmp_path, -9, late=True)).status == "cut"


def test_a_suite_is_green_red_or_cut(tmp_path: Path) -> None:
    put(tmp_path, "report.json", {"rows": [row("a"), row("b", "differs at token 3")]})
    assert judge("parity", Outcome(tmp_path, 1)).reasons == ["b: differs at token 3"]
    put(tmp_path, "report.json", {"rows": [row("a"), row("b", "ran out of time", late=True)]})
    cut = judge("parity", Outcome(tmp_path, 1))
    assert (cut.status, cut.reasons) == ("cut", ["b: ran out of time"])
    put(tmp_path, "report.json", {"rows": [row("a", "wrong"), row("b", "ran out of time", late=True)]})
    assert judge("parity", Outcome(tmp_path, 1)).status == "red"
    put(tmp_path, "report.json", {"rows": [row("a")]})
    assert judge("parity", Outcome(tmp_path, 0)).status == "green"
    put(tmp_path, "report.json", {"rows": []})
    assert judge("parity", Outcome(tmp_path, 0)).status == "red"


def test_costs_without_a_figure_are_no_costs(tmp_path: Path) -> None:
    put(tmp_path, "report.json", {"rows": [row("a", measured=[{"job": "timed"}]), row("b")]})
    assert judge("costs", Outcome(tmp_path, 0)).reasons == ["b: nothing was measured"]
    put(tmp_path, "report.json", {"rows": [row("a", measured=[{"job": "timed"}])]})
    assert judge("costs", Outcome(tmp_path, 0)).status == "green"


def test_two_gpus_are_judged_by_their_ranks_their_tokens_and_their_figures(tmp_path: Path) -> None:
    one, two = (row(f"pair/tree-16-on-{gpus}", measured=[{"job": "timed"}]) for gpus in (1, 2))
    put(tmp_path, "report.json", {"rows": [one, two]})
    assert judge("pair-two", Outcome(tmp_path, 0)).status == "green"
    for said in (
        "rank 1 parted from rank 0 in tree round 3 of 90",
        "token 7 is not one GPU's, and plain decoding has ..",
    ):
        put(tmp_path, "report.json", {"rows": [one, {**two, "wrong": [said]}]})
        found = judge("pair-two", Outcome(tmp_path, 1))
        assert (found.status, found.reasons) == ("red", [f"pair/tree-16-on-2: {said}"])
    put(tmp_path, "report.json", {"rows": [one, row("pair/tree-16-on-2")]})
    assert judge("pair-two", Outcome(tmp_path, 0)).status == "red"
    put(tmp_path, "report.json", {"rows": [one, row("pair/tree-16-on-2", "ran out of time", late=True)]})
    assert judge("pair-two", Outcome(tmp_path, 1)).status == "cut"
    put(
        tmp_path, "report.json", {"rows": [row("hybrid/tree-16-8", "rank 1 emitted other tokens than rank 0 in job 0")]}
    )
    assert judge("parity-two", Outcome(tmp_path, 1)).status == "red"


@pytest.mark.parametrize("name", ["selftest", "selftest-two", "selftest-two-records"])
def test_the_self_tests_record_decides(tmp_path: Path, name: str) -> None:
    put(tmp_path, "proofs/selftest.json", {"passed": True, "suite": {"unproven": []}})
    assert judge(name, Outcome(tmp_path, 0)).status == "green"
    put(tmp_path, "proofs/selftest.json", {"passed": False, "suite": {"unproven": ["tree-16: differs"]}})
    assert judge(name, Outcome(tmp_path, 1)).reasons == ["tree-16: differs"]
    put(tmp_path, "proofs/selftest.json", {"passed": False, "suite": {"unproven": ["tree-16: ran out of time"]}})
    assert judge(name, Outcome(tmp_path, 1)).status == "cut"


def test_a_benchmark_that_covers_less_than_was_asked_is_cut(tmp_path: Path) -> None:
    sample = {"prompt": 0, "tokens": 21, "first_tokens": 1, "ttft_s": 0.1, "decode_s": 0.5, "rounds": 10,
              "histogram": [0, 10]}  # fmt: skip
    block = {"temperature": 0.0, "concurrency": 1, "repeat": 0, "tokens": 21, "wall_s": 0.6}
    blocks = [{**block, "arm": "linear", "samples": [sample]},
              {**block, "arm": "tree-16", "samples": [{**sample, "decode_s": 0.25}]}]  # fmt: skip
    result = {"grid": {}, "cut": False, "baseline": "linear", "trees": {}, "prompt_set": "x", "blocks": blocks,
              "prompts": [{"category": "code"}], "parity": [{"arm": "tree-16", "wrong": []}]}  # fmt: skip
    put(tmp_path, "result.json", result)
    green = judge("benchmark", Outcome(tmp_path, 0))
    assert green.status == "green"
    assert [(cell["arm"], cell["user_tok_s"]) for cell in green.result["cells"]] == [("linear", 40), ("tree-16", 80)]
    assert green.result["cells"][1]["speedup"]["value"] == pytest.approx(2.0)
    assert judge("benchmark", Outcome(tmp_path, 3)).status == "cut"
    put(tmp_path, "result.json", {**result, "cut": True})
    assert judge("benchmark", Outcome(tmp_path, 0)).status == "cut"
    put(tmp_path, "result.json", {**result, "parity": [{"arm": "tree-16", "wrong": [{}]}]})
    assert judge("benchmark", Outcome(tmp_path, 0)).reasons == ["tree-16: 1 answers differ"]


def test_kernel_times_need_parity(tmp_path: Path) -> None:
    put(tmp_path, "kernels.json", {"parity": {"topk": 0.0}, "kernels": [{"kernel": "topk"}]})
    assert judge("kernel-times", Outcome(tmp_path, 0)).status == "green"
    put(tmp_path, "kernels.json", {"parity": {"topk": "3 cells differ"}, "kernels": [{"kernel": "topk"}]})
    assert judge("kernel-times", Outcome(tmp_path, 1)).reasons == ["topk: 3 cells differ"]


CLEAN = "========= COMPUTE-SANITIZER\n{}\n========= ERROR SUMMARY: 0 errors\n"


@pytest.mark.parametrize(
    ("text", "status", "wrong", "unable"),
    [
        (CLEAN, 0, [], False),
        (CLEAN, 1, ["the checks failed, exit status 1"], False),
        ("========= Race reported\n========= RACECHECK SUMMARY: 2 hazards displayed (2 errors)", 0,
         ["2 errors or hazards"], False),
        ("Segmentation fault", 139, ["no summary, exit status 139"], False),
        ("========= Error: Device not supported. Please refer to the documentation", 1, [], True),
    ],
)  # fmt: skip
def test_a_sanitizers_words(text: str, status: int, wrong: list[str], unable: bool) -> None:
    found = sanitizer.found("memcheck", text, status)
    assert found["wrong"] == wrong
    assert bool(found["unable"]) == unable


def test_a_host_that_cannot_run_the_sanitizer_is_told_from_a_fault(tmp_path: Path) -> None:
    put(tmp_path, "sanitizer.json", {"unable": "there is no compute-sanitizer on the PATH", "tools": []})
    assert judge("sanitizer", Outcome(tmp_path, 0)).status == "not run"
    tools = [{"tool": "racecheck", "wrong": ["2 errors or hazards"]}]
    put(tmp_path, "sanitizer.json", {"unable": "", "tools": tools})
    assert judge("sanitizer", Outcome(tmp_path, 1)).reasons == ["racecheck: 2 errors or hazards"]


def test_a_fault_is_told_although_another_tool_could_not_end(tmp_path: Path) -> None:
    tools = [{"tool": "memcheck", "wrong": []}, {"tool": "racecheck", "wrong": ["2 errors or hazards"]}]
    put(tmp_path, "sanitizer.json", {"unable": "memcheck was not done after 180 s", "tools": tools})
    assert judge("sanitizer", Outcome(tmp_path, 1)).reasons == ["racecheck: 2 errors or hazards"]


@pytest.mark.parametrize(
    ("program", "limit_s", "unable", "wrong"),
    [
        ("sleep 600 & wait", 1.0, "racecheck was not done after 1 s", []),
        ("echo 'ERROR SUMMARY: 0 errors'", 60.0, "", []),
        ("echo 'RACECHECK SUMMARY: 3 hazards'", 60.0, "", ["3 errors or hazards"]),
    ],
)
def test_a_tool_is_ended_with_the_program_it_started(
    program: str, limit_s: float, unable: str, wrong: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "tool"
    put(tmp_path, "tool", f"#!/bin/sh\n{program}\n")
    tool.chmod(0o755)
    monkeypatch.setattr(sanitizer, "TOOL", str(tool))
    found = sanitizer.watch("racecheck", limit_s)
    assert (found["unable"], found["wrong"]) == (unable, wrong)


def test_answers_are_judged_by_status_and_content() -> None:
    served = capture.Question("q", "GET", "/x", holds=("ddtree",))
    assert capture.wrong(served, {"status": 200, "body": '{"ddtree": 1}'}) == []
    assert capture.wrong(served, {"status": 200, "body": "{}"}) == ["q: no ddtree in the answer"]
    assert "status 503" in capture.wrong(served, {"status": 503, "body": "warming up"})[0]
    refused = capture.Question("e", "POST", "/x", {}, ok=False)
    assert capture.wrong(refused, {"status": 400, "body": "no"}) == []
    assert capture.wrong(refused, {"status": 200, "body": "{}"})
    either = capture.Question("u", "POST", "/x", {}, ok=None)
    assert (
        capture.wrong(either, {"status": 200, "body": ""}) == capture.wrong(either, {"status": 400, "body": ""}) == []
    )
    assert capture.wrong(either, {"status": 0, "body": "refused"})


def test_names_of_the_host_are_replaced_the_longest_first() -> None:
    names = {"/home/me": "<home>", "/home/me/venv/lib": "<site>", "box7": "<host>"}
    assert capture.scrub("/home/me/venv/lib/x on box7, /home/me/y", names) == "<site>/x on <host>, <home>/y"


def test_a_run_travels_in_two_archives_and_goes_on_elsewhere(tmp_path: Path) -> None:
    work, out, said = tmp_path / "work", tmp_path / "out", []  # type: tuple[Path, Path, list[str]]
    put(work, "parity/hybrid_ar.out.json", {"ok": True})
    put(work, "parity/hybrid_ar.log", "loading")
    put(work, "parity/log", "table")
    put(work, "parity/models/hybrid/config.json", {})
    put(work, "site/sglang/version.py", "x")
    put(work, "gpu.lock.0", "")
    out.mkdir()
    pack.pack(work, out, said.append)
    assert [line.split(",")[0] for line in said] == ["logs.tar.xz: 2 files", "results.tar.xz: 1 files"]
    elsewhere = tmp_path / "elsewhere"
    assert pack.unpack(elsewhere, out, {}) == ["results.tar.xz"]
    assert [str(path.relative_to(elsewhere)) for path in elsewhere.rglob("*.json")] == ["parity/hybrid_ar.out.json"]
    assert pack.unpack(elsewhere, out, {}) == []  # what is there is newer


def test_a_self_tests_answers_stay_behind_and_its_record_and_logs_travel(tmp_path: Path) -> None:
    work = tmp_path / "work"
    put(work, "selftest/arms/pair_oracle-32.out.json", {"results": [0.5] * 9})
    put(work, "selftest/arms/pair_oracle-32.log", "loading")
    put(work, "selftest/arms/pair_tree-16.log.1", "the second rank")
    put(work, "selftest/proofs/selftest.json", {"passed": True})
    pack.pack(work, tmp_path, lambda _text: None)
    assert members(tmp_path / "results.tar.xz") == ["selftest/proofs/selftest.json"]
    logs = ["selftest/arms/pair_oracle-32.log", "selftest/arms/pair_tree-16.log.1"]
    assert members(tmp_path / "logs.tar.xz") == logs


def test_an_archive_too_large_to_move_leaves_its_largest_files_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work, said = tmp_path / "work", []  # type: tuple[Path, list[str]]
    put(work, "costs/a.out.json", {"timeline": list(range(2000))})
    put(work, "parity/b.out.json", {"ok": True})
    monkeypatch.setattr(pack, "LARGE", 1000)
    pack.pack(work, tmp_path, said.append)
    assert len(members(tmp_path / "results.tar.xz")) == 2
    monkeypatch.setattr(pack, "MOST", 500)
    pack.pack(work, tmp_path, said.append)
    assert members(tmp_path / "results.tar.xz") == ["parity/b.out.json"]
    assert any("left behind is costs/a.out.json" in line for line in said)


def members(archive: Path) -> list[str]:
    with tarfile.open(archive) as tar:
        return sorted(tar.getnames())


def test_compiled_kernels_travel_to_a_host_that_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = {"triton": tmp_path / "a/triton"}, {"triton": tmp_path / "b/triton"}
    put(here["triton"], "ABC/kernel.cubin", "binary")
    pack.pack_caches(tmp_path, lambda _text: None, here)
    assert pack.unpack(tmp_path / "w", tmp_path, there) == ["caches.tar.xz: triton"]
    assert (there["triton"] / "ABC/kernel.cubin").read_text() == "binary"
    assert pack.unpack(tmp_path / "w", tmp_path, there) == []
    (tmp_path / "caches.tar.xz").unlink()
    monkeypatch.setattr(pack, "MOST", 10)
    pack.pack_caches(tmp_path, lambda _text: None, here)
    assert not (tmp_path / "caches.tar.xz").exists()
