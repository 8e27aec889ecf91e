"""Every proof and measurement that needs a GPU, by one command on a host without a network:

    python -m benchmarks.gpu --out DIR --limit-s 540

The interpreter must import torch, triton and SGLang 0.5.17 as published. Run it again with the same DIR and it goes on:
stages that were judged with the same sources are not run again, and suites keep the arms that have answered.

    DIR/report.json      what each stage showed: green, red, cut (time ran out) or not run, with the reason
    DIR/results.tar.xz   every stage's own files     DIR/logs.tar.xz   their logs     DIR/caches.tar.xz   with --caches

`--dry-run` shows the stages and when each would run. `--two-gpus` runs what needs two GPUs, in one call of ten minutes;
a host with one leaves these stages out. Exit status: 0 all green that this host can run, 1 one is red, 2 the command
line or this host is at fault, 3 nothing is red but something was not run to its end.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu import host, overlay, pack, planner, processes
from benchmarks.gpu.run import Session
from benchmarks.gpu.stages import ROOT, Setting, stages

# What a result depends on. Pages and tests that run on the CPU are not among it.
SOURCES = ("patches", "benchmarks/engine", "benchmarks/gpu", "tests/gpu")
# NVLink multicast keeps state in the switches between GPUs, which others on the host share and which a process that is
# ended may leave behind. One variable each for NCCL, for torch's symmetric memory and for NVSHMEM.
NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
PACK_S = 25.0  # kept back for the archives


def digest(root: Path = ROOT) -> str:
    """sha256 over the sources under test."""
    found = hashlib.sha256()
    for folder in SOURCES:
        for path in sorted((root / folder).rglob("*")):
            if path.is_file() and path.suffix not in (".pyc", ".md", ".svg") and "__pycache__" not in path.parts:
                found.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return found.hexdigest()


def commit() -> str:
    command = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def environment(site: Path) -> dict[str, str]:
    """The stages' own: overlay and plugin first, then this repository, then what the caller has. `python3`, by which
    the benchmark's file starts its servers, is this interpreter's.
    """
    first = [str(site), str(ROOT / "patches/sglang-ddtree/src"), str(ROOT)]
    path = os.pathsep.join([*first, *filter(None, [os.environ.get("PYTHONPATH", "")])])
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    own = {"PYTHONPATH": path, "PATH": programs, "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
    return {**os.environ, **own, **NO_MULTICAST}


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="the report, and what it is made from")
    parser.add_argument("--limit-s", type=float, default=3600, help="end within this long")
    parser.add_argument("--only", action="append", default=[], metavar="STAGE")
    parser.add_argument("--two-gpus", action="store_true", help="only `host` and the stages that need two GPUs")
    parser.add_argument("--skip", action="append", default=[], metavar="STAGE")
    parser.add_argument("--again", action="append", default=[], metavar="STAGE", help="run it although it was judged")
    parser.add_argument("--cores", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--gpus", type=int, help="GPUs to use, default those that nvidia-smi lists")
    parser.add_argument("--commit", default="", help="of the sources, where git is not at hand")
    parser.add_argument("--caches", action="store_true", help="also pack what was compiled, for the next run")
    parser.add_argument("--dry-run", action="store_true", help="show the stages and stop")
    return parser.parse_args(argv)


def table(session: Session, chosen: Sequence[planner.Stage], limit_s: float, again: Sequence[str]) -> str:
    """The stages, what an earlier run said of each, and when each would run in this one."""
    done = planner.finished(session.report["stages"], session.sources, again)
    unfit = planner.beyond(chosen, session.gpus)
    waiting = [stage for stage in chosen if stage.name not in done and stage not in unfit]
    lines = [f"{'stage':20} {'before':8} {'begins':>7} {'ends':>6} {'limit':>6} {'cores':>5}  why"]
    when = {stage.name: (begins, ends) for stage, begins, ends in planner.foresee(waiting, limit_s, session.cores)}
    for stage in chosen:
        before = str(session.report["stages"].get(stage.name, {}).get("status", "-"))
        begins, ends = when.get(stage.name, (None, None))
        told = [f"{value:.0f}" if value is not None else "-" for value in (begins, ends)]
        cores = "alone" if stage.alone else str(stage.cores)
        why = planner.lacks(stage, session.gpus) if stage in unfit else stage.why
        lines.append(f"{stage.name:20} {before:8} {told[0]:>7} {told[1]:>6} {stage.limit_s:>6.0f} {cores:>5}  {why}")
    return "\n".join(lines)


def status(session: Session, chosen: Sequence[planner.Stage]) -> int:
    unfit = planner.beyond(chosen, session.gpus)
    within = [stage for stage in chosen if stage not in unfit] or chosen
    found = [session.report["stages"].get(stage.name, {}).get("status", "not run") for stage in within]
    if "red" in found:
        return 1
    return 0 if all(one == "green" for one in found) else 3


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    out: Path = options.out.resolve()
    work = out / "work"
    about: dict[str, Any] = {
        "commit": options.commit or commit(),
        "command": shlex.join(["python", "-m", "benchmarks.gpu", *(sys.argv[1:] if argv is None else argv)]),
    }
    env = environment(work / "site")
    gpus = host.gpu_count(os.environ, host.smi()) if options.gpus is None else options.gpus
    session = Session(
        out, work, digest(), options.cores, lambda argv, folder: processes.start(argv, folder, env, ROOT), about=about,
        say=lambda text: print(text, flush=True), gpus=gpus,
    )  # fmt: skip
    every = stages(Setting(sys.executable, work, options.cores))
    on_two = ["host", *(stage.name for stage in every if stage.gpus == 2)] if options.two_gpus else []
    try:
        chosen = planner.chosen(every, [*options.only, *on_two], options.skip)
        planner.chosen(chosen, options.again, ())
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    limit_s = options.limit_s - PACK_S
    if options.dry_run:
        print(table(session, chosen, limit_s, options.again))
        return 0
    return carry_out(session, chosen, options, limit_s)


def carry_out(session: Session, chosen: list[planner.Stage], options: argparse.Namespace, limit_s: float) -> int:
    began = time.monotonic()
    session.out.mkdir(parents=True, exist_ok=True)
    for taken in pack.unpack(session.work, session.out):
        session.say(f"taken up: {taken}")
    try:
        session.report["about"]["patches"] = overlay.build(session.work / "site")
    except overlay.OverlayError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    try:
        session.run(chosen, limit_s - (time.monotonic() - began), options.again)
    finally:
        pack.pack(session.work, session.out, session.say)
        if options.caches:
            pack.pack_caches(session.out, session.say)
    return status(session, chosen)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the stages end, too
    sys.exit(main())
