"""The self-test pair on two GPUs beside one, in bfloat16 as served: `python -m benchmarks.gpu.pair_two --out DIR`.

Each mode runs once on one GPU and once spread over two: the pair's prompts alone and as a batch, in which every tree
round of the two ranks is compared, and then on the clock with 1 and 8 requests. Sums over two GPUs round otherwise than
on one, so tokens may part where plain decoding is near a tie; it is asked how near, as the suite does in bfloat16.

DIR/report.json has the rows of the suite, each with its mode and GPUs; those of two GPUs with what differs from one.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from sglang_ddtree import selftest
from sglang_ddtree.parity import plan, suite, ties, verdicts
from sglang_ddtree.parity.plan import Arm
from sglang_ddtree.parity.pool import Results, run_arms

ROOT = Path(__file__).parents[2]
PAIR = ROOT / "patches" / "selftest-pair"
CELLS = (("ar", 16), ("linear", 16), ("tree", 16), ("tree", 32))
BATCHES = (1, 8)
QUESTION = "pair/gaps"


def mode(kind: str, budget: int) -> str:
    return f"{kind}-{budget}" if kind == "tree" else kind


def arms(pair: Path) -> list[Arm]:
    """For each mode its arm on one GPU and, behind it, its arm on two."""
    lines = selftest.load_prompts(pair)
    jobs = (
        *selftest.token_jobs(pair),
        *({"job": "timed", "batch": batch, "lines": lines[:batch], "short": 16, "long": 112} for batch in BATCHES),
    )
    found = []
    for kind, budget in CELLS:
        for gpus in (1, 2):
            whole = selftest.arm(pair, f"{mode(kind, budget)}-on-{gpus}", kind, jobs, budget)
            served = selftest.with_weights(dataclasses.replace(whole, dtype="bfloat16"))
            found.append(plan.spread(served, gpus, nccl_only=True))
    return found


def partner(arm: Arm) -> str:
    """The arm of the same mode on one GPU."""
    return f"{arm.name.rpartition('-')[0]}-1"


def differences(chosen: list[Arm], results: Results) -> dict[str, list[dict[str, Any]]]:
    """By arm on two GPUs that has an answer, and so has its partner: where its requests first part from one GPU's."""
    by_name = {arm.name: arm for arm in chosen}
    found = {}
    for arm in (one for one in chosen if one.tp > 1):
        alone, shared = results.get(partner(arm)), results.get(arm.name)
        if alone and shared and alone["ok"] and shared["ok"]:
            reference = by_name[partner(arm)]
            jobs = plan.common_jobs(reference, arm)
            found[arm.name] = verdicts.differences(ties.with_asks(alone, reference), shared, jobs)
    return found


def question(pair: Path, chosen: list[Arm], results: Results) -> list[Arm]:
    """Plain decoding on one GPU about the law at each difference, once all arms have ended; none if nothing differs."""
    if any(arm.name not in results for arm in chosen):
        return []
    sequences = [one["sequence"] for lines in differences(chosen, results).values() for one in lines]
    if not sequences:
        return []
    asked = selftest.arm(pair, "gaps", "ar", ({"job": "last_logprobs", "sequences": sequences},), 16)
    return [selftest.with_weights(dataclasses.replace(asked, dtype="bfloat16"))]


def gaps(chosen: list[Arm], results: Results) -> dict[str, list[dict[str, Any]]]:
    """The differences without their sequences; each with how far apart plain decoding has the two tokens, in nats, if
    it has answered.
    """
    answer = results.get(QUESTION)
    laws = iter(answer["results"][0]["logprobs"] if answer and answer["ok"] else ())
    found: dict[str, list[dict[str, Any]]] = {}
    for name, lines in differences(chosen, results).items():
        found[name] = [{key: one[key] for key in ("at", "of", "tokens")} for one in lines]
        for one in found[name]:
            if (law := next(laws, None)) is not None:
                left, right = one["tokens"]
                one["gap"] = round(abs(law[left] - law[right]), 4)
    return found


def against_one(arm: Arm, results: Results, parted: list[dict[str, Any]] | None) -> dict[str, Any]:
    """What a row on two GPUs says of one GPU's tokens. parted: its differences, None where there is no comparison."""
    if parted is None:
        late = bool(results[partner(arm)].get("late"))
        return {"wrong": [f"compared with nothing: {partner(arm)} gave no answer"], "late": late}
    told = {"differences": parted, "compared": sum(len(job.get("asks", ())) for job in arm.jobs)}
    if any("gap" not in one for one in parted):
        late = bool(results.get(QUESTION, {"late": True}).get("late"))
        return {**told, "wrong": ["no answer about the gaps"], "late": late}
    wrong = [
        f"token {one['at']} is not one GPU's, and plain decoding has the two {one['gap']} nats apart"
        for one in parted
        if one["gap"] > ties.NEAR_TIE
    ]
    return {**told, "wrong": wrong}


def rows(chosen: list[Arm], results: Results) -> list[dict[str, Any]]:
    """The suite's rows, and what two GPUs changed."""
    found, parted = suite.judge(results, chosen), gaps(chosen, results)
    for arm, row in zip(chosen, found, strict=True):
        row |= {"mode": mode(arm.kind, arm.budget), "gpus": arm.tp}
        if arm.tp > 1 and results[arm.name]["ok"]:
            more = against_one(arm, results, parted.get(arm.name))
            late = bool(more.get("late")) and not row["wrong"]
            row |= {**more, "wrong": [*row["wrong"], *more["wrong"]], "late": late}
    return found


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--pair", type=Path, default=PAIR)
    parser.add_argument("--parallel", type=int, default=os.cpu_count() or 1, help="processes at once")
    parser.add_argument("--limit-s", type=float, default=300)
    parser.add_argument("--gpu-lock", type=Path, help="shared with other suites that use the GPUs at the same time")
    options = parser.parse_args(argv)
    chosen = arms(options.pair)
    results = run_arms(
        chosen, options.out, options.parallel, time.monotonic() + options.limit_s,
        more=lambda found: question(options.pair, chosen, found), lock=options.gpu_lock, sources=suite.sources(),
    )  # fmt: skip
    found = rows(chosen, results)
    print(suite.table(found))
    (options.out / "report.json").write_text(json.dumps({"rows": found}, indent=1))
    return int(any(row["wrong"] for row in found))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the arms end, too
    sys.exit(main(sys.argv[1:]))
