"""What the parity suite concludes from its arms, and which arms it runs: no GPU, no SGLang."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang_ddtree.parity import plan, sections, suite, ties, verdicts
from sglang_ddtree.parity.informed import RANKS, Informant
from sglang_ddtree.parity.jobs_data import prompts


def result(ids: list[list[int]], finish: list[str] | None = None, **more: Any) -> dict[str, Any]:
    return {
        "ok": True,
        "start_s": 1.0,
        "states": "snapshots",
        "results": [{"job": "tokens", "ids": ids, "finish": finish or ["x"], **more}],
    }


@pytest.mark.parametrize(
    ("a", "b", "at"), [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1], [1, 2], 1), ([], [], None)]
)
def test_first_difference(a: list[int], b: list[int], at: int | None) -> None:
    assert verdicts.first_difference(a, b) == at


def test_a_difference_and_a_wrong_end_are_both_told() -> None:
    wrong = verdicts.same_tokens(result([[1, 2, 3]]), result([[1, 9, 3]], ["y"]), [0])
    assert "differs at token 1" in wrong[0]
    assert "finishes" in wrong[1]
    assert verdicts.same_tokens(result([[1]]), result([[1]]), [0]) == []


def test_an_aborted_request_may_end_anywhere_but_not_differ() -> None:
    cut = result([[1, 2, 3, 4]], ["FINISH_ABORT"])
    assert verdicts.same_tokens(cut, result([[1, 2]], ["FINISH_ABORT"]), [0]) == []
    assert verdicts.same_tokens(cut, result([[1, 9]], ["FINISH_ABORT"]), [0]) != []


def test_first_differences_carry_what_a_tie_is_judged_by() -> None:
    want, got = result([[4, 5, 6]], asks=[{"ids": [1, 2]}]), result([[4, 9, 9]])
    (found,) = verdicts.differences(want, got, [0])
    assert found == {"sequence": [1, 2, 4], "params": {}, "tokens": [5, 9], "at": 1, "of": 3}


def test_jobs_report_their_own_failures() -> None:
    bad = result([[1]], wrong=["row 3 changed"], audited_rounds=0)
    assert verdicts.job_failures(bad) == ["job 0: row 3 changed", "job 0 audited no round"]


def test_accept_length_counts_rounds_not_the_prefill() -> None:
    assert verdicts.accept_length(result([[1] * 11, [1] * 21], rounds=[5, 10])) == 2.0
    assert verdicts.accept_length(result([[1]], rounds=[0])) is None


TREE = {
    "prefix": [5, 6],
    "tokens": [6, 1, 2, 3],
    "parent": [0, 0, 0, 2],
    "depth": [0, 1, 1, 2],
    "logprobs": [[-1.0, -2.0]] * 4,
}


def test_a_nodes_sequence_is_its_prefix_and_path() -> None:
    assert verdicts.node_paths(TREE) == [[5, 6], [5, 6, 1], [5, 6, 2], [5, 6, 2, 3]]
    assert verdicts.oracle_sequences([TREE, TREE]) == verdicts.node_paths(TREE)


def test_the_oracle_sees_a_wrong_node() -> None:
    sequences = verdicts.oracle_sequences([TREE])
    right = verdicts.oracle_errors([TREE], sequences, [[-1.0, -2.0]] * 4)
    assert right["max_error"] == 0.0
    assert (right["nodes"], right["nodes_with_elder_sibling"], right["top1_equal"]) == (4, 1, 4)
    wrong = verdicts.oracle_errors([TREE], sequences, [[-1.0, -2.0]] * 3 + [[-2.0, -1.0]])
    assert wrong["max_error"] == 1.0
    assert wrong["max_error_by_depth"] == {"0": 0.0, "1": 0.0, "2": 1.0}
    assert wrong["top1_equal"] == 3


def test_every_budget_and_cap_is_run_on_both_targets() -> None:
    for target in ("dense", "hybrid"):
        arms = plan.matrix(target)
        cells = {(a.budget, a.cap) for a in arms if a.kind == "tree"}
        assert {b for b, c in cells if c == 8} == set(plan.BUDGETS)
        assert {c for _b, c in cells} == set(plan.CAPS)
        assert {a.kind for a in arms} == {"ar", "dflash", "linear", "tree"}


def test_arms_are_compared_with_plain_decoding_of_the_same_jobs() -> None:
    arms = [*plan.matrix("hybrid"), *plan.behaviour("hybrid"), *plan.audits("hybrid")]
    by_name = {a.name: a for a in arms}
    for arm in arms:
        if arm.kind != "ar" and "oracle" not in arm.name:
            assert plan.common_jobs(by_name[sections.reference_of(arm)], arm), arm.name


def test_a_wrong_arm_turns_the_report_red(tmp_path: Path) -> None:
    arms = [a for a in plan.matrix("dense") if a.name in ("dense/ar", "dense/tree-16-8")]
    jobs = [{"job": "tokens", "ids": [[1, 2]], "finish": ["e"], "rounds": [1], "leaked": False} for _ in arms[0].jobs]
    good = {"ok": True, "start_s": 1.0, "states": "snapshots", "results": jobs}
    bad = {**good, "results": [*jobs[:-1], {**jobs[-1], "ids": [[1, 3]]}]}
    assert all(not r["wrong"] for r in suite.judge({a.name: good for a in arms}, arms))
    rows = suite.judge({"dense/ar": good, "dense/tree-16-8": bad}, arms)
    assert "differs at token 1" in rows[1]["wrong"][0]
    assert "WRONG" in suite.table(rows)
    crashed = suite.judge({"dense/ar": good, "dense/tree-16-8": {"ok": False, "error": "Traceback\nBoom: x"}}, arms)
    assert crashed[1]["wrong"] == ["Boom: x"]
    wanted = [dataclasses.replace(a, states="records") for a in arms]
    kept = suite.judge({a.name: good for a in wanted}, wanted)
    assert [len(row["wrong"]) for row in kept] == [0, 1]  # plain decoding keeps neither
    assert kept[1]["wrong"] == ["kept snapshots, not records: nothing is shown of them"]
    assert tmp_path.is_dir()


def test_the_self_test_writes_a_record_the_engine_accepts() -> None:
    from sglang_ddtree import args, proofs

    arms = plan.selftest("hybrid")
    assert {a.kind for a in arms} == {"ar", "dflash", "linear", "tree"}
    rows = [{"arm": a.name, "wrong": []} for a in arms]
    record = suite.proof(rows, arms, "2026-01-01T00:00:00Z")
    capability, driver = args.compute_capability(), proofs.running_driver()
    wanted = proofs.Combination("Qwen3_5ForCausalLM", "triton", capability, proofs.engine_digest(), driver, 64)
    assert proofs.reject(record, wanted) is None
    rows[0]["wrong"] = ["differs"]
    assert "did not pass" in (proofs.reject(suite.proof(rows, arms, ""), wanted) or "")


def test_what_a_job_was_to_meet_and_did_not_is_wrong() -> None:
    aborted = result([[1], [2]], ["FINISH_LENGTH", "FINISH_ABORT"], to_abort=[1])
    assert verdicts.job_failures(aborted) == []
    aborted["results"][0]["finish"][1] = "FINISH_LENGTH"
    assert verdicts.job_failures(aborted) == ["job 0: request 1 ended before it was aborted"]
    assert verdicts.job_failures(result([[1]], cached=[64, 0])) == [
        "job 0: request 1 found nothing in the prefix cache"
    ]
    own = result([[1]], cached=[64, 0, 128], prompts=[63, 5, 128])
    assert verdicts.job_failures(own) == [
        "job 0: request 1 found nothing in the prefix cache",
        "job 0: request 2 found no more than its first prompt in the prefix cache",
    ]


def turns(kind: str, ids: list[list[int]], **more: Any) -> dict[str, Any]:
    """The answer of an arm with the prefix cache."""
    counted = {"counters": {"counters": {"accepted_off_spine": 9, "nodes_per_tree": 16.0}}} if kind == "tree" else {}
    found = result(ids, cached=[64], prompts=[20], rounds=[1], **counted)
    return {**found, "prefix_cache": "extra_buffer", **more}


@pytest.mark.parametrize("states", ["snapshots", "records"])
def test_the_suite_proves_the_prefix_cache_by_what_its_servers_resolved(states: str) -> None:
    from sglang_ddtree import args, proofs

    arms = sections.parse("hybrid/selftest" if states == "snapshots" else "hybrid/selftest@records")
    radix = [arm for arm in arms if arm.extra_buffer]
    rest = [{"arm": arm.name, "wrong": []} for arm in arms if not arm.extra_buffer]
    wanted = proofs.Combination(
        "Qwen3_5ForCausalLM", "triton", args.compute_capability(), proofs.engine_digest(states=states),
        proofs.running_driver(), 16, states, prefix_cache="extra_buffer",
    )  # fmt: skip

    def record(plain: dict[str, Any], tree: dict[str, Any]) -> dict[str, Any]:
        results = {radix[0].name: plain, radix[1].name: {"states": states, **tree}}
        return suite.proof([*rest, *suite.judge(results, radix)], arms, "")

    plain, tree = turns("ar", [[1, 2]]), {**turns("tree", [[1, 2]]), "states": states}
    shown = record(plain, tree)
    assert shown["prefix_cache"] == {"extra_buffer": 16}
    assert proofs.reject(shown, wanted) is None
    assert "nodes, not 17" in (proofs.reject(shown, dataclasses.replace(wanted, budget=17)) or "")
    for wrong in (
        {**tree, "results": [{**tree["results"][0], "ids": [[1, 3]]}]},
        {**tree, "results": [{**tree["results"][0], "cached": [0]}]},
        {**tree, "results": [{**tree["results"][0], "counters": {}}]},
        {**tree, "prefix_cache": None},
        {"ok": False, "error": "Boom"},
    ):
        silent = record(plain, wrong)
        assert silent["passed"]
        assert "prefix_cache" not in silent
        assert proofs.reject(silent, dataclasses.replace(wanted, prefix_cache=None)) is None
        assert proofs.reject(silent, wanted) == "is about trees without the prefix cache"
    silent = record({"ok": False, "error": "Boom"}, tree)
    assert "prefix_cache" not in silent
    assert radix[1].name in silent["suite"]["wrong"]


def test_an_arm_that_time_did_not_allow_is_told_from_a_wrong_one() -> None:
    arms = sections.parse("hybrid/matrix:tree-16-2")
    answered = {
        "ok": True,
        "start_s": 1.0,
        "states": "snapshots",
        "results": [dict(result([[1]])["results"][0]) for _ in arms[0].jobs],
    }
    late = {"ok": False, "late": True, "error": "tail\nran out of time"}
    plain, tree = suite.judge({"hybrid/ar": answered, "hybrid/tree-16-2": late}, arms)
    assert (plain["wrong"], tree["wrong"], tree["late"]) == ([], ["ran out of time"], True)
    plain, tree = suite.judge({"hybrid/ar": late, "hybrid/tree-16-2": answered}, arms)
    assert tree["wrong"] == ["compared with nothing: hybrid/ar gave no answer"]
    assert tree["late"]
    crashed = {"ok": False, "error": "Boom"}
    _plain, tree = suite.judge({"hybrid/ar": crashed, "hybrid/tree-16-2": answered}, arms)
    assert tree["wrong"]
    assert not tree.get("late")


def test_each_recorded_node_is_asked_about_once_all_recorders_have_ended() -> None:
    arms = plan.oracle("hybrid")
    answered = {
        "ok": True,
        "start_s": 1.0,
        "states": "snapshots",
        "results": [{"job": "record_trees", "trees": [TREE]}],
    }
    assert suite.askable(arms, {arms[0].name: answered}) == []
    results: dict[str, Any] = {arm.name: answered for arm in arms[1:]}
    results[arms[0].name] = {"ok": False, "error": "Boom"}
    (question,) = suite.askable(arms, results)
    assert question.jobs[0]["sequences"] == verdicts.node_paths(TREE)
    laws = {"ok": True, "results": [{"logprobs": [[-1.0, -2.0]] * 4}]}
    rows = suite.oracle_rows(arms, {**results, question.name: laws})
    assert [row["wrong"] for row in rows] == [[], []]
    laws["results"][0]["logprobs"][3] = [-2.0, -1.0]
    assert "law differs" in suite.oracle_rows(arms, {**results, question.name: laws})[0]["wrong"][0]
    (late, _) = suite.oracle_rows(arms, {**results, question.name: {"ok": False, "late": True, "error": "late"}})
    assert late["late"]


def test_in_bfloat16_the_gap_at_each_difference_is_asked_for() -> None:
    arms = plan.half_precision("hybrid")

    def answer_of(last: list[int]) -> dict[str, Any]:
        lines = [[[4, 5, 6]] * len(job["asks"]) for job in arms[0].jobs]
        lines[-1] = [last] * len(lines[-1])
        return {
            "ok": True,
            "start_s": 1.0,
            "states": "snapshots",
            "results": [result(ids)["results"][0] for ids in lines],
        }

    plain, left = answer_of([4, 5, 6]), answer_of([4, 9, 6])
    results = {arm.name: left if arm.kind == "tree" else plain for arm in arms}
    (question,) = suite.askable(arms, results)
    assert (question.name, question.dtype) == ("hybrid/bf16-tree-gaps", "bfloat16")
    law = [0.0] * 32
    law[5], law[9] = -1.0, -1.05
    answer = {"ok": True, "results": [{"logprobs": [law] * len(question.jobs[0]["sequences"])}]}
    rows = {row["arm"]: row for row in ties.rows(arms, {**results, question.name: answer})}
    assert rows["hybrid/bf16-linear/ties"]["differences"] == []
    assert {d["gap"] for d in rows["hybrid/bf16-tree/ties"]["differences"]} == {0.05}
    assert rows["hybrid/bf16-tree/ties"]["wrong"] == []
    law[9] = -1.5
    rows = {row["arm"]: row for row in ties.rows(arms, {**results, question.name: answer})}
    assert "gap 0.5" in rows["hybrid/bf16-tree/ties"]["wrong"][0]


# Plain decoding's law at a token of hybrid/tree-seeded, seen on an H200: 16 and 15, ranks 1 and 2, are 0.00006 apart.
LAW = [
    -2.96939, -2.321142, -3.64761, -3.487003, -4.529769, -3.645468, -3.173802, -3.140857, -4.933427, -3.43352,
    -4.37025, -3.650011, -2.428299, -5.092111, -2.727582, -2.425891, -2.425828, -4.862, -3.969298, -4.587157,
    -4.919603, -3.526801, -4.199412, -5.005658, -3.630302, -3.129381, -4.262576, -5.5335, -4.946638, -3.701137,
    -3.476874, -4.505987,
]  # fmt: skip
SEEDED = {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "sampling_seed": 1234}


def test_a_seeded_draw_may_differ_where_a_law_nearby_draws_it() -> None:
    assert ties.drawn_nearby(LAW, SEEDED, 91, 15), "plain decoding's own"
    assert ties.drawn_nearby(LAW, SEEDED, 91, 16), "with ranks 1 and 2 swapped"
    others = [token for token in range(32) if token not in (15, 16)]
    assert not any(ties.drawn_nearby(LAW, SEEDED, 91, token) for token in others)
    assert not ties.drawn_nearby(LAW, SEEDED, 92, 15), "another position has other noise"


def test_a_seeded_tree_is_asked_about_what_it_drew_differently() -> None:
    arms = [arm for arm in plan.behaviour("hybrid") if arm.seeded]
    asks = arms[0].jobs[0]["asks"]
    sequence = [*range(91 - len(asks[0]["ids"]) + 1)]

    def answer_of(token: int, finish: str = "FINISH_LENGTH") -> dict[str, Any]:
        jobs = [[[*sequence, token]] * len(job["asks"]) for job in arms[0].jobs]
        more = {"rounds": [1]}
        return {**result([]), "results": [result(ids, [finish], **more)["results"][0] for ids in jobs]}

    ar, tree = (arm.name for arm in arms)
    assert suite.askable(arms, {ar: answer_of(15), tree: answer_of(15)}) == []
    results = {ar: answer_of(15), tree: answer_of(16)}
    assert [row["wrong"] for row in suite.judge(results, arms)] == [[], []]
    (question,) = suite.askable(arms, results)
    assert (question.name, question.dtype) == (f"{tree}-gaps", "float32")
    assert question.jobs[0]["sequences"][0] == [*asks[0]["ids"], *sequence]
    (row,) = ties.rows(arms, results)
    assert row["wrong"] == ["no answer about the gaps"]
    sure = [0.0 if token == 15 else -40.0 for token in range(32)]
    laws = {"ok": True, "results": [{"logprobs": [LAW] + [sure] * (len(question.jobs[0]["sequences"]) - 1)}]}
    (row,) = ties.rows(arms, {**results, question.name: laws})
    assert row["differences"][0] == {"tokens": [15, 16], "at": len(sequence), "of": len(sequence) + 1, "gap": 6.3e-05,
                                     "drawn_nearby": True}  # fmt: skip
    assert len(row["wrong"]) == len(row["differences"]) - 1
    assert "no law within 0.0005 of plain decoding's draws 16" in row["wrong"][0]
    ended = suite.judge({**results, tree: answer_of(16, "FINISH_ABORT")}, arms)
    assert "finishes" in ended[1]["wrong"][0]


def test_the_suite_proves_records_under_their_own_digest() -> None:
    from sglang_ddtree import args, proofs

    arms = [dataclasses.replace(a, states="records") for a in plan.selftest("hybrid")]
    record = suite.proof([{"arm": a.name, "wrong": []} for a in arms], arms, "")
    engine = proofs.engine_digest(states="records")
    wanted = proofs.Combination(
        "Qwen3_5ForCausalLM", "triton", args.compute_capability(), engine, proofs.running_driver(), 64, "records"
    )
    assert proofs.reject(record, wanted) is None
    assert engine != proofs.engine_digest()


@pytest.mark.parametrize(
    ("sections", "found"),
    [(["hybrid/matrix:tree-1-8", "hybrid/matrix@records:tree-1-8"], "records and snapshots"),
     (["hybrid/matrix:linear"], "no tree")],
)  # fmt: skip
def test_a_record_of_two_ways_to_keep_states_is_refused_before_anything_runs(
    sections: list[str],
    found: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(suite.signal, "signal", lambda *_: None)  # the test's process keeps its own
    asked = [word for name in sections for word in ("--section", name)]
    assert suite.main(["--out", str(tmp_path / "out"), *asked, "--proof", str(tmp_path / "p.json")]) == 2
    assert found in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_leak_is_wrong() -> None:
    leaky = result([[1]], leaked=True, memory_before={"kv": 5}, memory_after={"kv": 4})
    assert len(verdicts.leaks(leaky)) == 1


def test_the_informant_puts_the_truth_at_the_promised_rank() -> None:
    informant = object.__new__(Informant)
    informant.table = torch.full((2, 40), -1, dtype=torch.int64)
    informant.table[1] = torch.arange(40) % 11
    informant.ranks = torch.tensor(RANKS)
    logits = torch.randn(2 * 4, 11, generator=torch.Generator().manual_seed(0))
    told = informant.sharpen(logits.clone(), torch.tensor([1, 0]), torch.tensor([9, 3]))
    for depth in range(4):
        at = 9 + depth + 1
        order = told[depth].argsort(descending=True).tolist()
        assert abs(order.index(at % 11) - RANKS[at % len(RANKS)]) <= 1
        if RANKS[at % len(RANKS)] == 0:
            assert order[0] == at % 11
    assert torch.equal(told[4:].argsort(), logits[4:].argsort())


def test_prompts_are_fixed_and_stay_inside_the_vocabulary() -> None:
    lines = prompts(4, 10, 32)
    assert lines == prompts(4, 10, 32)
    assert [len(line) for line in lines] == [10, 13, 16, 19]
    assert all(3 <= token < 30 for line in lines for token in line)
