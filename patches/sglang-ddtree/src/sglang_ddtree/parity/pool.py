"""Arms side by side, each a process of its own, or one for each GPU of its model: started in order, ended at the
deadline, answers kept.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sglang_ddtree.parity import models, verdicts
from sglang_ddtree.parity.plan import Arm

Results = dict[str, dict[str, Any]]
More = Callable[[Results], list[Arm]]
PROGRAM = ("-m", "sglang_ddtree.parity.arm")


@dataclasses.dataclass(frozen=True)
class Rank:
    """One process of an arm."""

    process: subprocess.Popen[bytes]
    answer: Path
    log: Path


Running = dict[str, list[Rank]]


def run_arms(
    arms: list[Arm],
    out: Path,
    parallel: int,
    deadline: float,
    *,
    more: More = lambda _results: [],
    lock: Path | None = None,
    sources: str = "",
) -> Results:
    """Results by arm name. At the deadline (time.monotonic) what runs is killed and what waits is not started.

    parallel: processes at once. more: the arms that have become askable by the results so far. lock: shared with other
    suites on the same GPU. sources: digest of what the answers depend on; where given, an answer in `out` to the same
    question is kept.
    """
    out.mkdir(parents=True, exist_ok=True)
    models.write(out / "models", ranks=max((arm.tp for arm in arms), default=1))
    waiting, running, results = list(arms), {}, {}  # type: tuple[list[Arm], Running, Results]
    asked, seen = {arm.name for arm in arms}, 0
    try:
        while waiting or running:
            while waiting and (_room(waiting[0], running, parallel) or time.monotonic() > deadline):
                arm = waiting.pop(0)
                spec = {**arm.spec(out / "models", lock or out / "gpu.lock"), "sources": sources}
                spec["store"] = str(_paths(arm, out, 0)[1].with_suffix(".store"))
                kept = _kept(arm, spec, out) if sources else None
                if kept is not None:
                    results[arm.name] = kept
                elif time.monotonic() > deadline:
                    results[arm.name] = {"ok": False, "late": True, "error": "not started: the time was up"}
                else:
                    running[arm.name] = _start(arm, spec, out)
            for name in _ended(running, deadline):
                results[name] = _end(running.pop(name))
            new = [arm for arm in more(results) if arm.name not in asked] if len(results) > seen else []
            seen, asked = len(results), asked | {arm.name for arm in new}
            waiting = new + waiting  # they end what has been begun
            if running:
                time.sleep(0.2)
    finally:
        for ranks in running.values():  # only after an interruption
            _end(ranks)
    return results


def _room(arm: Arm, running: Running, parallel: int) -> bool:
    """Whether the arm's processes are not too many beside those of the others; one that is too wide runs by itself."""
    return not running or sum(map(len, running.values())) + arm.tp <= parallel


def _paths(arm: Arm, out: Path, rank: int) -> tuple[Path, Path, Path]:
    """Question, answer and log of one of an arm's processes; the question is the same for all."""
    stem = arm.name.replace("/", "_")
    tail = f".{rank}" if rank else ""
    return out / f"{stem}.spec.json", out / f"{stem}.out.json{tail}", out / f"{stem}.log{tail}"


def _kept(arm: Arm, spec: dict[str, Any], out: Path) -> dict[str, Any] | None:
    """The answer that an earlier run left to the very same question."""
    try:
        same = json.loads(_paths(arm, out, 0)[0].read_text()) == json.loads(json.dumps(spec))
        found = [json.loads(_paths(arm, out, rank)[1].read_text()) for rank in range(arm.tp)]
    except (OSError, ValueError):
        return None
    return verdicts.together(found) if same and all(one.get("ok") for one in found) else None


def _start(arm: Arm, spec: dict[str, Any], out: Path) -> list[Rank]:
    Path(spec["store"]).unlink(missing_ok=True)
    ranks = []
    for rank in range(arm.tp):
        asked, answer, log = _paths(arm, out, rank)
        answer.unlink(missing_ok=True)
        asked.write_text(json.dumps(spec))
        with log.open("wb") as handle:
            process = subprocess.Popen(
                [sys.executable, *PROGRAM, str(asked), str(answer), str(rank)],
                stdout=handle,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        ranks.append(Rank(process, answer, log))
    return ranks


def _ended(running: Running, deadline: float) -> list[str]:
    """The arms whose processes have all ended, or one of them badly: the others would wait for it."""
    late = time.monotonic() > deadline
    codes = {name: [rank.process.poll() for rank in ranks] for name, ranks in running.items()}
    return [name for name, found in codes.items() if late or None not in found or any(found)]


def _end(ranks: list[Rank]) -> dict[str, Any]:
    """What an arm answered; what still runs of it is killed with all it started."""
    failed = [rank for rank in ranks if rank.process.poll()]  # before any is killed
    late = not failed and any(rank.process.poll() is None for rank in ranks)
    for rank in ranks:
        if rank.process.poll() is None:
            os.killpg(rank.process.pid, signal.SIGKILL)
            rank.process.wait()
    answers = [_answer(rank, late) for rank in failed or ranks]
    return next((one for one in answers if not one.get("ok")), None) or verdicts.together(answers)


def _answer(rank: Rank, late: bool) -> dict[str, Any]:
    if rank.answer.exists():
        try:
            return json.loads(rank.answer.read_text())  # type: ignore[no-any-return]
        except ValueError:
            pass  # killed while it wrote
    tail = rank.log.read_text(errors="replace")[-3000:] if rank.log.exists() else ""
    if late:
        return {"ok": False, "late": True, "error": f"{tail}\nran out of time"}
    return {"ok": False, "error": f"ended without an answer, exit status {rank.process.returncode}\n{tail}"}
