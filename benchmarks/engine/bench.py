"""Measure running servers against each other and draw the page.

    python -m benchmarks.engine.bench run --arm ar=http://127.0.0.1:30000 --arm linear=http://127.0.0.1:30001 \\
        --arm tree-16=http://127.0.0.1:30002 --out result.json
    python -m benchmarks.engine.bench launch arms.toml --out result.json      the same on servers it starts
    python -m benchmarks.engine.bench page result.json [result.json ...] --out benchmark.html

The arm `ar` must be there: parity is judged against it. No figure is written while parity is red (exit status 1),
nor where no time was left for one (3).
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.engine.launch import servers
from benchmarks.engine.measure import (
    Arm,
    Grid,
    check_parity,
    fingerprint,
    laws,
    load_prompts,
    measure,
    measured,
    plan,
    provenance,
)
from benchmarks.engine.page import render

NO_TIME = 3
BEGAN = time.monotonic()  # the start of the servers counts, too


def say(text: str) -> None:
    print(text, flush=True)


def host() -> dict[str, Any]:
    """Where this runs; the GPU as its driver names it."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,clocks.max.sm,power.limit", "--format=csv,noheader"]
    try:
        gpu = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        gpu = ""
    cpu = next((line.split(":")[1].strip() for line in _cpuinfo() if line.startswith("model name")), platform.machine())
    return {"gpu": gpu.splitlines(), "cpu": cpu, "python": platform.python_version()}


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def run(arms: list[Arm], args: argparse.Namespace) -> int:
    grid = Grid(
        temperatures=tuple(args.temperatures), concurrencies=tuple(args.concurrencies), repeats=args.repeats,
        tokens=args.tokens,
    )  # fmt: skip
    prompts = load_prompts(count=args.prompts)
    plain = next((arm for arm in arms if arm.name == "ar"), None)
    if plain is None:
        say("error: no arm is named ar; parity is judged against plain decoding")
        return 2
    say(f"parity: {len(prompts)} prompts, {grid.tokens} tokens, {len(arms)} arms")
    verdicts = check_parity(arms, prompts, grid, laws(plain.url, prompts, grid))
    for verdict in verdicts:
        counts = f"{verdict.identical} identical, {len(verdict.near_ties)} near ties, {len(verdict.wrong)} wrong"
        say(f"  {verdict.arm}: {counts}")
    red = [verdict for verdict in verdicts if verdict.red]
    if red:
        say(f"parity is red, nothing is measured: {json.dumps(red[0].as_dict()['wrong'][:3])}")
        return 1
    before = {arm.name: provenance(arm) for arm in arms}
    blocks = measure(arms, prompts, grid, say, lambda: time.monotonic() - BEGAN > args.limit_s)
    if not blocks:
        say("error: no time was left to measure; raise --limit-s")
        return NO_TIME
    trees = {arm.name: provenance(arm)["ddtree"] for arm in arms}
    baseline = args.baseline if any(arm.name == args.baseline for arm in arms) else "ar"
    result = {
        "schema": 1,
        "title": args.title,
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": shlex.join(["python", "-m", "benchmarks.engine.bench", *sys.argv[1:]]),
        "host": host(),
        "grid": vars(measured(grid, blocks)),
        "cut": len(blocks) < len(list(plan(grid, arms))),
        "prompts": [{"category": prompt.category} for prompt in prompts],
        "prompt_set": fingerprint(prompts),
        "baseline": baseline,
        "arms": before,
        "trees": trees,
        "parity": [verdict.as_dict() for verdict in verdicts],
        "blocks": blocks,
    }
    Path(args.out).write_text(json.dumps(result) + "\n")
    say(f"wrote {args.out}")
    return 0


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("run", "launch"):
        command = commands.add_parser(name)
        if name == "run":
            command.add_argument("--arm", action="append", required=True, metavar="NAME=URL")
        else:
            command.add_argument("arms", metavar="ARMS.toml")
        command.add_argument("--out", required=True)
        command.add_argument("--title", default="DDTree on the self-test pair")
        command.add_argument("--baseline", default="linear")
        command.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
        command.add_argument("--concurrencies", type=int, nargs="+", default=[1, 2, 4, 8])
        command.add_argument("--repeats", type=int, default=2)
        command.add_argument("--tokens", type=int, default=128)
        command.add_argument("--prompts", type=int, default=32)
        command.add_argument("--limit-s", type=float, default=math.inf, help="begin no new block after this long")
    command = commands.add_parser("page")
    command.add_argument("results", nargs="+")
    command.add_argument("--out", required=True)
    return parser.parse_args(argv)


def main() -> int:
    args = arguments()
    if args.command == "page":
        results = [json.loads(Path(path).read_text()) for path in args.results]
        Path(args.out).write_text(render(results))
        return 0
    if args.command == "run":
        return run([Arm(*text.split("=", 1)) for text in args.arm], args)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the servers end, too
    with servers(Path(args.arms), say) as arms:
        return run(arms, args)


if __name__ == "__main__":
    sys.exit(main())
