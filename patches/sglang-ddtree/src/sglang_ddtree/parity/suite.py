"""Runs arms side by side on one GPU, judges them, writes one JSON report: `python -m sglang_ddtree.parity.suite
--out DIR`.

Exit code 0 only if every check of the chosen sections holds. Each arm is a process of its own; most of an arm's
time is imports and graph capture on the CPU, so as many run at once as there are cores for.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from sglang_ddtree.parity import models, plan, verdicts
from sglang_ddtree.parity.plan import Arm


def run_arms(arms: list[Arm], out: Path, parallel: int, deadline: float) -> dict[str, dict[str, Any]]:
    """Results by arm name. An arm that has not ended at the deadline (time.monotonic) is killed and reported so."""
    out.mkdir(parents=True, exist_ok=True)
    models.write(out / "models")
    waiting, running, results = list(arms), {}, {}
    while waiting or running:
        while waiting and len(running) < parallel:
            arm = waiting.pop(0)
            running[arm.name] = _start(arm, out)
        time.sleep(0.2)
        for name, (process, answer, log) in list(running.items()):
            late = time.monotonic() > deadline
            if process.poll() is None and not late:
                continue
            if process.poll() is None:
                _kill(process)
            del running[name]
            results[name] = _read(answer, log, late)
    return results


def _start(arm: Arm, out: Path) -> tuple[subprocess.Popen[bytes], Path, Path]:
    stem = arm.name.replace("/", "_")
    spec, answer, log = out / f"{stem}.spec.json", out / f"{stem}.out.json", out / f"{stem}.log"
    spec.write_text(json.dumps(arm.spec(out / "models", out / "gpu.lock")))
    answer.unlink(missing_ok=True)
    with log.open("wb") as handle:
        process = subprocess.Popen(
            [sys.executable, "-m", "sglang_ddtree.parity.arm", str(spec), str(answer)],
            stdout=handle,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return process, answer, log


def _kill(process: subprocess.Popen[bytes]) -> None:
    os.killpg(process.pid, 9)
    process.wait()


def _read(answer: Path, log: Path, late: bool) -> dict[str, Any]:
    if answer.exists():
        return json.loads(answer.read_text())  # type: ignore[no-any-return]
    tail = log.read_text(errors="replace")[-3000:] if log.exists() else ""
    return {"ok": False, "error": ("ran out of time\n" if late else "ended without an answer\n") + tail}


def judge(results: dict[str, dict[str, Any]], arms: list[Arm]) -> list[dict[str, Any]]:
    """One row for each arm: its counters, and every way in which it is wrong."""
    rows = []
    by_name = {arm.name: arm for arm in arms}
    for arm in arms:
        result = results[arm.name]
        row: dict[str, Any] = {
            "arm": arm.name,
            "kind": arm.kind,
            "budget": arm.budget,
            "cap": arm.cap,
            "dtype": arm.dtype,
        }
        if not result["ok"]:
            rows.append({**row, "wrong": [result["error"].strip().splitlines()[-1]]})
            continue
        wrong = verdicts.job_failures(result)
        reference = results.get(reference_of(arm))
        exact = arm.dtype == "float32" or arm.kind == "linear"
        if reference is not None and reference["ok"] and reference is not result and exact:
            wrong += verdicts.same_tokens(reference, result, common_jobs(by_name[reference_of(arm)], arm))
        counted = verdicts.last_counters(result)
        row.update(
            informed=verdicts.commits(result),
            start_s=result["start_s"],
            accept_length=verdicts.accept_length(result),
            off_spine=counted.get("accepted_off_spine"),
            nodes=counted.get("nodes_per_tree"),
            wrong=wrong,
        )
        rows.append(row)
    return rows


def common_jobs(left: Arm, right: Arm) -> list[int]:
    """Numbers of the jobs that both arms were given at the same place."""
    return [
        n
        for n, (a, b) in enumerate(zip(left.jobs, right.jobs, strict=False))
        if a == b and "ids" in a.get("asks", [{}])[0]
    ]


def reference_of(arm: Arm) -> str:
    """The plain-decoding arm an arm is compared with: same target, same jobs."""
    target, _, tail = arm.name.partition("/")
    if tail.startswith("bf16-"):
        return f"{target}/bf16-dflash" if arm.kind == "linear" else f"{target}/bf16-ar"
    paired = ("behaviour", "retract", "radix", "limit", "seeded", "10k")
    if tail.startswith("tree-") and tail.split("-", 1)[1] in paired:
        return f"{target}/ar-{tail.split('-', 1)[1]}"
    return f"{target}/ar"


def proof(rows: list[dict[str, Any]], arms: list[Arm], when: str) -> dict[str, Any]:
    """The record of proofs.py for what these arms showed on this GPU, passed or not."""
    import torch

    from sglang_ddtree import args, proofs

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    wrong = {row["arm"]: row["wrong"] for row in rows if row["wrong"]}
    return {
        "schema": proofs.SCHEMA,
        "engine": proofs.engine_digest(),
        "architecture": models.MODELS[arms[0].target]["architectures"][0],
        "backend": "triton",
        "compute_capability": args.compute_capability(),
        "driver": proofs.running_driver(),
        "max_budget": max(arm.budget for arm in arms),
        "passed": not wrong,
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


def oracle_rows(arms: list[Arm], results: dict[str, dict[str, Any]], run: Any) -> list[dict[str, Any]]:
    """Second stage: ask plain decoding about every node that the oracle arms recorded, and compare laws."""
    rows = []
    recorded = [a for a in arms if a.jobs[0]["job"] == "record_trees" and results[a.name]["ok"]]
    for target in sorted({a.target for a in recorded}):
        of_target = [a for a in recorded if a.target == target]
        trees = {a.name: results[a.name]["results"][0]["trees"] for a in of_target}
        sequences = verdicts.oracle_sequences([t for found in trees.values() for t in found])
        reference = plan.oracle_reference(target, sequences)
        answer = run([reference])[reference.name]
        for arm in of_target:
            row: dict[str, Any] = {"arm": arm.name + "/laws", "kind": "oracle", "wrong": []}
            if not answer["ok"]:
                row["wrong"] = [answer["error"].strip().splitlines()[-1]]
            else:
                found = verdicts.oracle_errors(trees[arm.name], sequences, answer["results"][0]["logprobs"])
                row["laws"] = found
                if found["max_error"] > ORACLE_TOLERANCE[arm.dtype]:
                    row["wrong"] = [f"a node's law differs by {found['max_error']:.4f}"]
            rows.append(row)
    return rows


NEAR_TIE = 0.1  # nats between the two tokens that plain decoding and a tree chose, in bfloat16


def tie_rows(arms: list[Arm], results: dict[str, dict[str, Any]], run: Any) -> list[dict[str, Any]]:
    """bfloat16: ask plain decoding how far apart the two tokens of each first difference were."""
    rows = []
    by_name = {a.name: a for a in arms}
    for arm in (a for a in arms if a.dtype == "bfloat16" and a.kind in ("tree", "linear") and results[a.name]["ok"]):
        name = f"{arm.target}/bf16-ar"
        if name not in results or not results[name]["ok"]:
            continue
        found = verdicts.differences(
            with_asks(results[name], by_name[name]), results[arm.name], common_jobs(by_name[name], arm)
        )
        row: dict[str, Any] = {"arm": arm.name + "/ties", "kind": "ties", "differences": found, "wrong": []}
        if found:
            sequences = [d["sequence"] for d in found]
            reference = dataclasses.replace(plan.oracle_reference(arm.target, sequences), dtype="bfloat16")
            answer = run([reference])[reference.name]
            if answer["ok"]:
                for difference, law in zip(found, answer["results"][0]["logprobs"], strict=True):
                    a, b = difference["tokens"]
                    difference["gap"] = round(abs(law[a] - law[b]), 4)
                    del difference["sequence"]
                row["wrong"] = [f"token {d['at']}: gap {d['gap']}" for d in found if d["gap"] > NEAR_TIE]
            else:
                row["wrong"] = ["no answer about the gaps"]
        rows.append(row)
    return rows


def with_asks(result: dict[str, Any], arm: Arm) -> dict[str, Any]:
    jobs = [{**job, "asks": spec.get("asks")} for job, spec in zip(result["results"], arm.jobs, strict=True)]
    return {**result, "results": jobs}


def sections(names: list[str]) -> list[Arm]:
    builders = {
        "matrix": plan.matrix,
        "behaviour": plan.behaviour,
        "audits": plan.audits,
        "oracle": plan.oracle,
        "bf16": plan.half_precision,
        "costs": plan.costs,
        "selftest": plan.selftest,
    }
    return [arm for name in names for arm in builders[name.split("/")[1]](name.split("/")[0])]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--section", action="append", default=[], help="TARGET/matrix, TARGET/behaviour, TARGET/audits ..."
    )
    parser.add_argument("--only", action="append", default=[], help="run these arms of the sections only")
    parser.add_argument("--parallel", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--limit-s", type=float, default=540)
    parser.add_argument("--proof", type=Path, help="write the record that admits this combination on this host")
    options = parser.parse_args(argv)
    arms = [a for a in sections(options.section) if not options.only or a.name in options.only]
    deadline = time.monotonic() + options.limit_s

    def run(chosen: list[Arm]) -> dict[str, dict[str, Any]]:
        return run_arms(chosen, options.out, options.parallel, deadline)

    results = run(arms)
    rows = judge(results, arms) + oracle_rows(arms, results, run) + tie_rows(arms, results, run)
    print(table(rows))
    (options.out / "report.json").write_text(json.dumps({"rows": rows}, indent=1))
    if options.proof is not None:
        when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        options.proof.parent.mkdir(parents=True, exist_ok=True)
        options.proof.write_text(json.dumps(proof(rows, arms, when), indent=1))
    return 0 if all(not row["wrong"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
