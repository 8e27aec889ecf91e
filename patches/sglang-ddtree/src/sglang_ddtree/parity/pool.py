"""Arms side by side on one GPU, each a process of its own: started in order, ended at the deadline, answers kept."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sglang_ddtree.parity import models
from sglang_ddtree.parity.plan import Arm

Results = dict[str, dict[str, Any]]
More = Callable[[Results], list[Arm]]
PROGRAM = ("-m", "sglang_ddtree.parity.arm")
Running = dict[str, tuple[subprocess.Popen[bytes], Path, Path]]


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

    more: the arms that have become askable by the results so far. lock: shared with other suites on the same GPU.
    sources: digest of what the answers depend on; where given, an answer in `out` to the same question is kept.
    """
    out.mkdir(parents=True, exist_ok=True)
    models.write(out / "models")
    waiting, running, results = list(arms), {}, {}  # type: tuple[list[Arm], Running, Results]
    asked, seen = {arm.name for arm in arms}, 0
    try:
        while waiting or running:
            while waiting and (len(running) < parallel or time.monotonic() > deadline):
                arm = waiting.pop(0)
                spec = {**arm.spec(out / "models", lock or out / "gpu.lock"), "sources": sources}
                kept = _kept(arm, spec, out) if sources else None
                if kept is not None:
                    results[arm.name] = kept
                elif time.monotonic() > deadline:
                    results[arm.name] = {"ok": False, "late": True, "error": "not started: the time was up"}
                else:
                    running[arm.name] = _start(arm, spec, out)
            for name in _ended(running, deadline):
                results[name] = _end(*running.pop(name))
            new = [arm for arm in more(results) if arm.name not in asked] if len(results) > seen else []
            seen, asked = len(results), asked | {arm.name for arm in new}
            waiting = new + waiting  # they end what has been begun
            if running:
                time.sleep(0.2)
    finally:
        for process, answer, log in running.values():  # only after an interruption
            _end(process, answer, log)
    return results


def _paths(arm: Arm, out: Path) -> tuple[Path, Path, Path]:
    stem = arm.name.replace("/", "_")
    return out / f"{stem}.spec.json", out / f"{stem}.out.json", out / f"{stem}.log"


def _kept(arm: Arm, spec: dict[str, Any], out: Path) -> dict[str, Any] | None:
    """The answer that an earlier run left to the very same question."""
    asked, answer, _log = _paths(arm, out)
    try:
        same = json.loads(asked.read_text()) == json.loads(json.dumps(spec))
        found: dict[str, Any] = json.loads(answer.read_text())
    except (OSError, ValueError):
        return None
    return found if same and found.get("ok") else None


def _start(arm: Arm, spec: dict[str, Any], out: Path) -> tuple[subprocess.Popen[bytes], Path, Path]:
    asked, answer, log = _paths(arm, out)
    answer.unlink(missing_ok=True)
    asked.write_text(json.dumps(spec))
    with log.open("wb") as handle:
        process = subprocess.Popen(
            [sys.executable, *PROGRAM, str(asked), str(answer)],
            stdout=handle,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return process, answer, log


def _ended(running: Running, deadline: float) -> list[str]:
    late = time.monotonic() > deadline
    return [name for name, (process, _answer, _log) in running.items() if late or process.poll() is not None]


def _end(process: subprocess.Popen[bytes], answer: Path, log: Path) -> dict[str, Any]:
    """What an arm answered; one that still runs is killed with all it started."""
    late = process.poll() is None
    if late:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if answer.exists():
        try:
            return json.loads(answer.read_text())  # type: ignore[no-any-return]
        except ValueError:
            pass  # killed while it wrote
    tail = log.read_text(errors="replace")[-3000:] if log.exists() else ""
    if late:
        return {"ok": False, "late": True, "error": f"{tail}\nran out of time"}
    return {"ok": False, "error": f"ended without an answer, exit status {process.returncode}\n{tail}"}
