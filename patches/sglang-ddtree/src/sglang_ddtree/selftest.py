"""Prove this host's GPU in about two minutes: `python -m sglang_ddtree.selftest --pair DIR`.

Runs the parity suite on the self-test pair, real weights whose trees branch, and leaves a record that the engine reads
when it decides whether a hybrid target may be verified in trees here (see :mod:`sglang_ddtree.proofs`). What must hold:

* linear gives DFLASH's tokens, trees of several budgets give plain decoding's, in float32, alone and as a batch;
* nodes beside the drafter's top-1 chain were accepted on the way, else chains alone would have been tested;
* every node's law in a tree is that of plain decoding over the node's own path;
* the same where the width changes every round, or else the record is silent about mode auto;
* a second turn that goes on from a state the prefix cache kept on a tree's path gets plain decoding's tokens, or else
  the record is silent about the prefix cache;
* after each job the memory pools are back where they were;
* with `--tp 2`, both ranks had the same trees, targets, walks and slots in every round, and gave one GPU's tokens.

Trees keep recurrent states as a server does by itself, as records; `--states snapshots` proves the other way, in a
record of its own. A failed run replaces an earlier record, since what it proved holds no more. Exit status: 0 proven,
1 failed, 2 not run.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from sglang_ddtree import config, proofs, states
from sglang_ddtree.parity import plan, suite
from sglang_ddtree.parity.plan import Arm
from sglang_ddtree.parity.pool import run_arms

BACKEND = "triton"
BUDGETS = (4, 16, 32, 64)
ORACLE_BUDGETS = (16, 32)
AUTO_WIDTHS = (4, 16, 64)
# Tokens between states for the prefix cache: SGLang wants no fewer than a tree has rows. No first prompt is as long,
# and every first answer goes past it, so what a second turn finds there was kept while trees were verified.
TRACK_INTERVAL = 128
TURNS = 3
TURN_TOKENS = 150
ORACLE_ROUNDS = 6  # every node of these is asked about by itself, over the whole vocabulary
NEW_TOKENS = 96
LIMIT_S = 240.0


def load_prompts(pair: Path) -> list[list[int]]:
    """The pair's own prompts as ids: text that the drafter was not trained on."""
    return [entry["ids"] for entry in json.loads((pair / "prompts.json").read_text())]


def requests(pair: Path) -> list[dict[str, Any]]:
    return [{"ids": ids, "params": {"max_new_tokens": NEW_TOKENS, "ignore_eos": True}} for ids in load_prompts(pair)]


def token_jobs(pair: Path) -> tuple[dict[str, Any], ...]:
    """The pair's requests, some alone and all as a batch."""
    asks = requests(pair)
    return (
        {"job": "tokens", "together": False, "asks": asks[:4]},
        {"job": "tokens", "together": True, "asks": asks},
    )


def arms(pair: Path) -> list[Arm]:
    """Plain decoding, DFLASH, linear, a tree of each budget, and the arms whose every node is looked at; then those
    that only decide about mode auto and about the prefix cache.
    """
    jobs = token_jobs(pair)
    cells = [("ar", 16), ("dflash", 16), ("linear", 16), *(("tree", budget) for budget in BUDGETS)]
    found = [arm(pair, f"{kind}-{b}" if kind == "tree" else kind, kind, jobs, b) for kind, b in cells]
    record = ({"job": "record_trees", "rounds": ORACLE_ROUNDS, "asks": requests(pair)[:2]},)
    eager = ("--disable-overlap-schedule",)
    found += [arm(pair, f"oracle-{b}", "tree", record, b, eager) for b in ORACLE_BUDGETS]
    found += [changing(pair, "auto-cycle", jobs), changing(pair, "auto-oracle", record, eager)]
    return [*found, *(caching(pair, kind) for kind in ("ar", "tree"))]


def changing(pair: Path, name: str, jobs: tuple[dict[str, Any], ...], extra: tuple[str, ...] = ()) -> Arm:
    """An arm whose every round has another width than the one before."""
    made = arm(pair, name, "auto", jobs, max(AUTO_WIDTHS), extra)
    return dataclasses.replace(made, widths=AUTO_WIDTHS, environ=plan.CYCLE)


def caching(pair: Path, kind: str) -> Arm:
    """An arm with the prefix cache on, whose requests come back with their answers in the prompt."""
    params = {"max_new_tokens": TURN_TOKENS, "ignore_eos": True}
    asks = [{"ids": ids, "params": params} for ids in load_prompts(pair)[:TURNS]]
    turns = ({"job": "multi_turn", "asks": asks, "tail": [5, 6, 7]},)
    extra = ("--enable-radix", *plan.KEEP_STATES, "--mamba-track-interval", str(TRACK_INTERVAL))
    return dataclasses.replace(arm(pair, f"{kind}-radix", kind, turns, max(BUDGETS), extra), extra_buffer=True)


def arm(
    pair: Path, name: str, kind: str, jobs: tuple[dict[str, Any], ...], budget: int, extra: tuple[str, ...] = ()
) -> Arm:
    """An arm of the suite on the pair's folders; an absolute path stands where the suite has a model's name."""
    target, drafter = (str((pair / folder).resolve()) for folder in ("target", "drafter"))
    return Arm(f"pair/{name}", kind, target, jobs, drafter, budget=budget, informed=False, extra=extra)


def with_weights(chosen: Arm) -> Arm:
    """Load the pair's weights instead of drawing some: the last of two flags counts."""
    return dataclasses.replace(chosen, seed=None, extra=(*chosen.extra, "--load-format", "auto"))


def unproven(rows: list[dict[str, Any]]) -> list[str]:
    """Why these rows prove nothing; empty if they do."""
    wrong = [f"{row['arm']}: {line}" for row in rows for line in row["wrong"]]
    if not any(row.get("off_spine") for row in rows):
        wrong.append("no node beside a top-1 chain was accepted: trees were not tested")
    laws = [row["laws"] for row in rows if "laws" in row]
    if not any(found["nodes_with_elder_sibling"] for found in laws):
        wrong.append("no node with an elder sibling was looked at: parents were not tested")
    return wrong


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows without what is only of use while looking for a fault."""
    keys = ("arm", "kind", "budget", "cap", "dtype", "accept_length", "off_spine", "nodes", "laws", "wrong")
    keys += ("ranks", "rounds_compared", "prefix_cache")
    return [{key: row[key] for key in keys if row.get(key) is not None} for row in rows]


def record(
    rows: list[dict[str, Any]],
    capability: str,
    seconds: float,
    when: float,
    kept: str = states.SNAPSHOTS,
    tp: int = 1,
) -> dict[str, Any]:
    """The proof in the form that `proofs.judge` reads."""
    reasons = unproven([row for row in rows if suite.about_trees(row)])
    return {
        "schema": proofs.SCHEMA,
        "engine": proofs.engine_digest(states=kept, tp=tp),
        "states": kept,
        "tp": tp,
        "architecture": "Qwen3_5ForCausalLM",
        "backend": BACKEND,
        "compute_capability": capability,
        "driver": proofs.running_driver(),
        "max_budget": max(BUDGETS),
        "passed": not reasons,
        **suite.auto_key(rows, kept),
        **suite.prefix_cache_key(rows),
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(when)),
        "suite": {"seconds": round(seconds, 1), "unproven": reasons, "rows": summary(rows)},
    }


def write(directory: Path, proof: dict[str, Any]) -> Path:
    """Replace the record of this combination in one step."""
    directory.mkdir(parents=True, exist_ok=True)
    words = ["selftest", proof["architecture"], proof["backend"], proof["compute_capability"]]
    words += [proof["states"]] if proof["states"] != states.SNAPSHOTS else []
    name = "-".join(words + ([f"tp{proof['tp']}"] if proof["tp"] > 1 else []))
    path = directory / f"{name}.json"
    partial = directory / f".{name}.{os.getpid()}"
    partial.write_text(json.dumps(proof, indent=1) + "\n")
    partial.replace(path)
    return path


def run(pair: Path, options: argparse.Namespace, out: Path) -> list[dict[str, Any]]:
    """The suite's rows on this GPU, or on the first of several."""

    def loaded(chosen: Arm) -> Arm:
        own = with_weights(dataclasses.replace(chosen, states=options.states))
        return plan.spread(own, options.tp, nccl_only=options.nccl_only)

    one_width = options.tp > 1  # each rank would choose for itself, which mode auto refuses
    chosen = [loaded(arm) for arm in arms(pair) if not (one_width and arm.kind == "auto")]
    results = run_arms(
        chosen,
        out,
        options.parallel,
        time.monotonic() + options.limit_s,
        more=lambda found: [loaded(a) for a in suite.askable(chosen, found)],
        lock=options.gpu_lock,
        sources=suite.sources() if options.keep else "",
    )
    return suite.judge(results, chosen) + suite.oracle_rows(chosen, results)


def gpu_count() -> int:
    import torch

    return torch.cuda.device_count()


def arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m sglang_ddtree.selftest", description=__doc__.split("\n")[0])
    parser.add_argument("--pair", type=Path, required=True, help="the folder with target, drafter and prompts.json")
    parser.add_argument("--proofs-dir", type=Path, default=Path(config.DEFAULT_PROOFS))
    parser.add_argument("--out", type=Path, help="keep the arms' logs and answers here")
    parser.add_argument(
        "--keep", action="store_true", help="go on from the answers in OUT that these sources gave on this host"
    )
    parser.add_argument("--parallel", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument(
        "--states", choices=states.CHOICES, default=states.RECORDS, help="how trees keep recurrent states"
    )
    parser.add_argument(
        "--tp", type=int, choices=(1, 2), default=1, help="GPUs that share a model; the pair's heads divide by two"
    )
    parser.add_argument("--nccl-only", action="store_true", help=suite.NCCL_HELP)
    parser.add_argument("--limit-s", type=float, default=LIMIT_S)
    parser.add_argument("--gpu-lock", type=Path, help="shared with parity suites that use the GPU at the same time")
    options = parser.parse_args(argv)
    if options.keep and options.out is None:
        parser.error("--keep goes on from the answers in a folder: name it with --out")
    return options


def main(argv: list[str]) -> int:
    options = arguments(argv)
    from sglang_ddtree.args import compute_capability

    try:
        capability, gpus = compute_capability(range(options.tp)), gpu_count()
    except ImportError as error:
        print(f"{error}: this is not the environment that SGLang runs in", file=sys.stderr)
        return 2
    if capability == "none":
        print("no CUDA GPU is visible here: nothing to prove", file=sys.stderr)
        return 2
    if gpus < options.tp or "+" in capability:
        seen = f"{gpus} CUDA GPUs of compute capability {capability}"
        print(f"{seen} are visible here, and --tp {options.tp} needs as many of one kind", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="ddtree-selftest-") as scratch:
        began = time.monotonic()
        rows = run(options.pair, options, options.out or Path(scratch))
        proof = record(rows, capability, time.monotonic() - began, time.time(), options.states, options.tp)
    print(suite.table([row for row in rows if "dtype" in row]))
    path = write(options.proofs_dir, proof)
    for reason in proof["suite"]["unproven"]:
        print(f"unproven: {reason}")
    for what, about in (("mode auto", suite.about_auto), ("the prefix cache", suite.about_prefix_cache)):
        for row in filter(about, rows):
            for line in row["wrong"]:
                print(f"{what} unproven: {row['arm']}: {line}")
    verdict = "proven" if proof["passed"] else "FAILED"
    several = f", {options.tp} GPUs to a model" if options.tp > 1 else ""
    print(f"{verdict} on compute capability {capability}{several}, states kept as {options.states}; recorded in {path}")
    return 0 if proof["passed"] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
