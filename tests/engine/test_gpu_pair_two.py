"""The pair on two GPUs beside one: which arms run, and what is concluded from their answers."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from cpu_pair import FOLDER
from sglang_ddtree import selftest
from sglang_ddtree.parity import models, pool, suite
from sglang_ddtree.parity.plan import Arm

from benchmarks.gpu import judge, pair_two, stages, tables

CHOSEN = pair_two.arms(FOLDER)
QUESTION = pair_two.QUESTION
TREE = "pair/tree-16-on-2"


def answer(arm: Arm) -> dict[str, Any]:
    """A good one: every request repeats its prompt's first token."""
    results: list[dict[str, Any]] = []
    for job in arm.jobs:
        if job["job"] == "timed":
            results.append({"job": "timed", "batch": job["batch"], "ms_per_round": 3.0, "tok_per_s": 900.0,
                            "tokens_per_round": 2.5, "spread_ms": [3.0]})  # fmt: skip
        else:
            ids = [[ask["ids"][0]] * selftest.NEW_TOKENS for ask in job["asks"]]
            results.append({"job": job["job"], "ids": ids, "finish": ["length"] * len(ids), "rounds": [40] * len(ids)})
    found = {"ok": True, "start_s": 9.0, "states": arm.states, "results": results}
    return found if arm.tp == 1 else {**found, "sums": [1, 2, 3], "ranks": 2, "apart": []}


def answers() -> dict[str, Any]:
    return {arm.name: answer(arm) for arm in CHOSEN}


def parted(results: dict[str, Any], name: str = TREE, at: int = 7) -> dict[str, Any]:
    """The same, with another token in one request of an arm."""
    changed = copy.deepcopy(results)
    changed[name]["results"][1]["ids"][2][at] = 5
    return changed


def asked(results: dict[str, Any], distance: float) -> dict[str, Any]:
    """The same, with plain decoding's answer about the differences: the two tokens so far apart."""
    (question,) = pair_two.question(FOLDER, CHOSEN, results)
    (token,) = {one["tokens"][0] for lines in pair_two.differences(CHOSEN, results).values() for one in lines}
    law = [-9.0] * 2048
    law[token], law[5] = -1.0, -1.0 - distance
    laws = [law] * len(question.jobs[0]["sequences"])
    return {**results, QUESTION: {"ok": True, "start_s": 1.0, "results": [{"logprobs": laws}]}}


def wrong(results: dict[str, Any]) -> dict[str, list[str]]:
    return {row["arm"]: row["wrong"] for row in pair_two.rows(CHOSEN, results) if row["wrong"]}


def test_every_mode_runs_on_one_gpu_and_on_two_with_the_same_jobs() -> None:
    assert [arm.tp for arm in CHOSEN] == [1, 2] * len(pair_two.CELLS)
    for one, two in zip(CHOSEN[::2], CHOSEN[1::2], strict=True):
        assert pair_two.partner(two) == one.name
        assert one.jobs == two.jobs
        assert {one.dtype, two.dtype} == {"bfloat16"}
        assert (one.kind, one.budget, one.drafter) == (two.kind, two.budget, two.drafter)
    timed = [job for job in CHOSEN[0].jobs if job["job"] == "timed"]
    assert [(job["batch"], len(job["lines"])) for job in timed] == [(1, 1), (8, 8)]
    assert {(arm.kind, arm.budget) for arm in CHOSEN if arm.kind == "tree"} == {("tree", 16), ("tree", 32)}


def test_two_gpus_that_give_one_gpus_tokens_hold() -> None:
    found = pair_two.rows(CHOSEN, answers())
    assert [row["wrong"] for row in found] == [[]] * len(CHOSEN)
    assert [(row["mode"], row["gpus"]) for row in found[:3]] == [("ar", 1), ("ar", 2), ("linear", 1)]
    two = next(row for row in found if row["arm"] == TREE)
    assert (two["differences"], two["compared"], two["rounds_compared"]) == ([], 12, 3)
    assert {one["batch"] for one in two["measured"]} == {1, 8}
    assert pair_two.question(FOLDER, CHOSEN, answers()) == []


def test_a_token_at_a_near_tie_holds_and_one_that_is_none_does_not() -> None:
    near = asked(parted(answers()), 0.03)
    assert wrong(near) == {}
    row = next(row for row in pair_two.rows(CHOSEN, near) if row["arm"] == TREE)
    (one,) = row["differences"]
    assert (one["at"], one["of"], one["gap"]) == (7, 96, 0.03)
    found = wrong(asked(parted(answers()), 1.5))
    assert found == {TREE: ["token 7 is not one GPU's, and plain decoding has the two 1.5 nats apart"]}


def test_a_law_is_asked_for_the_difference_it_belongs_to() -> None:
    results = parted(parted(answers(), "pair/linear-on-2", at=3), at=9)
    (question,) = pair_two.question(FOLDER, CHOSEN, results)
    prompt = CHOSEN[0].jobs[1]["asks"][2]["ids"]
    assert [len(sequence) - len(prompt) for sequence in question.jobs[0]["sequences"]] == [3, 9]
    assert (question.tp, question.dtype, question.kind) == (1, "bfloat16", "ar")
    found = asked(results, 0.0)
    law = list(found[QUESTION]["results"][0]["logprobs"][0])
    law[5] -= 2.0
    found[QUESTION]["results"][0]["logprobs"][1] = law
    assert list(wrong(found)) == [TREE]


def test_ranks_that_part_are_wrong_whatever_they_emit() -> None:
    results = answers()
    results[TREE]["apart"] = ["rank 1 parted from rank 0 in tree round 2 of 3"]
    assert wrong(results) == {TREE: results[TREE]["apart"]}
    results[TREE] |= {"apart": [], "sums": []}
    assert wrong(results) == {TREE: ["no tree round of its ranks was compared"]}


@pytest.mark.parametrize("late", [True, False])
def test_what_was_compared_with_nothing_holds_not_and_is_late_where_time_was_short(late: bool) -> None:
    gone = {"ok": False, "late": late, "error": "ran out of time"}
    one, two = "pair/tree-16-on-1", TREE
    found = {row["arm"]: row for row in pair_two.rows(CHOSEN, {**answers(), one: gone})}
    assert found[two]["wrong"] == [f"compared with nothing: {one} gave no answer"]
    assert found[two]["late"] == found[one]["late"] == late
    found = {row["arm"]: row for row in pair_two.rows(CHOSEN, {**answers(), two: gone})}
    assert (found[two]["wrong"], found[two]["late"], found[one]["wrong"]) == (["ran out of time"], late, [])
    unasked = {**parted(answers()), QUESTION: gone}
    found = {row["arm"]: row for row in pair_two.rows(CHOSEN, unasked)}
    assert (found[two]["wrong"], found[two]["late"]) == (["no answer about the gaps"], late)


def test_nothing_is_asked_before_all_arms_have_ended() -> None:
    results = parted(answers())
    del results["pair/ar-on-1"]
    assert pair_two.question(FOLDER, CHOSEN, results) == []


def test_the_clock_is_on_the_pairs_own_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from sglang_ddtree.parity import jobs
    from sglang_ddtree.parity.session import Answer

    seen: list[list[list[int]]] = []

    class Played:
        def run(self, asks: list[Any]) -> list[Answer]:
            seen.append([ask.ids for ask in asks])
            new = [ask.params["max_new_tokens"] for ask in asks]
            return [Answer([1] * count, count // 2, "length", 0.1) for count in new]

    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    job = next(job for job in CHOSEN[0].jobs if job.get("batch") == 8)
    found = jobs.timed(Played(), **{key: value for key, value in job.items() if key != "job"})  # type: ignore[arg-type]
    assert seen == [job["lines"]] * len(seen)
    assert found["tokens_per_round"] == pytest.approx(2.0)
    assert found["batch"] == 8


# Stands for an arm's process: answers the jobs that its question has, as its rank; the second rank of one mode parts.
PLAYED = """
import json, pathlib, sys
asked, rank = json.loads(pathlib.Path(sys.argv[1]).read_text()), int(sys.argv[3])
results = []
for job in asked["jobs"]:
    if job["job"] == "timed":
        results.append({"job": "timed", "batch": job["batch"], "ms_per_round": 3.0, "tok_per_s": 900.0 * asked["tp"],
                        "tokens_per_round": 2.5, "spread_ms": [3.0]})
    else:
        ids = [[7] * ask["params"]["max_new_tokens"] for ask in job["asks"]]
        results.append({"job": job["job"], "ids": ids, "finish": ["length"] * len(ids), "rounds": [40] * len(ids)})
found = {"ok": True, "start_s": 9.0, "states": "snapshots", "results": results}
if asked["tp"] > 1:
    assert {"--disable-custom-all-reduce"} <= set(asked["argv"])
    assert pathlib.Path(asked["store"]).parent == pathlib.Path(sys.argv[1]).parent
    found["sums"] = [1, 2, 3 + rank * ("PARTS" in asked["argv"])] if "tree" in asked["argv"] else []
pathlib.Path(sys.argv[2]).write_text(json.dumps(found))
"""


@pytest.mark.parametrize("parts", [False, True])
def test_the_stage_is_carried_out_from_its_command_to_its_table(
    parts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "played.py"
    program.write_text(PLAYED.replace('"PARTS"', '"--speculative-ddtree-mode"') if parts else PLAYED)
    monkeypatch.setattr(pool, "PROGRAM", (str(program),))
    monkeypatch.setattr(models, "write", lambda *_args, **_given: None)
    out = tmp_path / "pair-two"
    status = pair_two.main(["--out", str(out), "--parallel", "4", "--limit-s", "120"])
    verdict = judge.judge("pair-two", judge.Outcome(out, status))
    assert (status, verdict.status) == ((1, "red") if parts else (0, "green")), verdict.reasons
    report = {"about": {}, "stages": {"pair-two": {"result": json.loads((out / "report.json").read_text())["rows"]}}}
    lines = [line for line in tables.pair_two(report).splitlines() if line.startswith("| tree-16")]
    assert [line.split(" | ")[1] for line in lines] == ["1", "8"]
    assert ("rank 1 parted from rank 0 in tree round 2 of 3" in lines[0]) == parts
    assert ("| 900 | 1800 | 2.00 | 0 of 12 | 3 | holds |" in lines[0]) == (not parts)


def test_suite_and_self_test_take_the_flags_of_their_stages() -> None:
    filled = {"{cores}": "16", "{limit}": "300"}
    programs = {"sglang_ddtree.parity.suite": suite.arguments, "sglang_ddtree.selftest": selftest.arguments}
    found = {}
    for stage in stages.stages(stages.Setting("python", Path("/w"), 32)):
        if stage.argv[2] in programs:
            options = programs[stage.argv[2]]([filled.get(word, word) for word in stage.argv[3:]])
            found[stage.name] = (options.tp, options.nccl_only)
    on_two = {name for name, flags in found.items() if flags == (2, True)}
    assert on_two == {"parity-two", "selftest-two", "selftest-two-records"}
    assert {flags for name, flags in found.items() if name not in on_two} == {(1, False)}
