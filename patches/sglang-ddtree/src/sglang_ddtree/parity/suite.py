"""Runs arms side by side on one GPU, judges them, writes one JSON report: `python -m sglang_ddtree.parity.suite
--out DIR`.

Exit code 0 only if every check of the chosen sections holds. Each arm is a process of its own; most of an arm's
time is imports and graph capture on the CPU, so as many run at once as there are cores for.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from sglang_ddtree import states
from sglang_ddtree.parity import models, plan, ties, verdicts
from sglang_ddtree.parity.arm import EXCLUSIVE
from sglang_ddtree.parity.plan import Arm
from sglang_ddtree.parity.pool import Results, run_arms
from sglang_ddtree.parity.sections import SectionError, gather, reference_of


def judge(results: Results, arms: list[Arm]) -> list[dict[str, Any]]:
    """One row for each arm: its counters, and every way in which it is wrong. `late`: for want of time only."""
    by_name = {arm.name: arm for arm in arms}
    return [judge_arm(arm, results, by_name) for arm in arms]


def judge_arm(arm: Arm, results: Results, by_name: dict[str, Arm]) -> dict[str, Any]:
    result = results[arm.name]
    row: dict[str, Any] = {
        "arm": arm.name,
        "kind": arm.kind,
        "budget": arm.budget,
        "cap": arm.cap,
        "dtype": arm.dtype,
        "states": arm.states,
    }
    if not result["ok"]:
        return {**row, "wrong": [last_line(result)], "late": bool(result.get("late"))}
    wrong, late = verdicts.job_failures(result), False
    if arm.kind in ("tree", "auto") and result["states"] != arm.states:
        wrong.append(f"kept {result['states']}, not {arm.states}: nothing is shown of them")
    name = reference_of(arm)
    reference = results.get(name)
    exact = not ties.allowed(arm) or arm.kind == "linear"
    same = verdicts.same_tokens if exact else verdicts.same_finishes
    if reference is not None and reference is not result and (exact or arm.seeded):
        if reference["ok"]:
            wrong += same(reference, result, plan.common_jobs(by_name[name], arm))
        else:
            late = not wrong and bool(reference.get("late"))
            wrong.append(f"compared with nothing: {name} gave no answer")
    counted = verdicts.last_counters(result)
    measured = [job for job in result["results"] if job["job"] in EXCLUSIVE]
    only_measured = all(job["job"] in EXCLUSIVE for job in arm.jobs)  # in which nothing is summed
    if arm.tp > 1 and arm.kind == "tree" and not (arm.jobs and only_measured) and not result["sums"]:
        wrong.append("no tree round of its ranks was compared")
    return {
        **row,
        "informed": verdicts.commits(result),
        "start_s": result["start_s"],
        "accept_length": verdicts.accept_length(result),
        "off_spine": counted.get("accepted_off_spine"),
        "nodes": counted.get("nodes_per_tree"),
        "wrong": wrong,
        **({"late": True} if late else {}),
        **({"prefix_cache": result["prefix_cache"]} if result.get("prefix_cache") else {}),
        **({"measured": measured} if measured else {}),
        **({"ranks": arm.tp, "rounds_compared": len(result["sums"])} if arm.tp > 1 else {}),
    }


def last_line(result: dict[str, Any]) -> str:
    return (str(result["error"]).strip().splitlines() or ["no reason"])[-1]


def about_auto(row: dict[str, Any]) -> bool:
    """Whether the row is of an arm in mode auto, or of a question about one."""
    return str(row["arm"]).partition("/")[2].startswith("auto")


def auto_key(rows: list[dict[str, Any]], kept: str) -> dict[str, str]:
    """What a record says of mode auto: its sources, if arms in that mode ran, all were right, and side branches of
    trees were accepted in them. Otherwise nothing, which leaves what is said of trees of one width as it is.
    """
    from sglang_ddtree import proofs

    own = [row for row in rows if about_auto(row)]
    shown = any(row.get("off_spine") for row in own) and not any(row["wrong"] for row in own)
    return {"auto": proofs.auto_digest(states=kept)} if shown else {}


def about_prefix_cache(row: dict[str, Any]) -> bool:
    """Whether the row is of an arm with the prefix cache on."""
    return str(row["arm"]).partition("/")[2].removesuffix("@records").endswith("-radix")


def prefix_cache_key(rows: list[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """What a record says of the prefix cache: by the strategy that a server resolved, the widest tree whose states went
    through it, if the arms that ran with the cache were right and side branches of trees were accepted in them.
    Otherwise nothing, which leaves what is said of trees without it as it is.
    """
    own = [row for row in rows if about_prefix_cache(row)]
    if any(row["wrong"] for row in own):
        return {}
    shown: dict[str, int] = {}
    for row in own:
        if row.get("prefix_cache") and row.get("off_spine"):
            shown[row["prefix_cache"]] = max(row["budget"], shown.get(row["prefix_cache"], 0))
    return {"prefix_cache": shown} if shown else {}


def about_trees(row: dict[str, Any]) -> bool:
    """Whether a record stands or falls with the row; the others decide about a key of their own."""
    return not about_auto(row) and not about_prefix_cache(row)


def kept_by(arms: list[Arm]) -> str:
    """How the trees of these arms keep states. Raises SectionError where that is not one way: a record is about one."""
    kept = sorted({arm.states for arm in arms if arm.kind in ("tree", "auto")})
    if len(kept) != 1:
        found = " and ".join(kept) if kept else "no tree"
        raise SectionError(f"a record is about trees that keep states in one way, and these arms have {found}")
    return kept[0]


def proof(rows: list[dict[str, Any]], arms: list[Arm], when: str) -> dict[str, Any]:
    """The record of proofs.py for what these arms showed on this GPU, passed or not."""
    import torch

    from sglang_ddtree import args, proofs

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    wrong = {row["arm"]: row["wrong"] for row in rows if row["wrong"]}
    kept, tp = kept_by(arms), max(arm.tp for arm in arms)
    return {
        "schema": proofs.SCHEMA,
        "engine": proofs.engine_digest(states=kept, tp=tp),
        "states": kept,
        "tp": tp,
        "architecture": models.MODELS[arms[0].target]["architectures"][0],
        "backend": "triton",
        "compute_capability": args.compute_capability(range(tp)),
        "driver": proofs.running_driver(),
        "max_budget": max(arm.budget for arm in arms),
        "passed": not any(row["wrong"] for row in rows if about_trees(row)),
        **auto_key(rows, kept),
        **prefix_cache_key(rows),
        "when": when,
        "suite": {"gpu": device, "torch": torch.__version__, "arms": [row["arm"] for row in rows], "wrong": wrong},
    }


def table(rows: list[dict[str, Any]]) -> str:
    lines = [f"{'arm':28} {'start':>6} {'accept':>7} {'nodes':>6} {'off spine':>9} {'informed':>14}  verdict"]
    for row in rows:
        verdict = "equal" if not row["wrong"] else "WRONG: " + "; ".join(row["wrong"])[:150]
        lines.append(
            f"{row['arm']:28} {row.get('start_s', '-')!s:>6} {row.get('accept_length', '-')!s:>7} "
            f"{row.get('nodes', '-')!s:>6} {row.get('off_spine', '-')!s:>9} "
            f"{row.get('informed', {}).get('accept_length', '-')!s:>14}  {verdict}"
        )
    return "\n".join(lines)


ORACLE_TOLERANCE = {"float32": 2e-3, "bfloat16": 0.25}  # of a log-probability; a wrong parent shows as order 1


def askable(arms: list[Arm], results: Results) -> list[Arm]:
    """The second questions that the answers so far raise: plain decoding about each node that was recorded, as soon as
    every oracle arm of a target has ended, and about its law at each first difference that may be a near tie.
    """
    return [*oracle_questions(arms, results).values(), *ties.questions(arms, results).values()]


def oracle_questions(arms: list[Arm], results: Results) -> dict[str, Arm]:
    """By target: the arm that is asked about all its recorded nodes."""
    found = {}
    recorders = [arm for arm in arms if arm.jobs[0]["job"] == "record_trees"]
    for target in dict.fromkeys(arm.target for arm in recorders):
        names = [arm.name for arm in recorders if arm.target == target]
        trees = recorded([results[name] for name in names if name in results])
        if all(name in results for name in names) and trees:
            found[target] = plan.oracle_reference(target, verdicts.oracle_sequences(trees))
    return found


def recorded(answers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [tree for answer in answers if answer["ok"] for tree in answer["results"][0]["trees"]]


def oracle_rows(arms: list[Arm], results: Results) -> list[dict[str, Any]]:
    """Each recorded node's law against plain decoding's over the node's own path."""
    rows = []
    questions = oracle_questions(arms, results)
    for arm in (a for a in arms if a.jobs[0]["job"] == "record_trees" and results[a.name]["ok"]):
        question = questions.get(arm.target)
        row: dict[str, Any] = {"arm": arm.name + "/laws", "kind": "oracle", "wrong": []}
        answer = results.get(question.name) if question else None
        if question is None or answer is None or not answer["ok"]:
            row["wrong"] = [last_line(answer) if answer else "nothing was recorded"]
            row["late"] = bool(answer and answer.get("late"))
        else:
            sequences = question.jobs[0]["sequences"]
            laws = answer["results"][0]["logprobs"]
            row["laws"] = verdicts.oracle_errors(results[arm.name]["results"][0]["trees"], sequences, laws)
            if row["laws"]["max_error"] > ORACLE_TOLERANCE[arm.dtype]:
                row["wrong"] = [f"a node's law differs by {row['laws']['max_error']:.4f}"]
        rows.append(row)
    return rows


def sources() -> str:
    """sha256 over all modules of this package: an answer is kept only while it would be given again."""
    digest = hashlib.sha256()
    root = Path(__file__).parents[1]
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


NCCL_HELP = "with --tp: sums over GPUs by NCCL, not by SGLang's own kernels, which may use NVLink multicast"


def arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--section", action="append", default=[], help="TARGET/SECTION[:TAIL,TAIL], see sections.py")
    parser.add_argument("--only", action="append", default=[], help="run these arms of the sections only")
    parser.add_argument("--parallel", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--limit-s", type=float, default=540)
    parser.add_argument("--gpu-lock", type=Path, help="shared with other suites that use the GPU at the same time")
    parser.add_argument("--keep", action="store_true", help="keep the answers in OUT that these sources have given")
    parser.add_argument("--states", choices=states.CHOICES, help="how all arms keep a tree's recurrent states")
    parser.add_argument("--tp", type=int, choices=(1, 2, 4), default=1, help="GPUs that share a model")
    parser.add_argument("--nccl-only", action="store_true", help=NCCL_HELP)
    parser.add_argument("--proof", type=Path, help="write the record that admits this combination on this host")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    options = arguments(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the arms end, too
    spread = partial(plan.spread, tp=options.tp, nccl_only=options.nccl_only)
    try:
        arms = [
            spread(dataclasses.replace(a, states=options.states or a.states))
            for a in gather(options.section)
            if (not options.only or a.name in options.only) and (options.tp == 1 or a.kind != "auto")
        ]
        if options.proof is not None:
            kept_by(arms)
    except SectionError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    results = run_arms(
        arms,
        options.out,
        options.parallel,
        time.monotonic() + options.limit_s,
        more=lambda found: [spread(a) for a in askable(arms, found)],
        lock=options.gpu_lock,
        sources=sources() if options.keep else "",
    )
    rows = judge(results, arms) + oracle_rows(arms, results) + ties.rows(arms, results)
    print(table(rows))
    (options.out / "report.json").write_text(json.dumps({"rows": rows}, indent=1))
    if options.proof is not None:
        when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        options.proof.parent.mkdir(parents=True, exist_ok=True)
        options.proof.write_text(json.dumps(proof(rows, arms, when), indent=1))
    return 0 if all(not row["wrong"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
