"""The self-test's plan, verdict and record; what runs on the GPU is the parity suite's."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from cpu_pair import FOLDER, tokenizer
from sglang_ddtree import proofs, selftest
from sglang_ddtree.parity import plan, sections, suite

ROWS = [
    {"arm": "pair/ar", "kind": "ar", "dtype": "float32", "wrong": [], "off_spine": None, "start_s": 20.0},
    {"arm": "pair/tree-16", "kind": "tree", "budget": 16, "dtype": "float32", "wrong": [], "off_spine": 12},
    {"arm": "pair/oracle-16/laws", "kind": "oracle", "wrong": [], "laws": {"nodes_with_elder_sibling": 40}},
]  # fmt: skip


def changed(place: int, **values: Any) -> list[dict[str, Any]]:
    return [{**row, **values} if place == number else row for number, row in enumerate(ROWS)]


def test_the_arms_cover_every_mode_and_budget_on_the_pairs_weights() -> None:
    found = selftest.arms(FOLDER)
    names = [arm.name for arm in found]
    assert names[:3] == ["pair/ar", "pair/dflash", "pair/linear"]
    assert {f"pair/tree-{b}" for b in selftest.BUDGETS} < set(names)
    argv = selftest.with_weights(found[3]).argv(Path("/models"))
    assert argv[argv.index("--model-path") + 1] == str((FOLDER / "target").resolve())
    assert argv[len(argv) - argv[::-1].index("--load-format")] == "auto"
    assert selftest.with_weights(found[0]).seed is None
    assert all(arm.dtype == "float32" for arm in found)


def test_the_prompts_are_ids_of_the_pairs_tokenizer() -> None:
    prompts = selftest.load_prompts(FOLDER)
    assert len(prompts) == 8
    assert all(0 <= token < tokenizer().get_vocab_size() for ids in prompts for token in ids)


def test_a_clean_run_is_a_proof_that_the_engine_accepts() -> None:
    proof = selftest.record(ROWS, "12.0", 98.0, 0.0)
    assert proof["passed"]
    wanted = proofs.Combination(
        "Qwen3_5ForCausalLM", "triton", "12.0", proofs.engine_digest(), proofs.running_driver(), 64
    )
    assert proofs.judge(wanted, [("r", proof)])[0] == "r"
    assert proofs.judge(dataclasses.replace(wanted, budget=65), [("r", proof)])[0] is None
    assert proofs.judge(dataclasses.replace(wanted, compute_capability="9.0"), [("r", proof)])[0] is None


AUTO_ROWS = [
    {"arm": "pair/auto-cycle", "kind": "auto", "dtype": "float32", "wrong": [], "off_spine": 9},
    {"arm": "pair/auto-oracle/laws", "kind": "oracle", "wrong": [], "laws": {"nodes_with_elder_sibling": 4}},
]  # fmt: skip


def test_arms_of_changing_widths_prove_mode_auto_beside_the_rest() -> None:
    proof = selftest.record([*ROWS, *AUTO_ROWS], "12.0", 98.0, 0.0)
    wanted = proofs.Combination(
        "Qwen3_5ForCausalLM", "triton", "12.0", proofs.engine_digest(), proofs.running_driver(), 64,
        auto=proofs.auto_digest(),
    )  # fmt: skip
    assert proofs.judge(wanted, [("r", proof)])[0] == "r"
    assert proofs.judge(wanted, [("r", selftest.record(ROWS, "12.0", 98.0, 0.0))])[0] is None


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("change", [{"wrong": ["a token differs"]}, {"off_spine": None}])
def test_a_wrong_change_of_widths_is_no_proof_of_auto_and_takes_none_from_trees(
    place: int, change: dict[str, Any]
) -> None:
    rows = [{**row, **change} if number == place else row for number, row in enumerate(AUTO_ROWS)]
    proof = selftest.record([*ROWS, *rows], "12.0", 98.0, 0.0)
    assert proof["passed"]
    assert ("auto" in proof) == (place == 1 and change == {"off_spine": None})
    broken = selftest.record([*changed(1, wrong=["a token differs"]), *AUTO_ROWS], "12.0", 98.0, 0.0)
    assert not broken["passed"]


CACHE_ROWS = [
    {"arm": "pair/ar-radix", "kind": "ar", "budget": 64, "dtype": "float32", "wrong": [],
     "prefix_cache": "extra_buffer"},
    {"arm": "pair/tree-radix", "kind": "tree", "budget": 64, "dtype": "float32", "wrong": [], "off_spine": 7,
     "prefix_cache": "extra_buffer"},
]  # fmt: skip


def test_arms_with_the_prefix_cache_prove_it_beside_the_rest() -> None:
    proof = selftest.record([*ROWS, *AUTO_ROWS, *CACHE_ROWS], "12.0", 98.0, 0.0)
    assert proof["prefix_cache"] == {"extra_buffer": 64}
    assert [row.get("prefix_cache") for row in proof["suite"]["rows"]][-2:] == ["extra_buffer"] * 2
    wanted = proofs.Combination(
        "Qwen3_5ForConditionalGeneration", "triton", "12.0", proofs.engine_digest(), proofs.running_driver(), 64,
        prefix_cache="extra_buffer",
    )  # fmt: skip
    assert proofs.judge(wanted, [("r", proof)])[0] == "r"
    assert "prefix_cache" not in selftest.record([*ROWS, *AUTO_ROWS], "12.0", 98.0, 0.0)


@pytest.mark.parametrize(
    ("place", "change"),
    [
        (0, {"wrong": ["request 0 found nothing in the prefix cache"]}),
        (1, {"wrong": ["job 0 request 4 differs at token 3 of 150/150"]}),
        (1, {"off_spine": 0}),
        (1, {"prefix_cache": None}),
    ],
)
def test_a_wrong_turn_with_the_prefix_cache_is_no_proof_of_it_and_takes_none_from_trees(
    place: int, change: dict[str, Any]
) -> None:
    rows = [{**row, **change} if number == place else row for number, row in enumerate(CACHE_ROWS)]
    proof = selftest.record([*ROWS, *AUTO_ROWS, *rows], "12.0", 98.0, 0.0)
    assert proof["passed"]
    assert "auto" in proof
    assert "prefix_cache" not in proof
    alone = selftest.record([*changed(1, off_spine=0), *CACHE_ROWS], "12.0", 98.0, 0.0)
    assert not alone["passed"]  # side branches in these arms say nothing of trees without the cache


def test_second_turns_go_on_from_states_that_trees_have_left() -> None:
    plain, tree = selftest.arms(FOLDER)[-2:]
    assert (plain.name, tree.name) == ("pair/ar-radix", "pair/tree-radix")
    assert sections.reference_of(tree) == plain.name
    assert plan.common_jobs(plain, tree) == [0]
    assert tree.extra_buffer
    argv = tree.argv(Path("/models"))
    interval = int(argv[len(argv) - argv[::-1].index("--mamba-track-interval")])
    assert interval == selftest.TRACK_INTERVAL > tree.budget == max(selftest.BUDGETS)
    assert "--disable-radix-cache" not in argv
    for ask in tree.jobs[0]["asks"]:
        crossed = len(ask["ids"]) + ask["params"]["max_new_tokens"] - 16  # the last round may not count
        assert len(ask["ids"]) < interval < crossed < 2 * interval


def test_a_wrong_token_with_the_prefix_cache_is_shown_as_wrong(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [*ROWS, *AUTO_ROWS, CACHE_ROWS[0], {**CACHE_ROWS[1], "wrong": ["job 0 request 4 differs at token 3"]}]
    monkeypatch.setattr("sglang_ddtree.args.compute_capability", lambda _gpus: "12.0")
    monkeypatch.setattr(selftest, "gpu_count", lambda: 1)
    monkeypatch.setattr(selftest, "run", lambda *_: rows)
    assert selftest.main(["--pair", str(FOLDER), "--proofs-dir", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "the prefix cache unproven: pair/tree-radix: job 0 request 4 differs at token 3" in said
    assert "WRONG: job 0 request 4" in said
    (record,) = (json.loads(path.read_text()) for path in tmp_path.glob("*.json"))
    assert record["passed"]
    assert "prefix_cache" not in record


def test_arms_of_changing_widths_run_late_and_with_snapshots_only(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = selftest.arms(FOLDER)
    assert [arm.name for arm in found if arm.kind == "auto"] == [arm.name for arm in found[-4:-2]]
    argv = found[-3].argv(Path("/models"))
    assert argv[argv.index("--speculative-ddtree-widths") + 1] == "4,16,64"
    assert dict(found[-3].spec(Path("/models"), Path("/lock"))["environ"])["SGLANG_DDTREE_CONFIG"]
    asked: list[str] = []

    def run_arms(arms: list[Any], *_: Any, **__: Any) -> dict[str, Any]:
        asked.extend(arm.kind for arm in arms)
        return {arm.name: {"ok": False, "error": "not run"} for arm in arms}

    monkeypatch.setattr(selftest, "run_arms", run_arms)
    selftest.run(FOLDER, selftest.arguments(["--pair", str(FOLDER), "--tp", "2"]), tmp_path)
    assert "auto" not in asked
    for more in ([], ["--states", "records"]):
        asked.clear()
        selftest.run(FOLDER, selftest.arguments(["--pair", str(FOLDER), *more]), tmp_path)
        assert asked.count("auto") == 2


def test_changing_widths_over_records_are_proven_by_their_own_sources() -> None:
    proof = selftest.record([*ROWS, *AUTO_ROWS], "12.0", 98.0, 0.0, "records")
    assert proof["auto"] == proofs.auto_digest(states="records") != proofs.auto_digest()


def test_records_are_proven_by_records_of_their_own(tmp_path: Path) -> None:
    proof = selftest.record(ROWS, "12.0", 98.0, 0.0, "records")
    wanted = proofs.Combination(
        "Qwen3_5ForCausalLM", "triton", "12.0", proofs.engine_digest(states="records"), proofs.running_driver(), 64,
        "records",
    )  # fmt: skip
    assert proofs.judge(wanted, [("r", proof)])[0] == "r"
    snapshots = dataclasses.replace(wanted, engine=proofs.engine_digest(), states="snapshots")
    assert proofs.judge(snapshots, [("r", proof)])[0] is None
    paths = [selftest.write(tmp_path, selftest.record(ROWS, "12.0", 1.0, 0.0, s)) for s in ("snapshots", "records")]
    assert paths[0] != paths[1]


def test_a_proof_on_two_gpus_is_a_record_of_its_own(tmp_path: Path) -> None:
    proof = selftest.record(ROWS, "12.0", 98.0, 0.0, tp=2)
    wanted = proofs.Combination(
        "Qwen3_5ForCausalLM", "triton", "12.0", proofs.engine_digest(tp=2), proofs.running_driver(), 64, tp=2
    )
    assert proofs.judge(wanted, [("r", proof)])[0] == "r"
    assert proofs.judge(dataclasses.replace(wanted, engine=proofs.engine_digest(), tp=1), [("r", proof)])[0] is None
    paths = [selftest.write(tmp_path, selftest.record(ROWS, "12.0", 1.0, 0.0, tp=tp)) for tp in (1, 2)]
    assert [path.stem.endswith("tp2") for path in paths] == [False, True]


@pytest.mark.parametrize(("gpus", "capability"), [(1, "12.0"), (2, "9.0+12.0")])
def test_two_gpus_of_one_kind_are_needed_to_prove_two(
    gpus: int, capability: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sglang_ddtree.args.compute_capability", lambda _gpus: capability)
    monkeypatch.setattr(selftest, "gpu_count", lambda: gpus)
    assert selftest.main(["--pair", str(FOLDER), "--proofs-dir", str(tmp_path / "p"), "--tp", "2"]) == 2
    assert f"{gpus} CUDA GPUs of compute capability {capability}" in capsys.readouterr().err
    assert not (tmp_path / "p").exists()


def test_every_tree_of_a_run_keeps_states_as_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ran: list[Any] = []

    def run_arms(chosen: list[Any], *_args: Any, **_options: Any) -> dict[str, Any]:
        ran.extend(chosen)
        return {arm.name: {"ok": False, "error": "not run"} for arm in chosen}

    monkeypatch.setattr(selftest, "run_arms", run_arms)
    selftest.run(FOLDER, selftest.arguments(["--pair", str(FOLDER), "--states", "records"]), tmp_path)
    for arm in ran:
        assert ("--speculative-ddtree-states records" in " ".join(arm.argv(tmp_path))) == (arm.kind in ("tree", "auto"))


def test_a_run_goes_on_from_its_own_answers_only_where_asked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sources: list[str] = []

    def run_arms(chosen: list[Any], *_args: Any, **options: Any) -> dict[str, Any]:
        sources.append(options["sources"])
        return {arm.name: {"ok": False, "error": "not run"} for arm in chosen}

    monkeypatch.setattr(selftest, "run_arms", run_arms)
    given = ["--pair", str(FOLDER), "--out", str(tmp_path)]
    for more in ([], ["--keep"]):
        selftest.run(FOLDER, selftest.arguments([*given, *more]), tmp_path)
    assert sources == ["", suite.sources()]
    with pytest.raises(SystemExit):
        selftest.arguments(["--pair", str(FOLDER), "--keep"])
    assert "name it with --out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        (changed(1, wrong=["request 3 differs at token 9"]), "pair/tree-16: request 3 differs"),
        (changed(1, off_spine=0), "no node beside a top-1 chain"),
        (changed(2, laws={"nodes_with_elder_sibling": 0}), "no node with an elder sibling"),
        (ROWS[:2], "no node with an elder sibling"),
    ],
)
def test_a_run_that_shows_nothing_is_no_proof(rows: list[dict[str, Any]], says: str) -> None:
    proof = selftest.record(rows, "12.0", 98.0, 0.0)
    assert not proof["passed"]
    assert any(says in reason for reason in proof["suite"]["unproven"])


def test_a_failed_run_replaces_an_earlier_proof(tmp_path: Path) -> None:
    first = selftest.write(tmp_path / "proofs", selftest.record(ROWS, "12.0", 98.0, 0.0))
    second = selftest.write(tmp_path / "proofs", selftest.record(ROWS[:2], "12.0", 98.0, 0.0))
    assert first == second
    assert not json.loads(second.read_text())["passed"]
    assert [path.name for path in (tmp_path / "proofs").iterdir()] == [second.name]


def test_without_a_gpu_nothing_is_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sglang_ddtree.args.compute_capability", lambda _gpus: "none")
    assert selftest.main(["--pair", str(FOLDER), "--proofs-dir", str(tmp_path / "proofs")]) == 2
    assert "no CUDA GPU" in capsys.readouterr().err
    assert not (tmp_path / "proofs").exists()
