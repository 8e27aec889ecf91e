"""Carry the stages out: starts what the planner allows, ends what is late, judges what has ended, writes the report.

The report is the state: it is written whole after every stage, and a run that finds one goes on where it stopped.
Processes and the clock are handed in.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from benchmarks.gpu import planner
from benchmarks.gpu.judge import Outcome, Verdict, judge
from benchmarks.gpu.planner import Stage

SCHEMA = 1
MARGIN_S = 20.0  # a stage that limits itself has this long to write what it has
POLL_S = 0.25
Say = Callable[[str], None]


class Running(Protocol):
    def poll(self) -> int | None: ...
    def stop(self) -> None: ...


class Clock(Protocol):
    def now(self) -> float: ...
    def sleep(self, seconds: float) -> None: ...


class WallClock:
    def now(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


Start = Callable[[Sequence[str], Path], Running]


@dataclass
class Active:
    stage: Stage
    process: Running
    began: float
    until: float
    argv: list[str]


@dataclass
class Session:
    """One run. out: where the report lies; work: the stages' folders; sources: digest of what is under test; cores and
    gpus: of this host.
    """

    out: Path
    work: Path
    sources: str
    cores: int
    start: Start
    clock: Clock = field(default_factory=WallClock)
    say: Say = print
    judged: Callable[[str, Outcome], Verdict] = judge
    stamp: Callable[[], str] = lambda: time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    about: dict[str, Any] = field(default_factory=dict)
    gpus: int = 1

    def __post_init__(self) -> None:
        self.report = self._read()
        self.report["about"] = {**self.report["about"], **self.about, "sources": self.sources}

    def _read(self) -> dict[str, Any]:
        """The report of earlier runs; a damaged one is set aside, and all is run again."""
        path = self.out / "report.json"
        try:
            found = json.loads(path.read_text())
            if found["schema"] == SCHEMA and isinstance(found["stages"], dict):
                return {**found, "about": dict(found["about"])}
        except FileNotFoundError:
            pass
        except (ValueError, KeyError, TypeError):
            path.replace(path.with_suffix(".damaged"))
        return {"schema": SCHEMA, "about": {}, "stages": {}}

    def write(self) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        partial = self.out / "report.partial"
        partial.write_text(json.dumps(self.report) + "\n")
        partial.replace(self.out / "report.json")

    def run(self, stages: Sequence[Stage], limit_s: float, again: Collection[str] = ()) -> None:
        """Run the stages within ``limit_s``. Whatever happens, nothing runs on and the report is whole."""
        began = self.clock.now()
        waiting = self._waiting(stages, again)
        active: list[Active] = []
        try:
            while waiting or active:
                left = began + limit_s - self.clock.now()
                starting = planner.startable(waiting, [one.stage for one in active], left, self.cores)
                for stage in starting:
                    others = [one.stage for one in active] + [one for one in starting if one is not stage]
                    free = planner.free_cores(stage, list(dict.fromkeys(others)), self.cores)
                    active.append(self._begin(stage, planner.allowed_s(stage, left), free))
                    waiting.remove(stage)
                if not active:
                    break  # too little time is left for any of those that wait
                self.clock.sleep(POLL_S)
                for one in list(active):
                    if self._step(one):
                        active.remove(one)
        finally:
            for one in active:
                self._end(one, late=True)
            left = began + limit_s - self.clock.now()
            for stage in waiting:
                self._leave_out(stage, f"{max(left, 0):.0f} s were left, it needs {stage.least_s:.0f}")
            self.write()

    def _waiting(self, stages: Sequence[Stage], again: Collection[str]) -> list[Stage]:
        """What is still to be run on this host, after a word on the rest."""
        done = planner.finished(self.report["stages"], self.sources, again)
        unfit = planner.beyond(stages, self.gpus)
        for stage in stages:
            if stage.name in done:
                self.say(f"{stage.name}: {self.report['stages'][stage.name]['status']} already, with these sources")
            elif stage in unfit:
                self._leave_out(stage, planner.lacks(stage, self.gpus))
        return [stage for stage in stages if stage.name not in done and stage not in unfit]

    def _begin(self, stage: Stage, allowed: float, cores: int) -> Active:
        filled = {"{limit}": str(int(max(allowed - MARGIN_S, 1))), "{cores}": str(cores)}
        argv = [filled.get(word, word) for word in stage.argv]
        self.say(f"{stage.name}: begins, at most {allowed:.0f} s")
        now = self.clock.now()
        return Active(stage, self.start(argv, self.work / stage.name), now, now + allowed, argv)

    def _step(self, one: Active) -> bool:
        """Whether it has ended."""
        if one.process.poll() is not None:
            self._end(one, late=False)
            return True
        if self.clock.now() >= one.until:
            self._end(one, late=True)
            return True
        return False

    def _end(self, one: Active, *, late: bool) -> None:
        if late:
            one.process.stop()
        status = one.process.poll()
        outcome = Outcome(self.work / one.stage.name, -1 if status is None else status, late)
        verdict = self.judged(one.stage.name, outcome)
        seconds = round(self.clock.now() - one.began, 1)
        self._record(one.stage, verdict, seconds=seconds, command=one.argv, exit=outcome.status)
        self.say(
            f"{one.stage.name}: {verdict.status} after {seconds:.0f} s" + "".join(f"\n    {r}" for r in verdict.shown)
        )

    def _record(self, stage: Stage, verdict: Verdict, **more: Any) -> None:
        self.report["stages"][stage.name] = {
            "status": verdict.status,
            "reasons": verdict.shown,
            "why": stage.why,
            "sources": self.sources,
            "commit": self.report["about"].get("commit", ""),
            "when": self.stamp(),
            **more,
            "result": verdict.result,
        }
        self.write()

    def _leave_out(self, stage: Stage, reason: str) -> None:
        """Say why it does not run. What an earlier run had of it stays."""
        self.say(f"{stage.name}: not run, {reason}")
        earlier = self.report["stages"].get(stage.name)
        if earlier is None or earlier["sources"] != self.sources:
            self._record(stage, Verdict("not run", [reason]))
