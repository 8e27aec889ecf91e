"""Is the server that was asked for the one that answers? Health by identity, not by a 200.

An instance is healthy when systemd says its unit is active and was not restarted since we started it, the process
that listens on its port belongs to that unit, it says ready, it names the wanted release, and one real completion
returns the tokens that were asked for. ``judge`` decides from one observation and is pure; ``wait_healthy`` asks
until it is decided or the one deadline, in seconds, has passed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from ddtree_ops.clock import Clock, Deadline
from ddtree_ops.errors import DdtreeError
from ddtree_ops.facts.journal import Progress, progress, reason
from ddtree_ops.facts.server import Resolved, Served
from ddtree_ops.facts.unit import Condition, UnitState
from ddtree_ops.release import short

PAUSE_S = 0.5  # between two looks; the helper itself looks for a while in each
COMPLETION_TOKENS = 8
COMPLETION_DEADLINE_S = 60.0


@dataclass(frozen=True)
class Listener:
    """Who listens on the instance's port."""

    pid: int
    command: str = ""
    ours: bool = False


@dataclass(frozen=True)
class Observation:
    """One look at an instance."""

    unit: UnitState
    listener: Listener | None = None
    ready: int | None = None
    has_ready: bool = True
    release: str | None = None
    resolved: Resolved | None = None
    served: Served | None = None
    lines: tuple[str, ...] = ()
    processes: tuple[tuple[int, str], ...] = ()

    @property
    def progress(self) -> Progress:
        return progress(self.lines)


@dataclass(frozen=True)
class Completion:
    """One real completion: how many tokens came back, and which release says it made them."""

    tokens: int
    release: str | None = None
    error: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class Before:
    """The start that was there before ours; a look that still shows it is too early to judge.

    ``stop_s``: how long it may take to end, its drain included.
    """

    invocation: str = ""
    stop_s: float = 90.0


class State(StrEnum):
    """What one look says. BEFORE: it still shows the server that was there before."""

    BEFORE = "before"
    WAITING = "waiting"
    ANSWERING = "answering"
    FAILED = "failed"


@dataclass(frozen=True)
class Verdict:
    state: State
    line: str


class UnhealthyError(DdtreeError):
    """The server did not become healthy; caught by ``run``, which takes back what was done."""


def judge(seen: Observation, release: str, port: int, before: Before | None = None) -> Verdict:
    """Decide from one look. ``before`` is None when the server was not restarted by us (status, a no-op deploy)."""
    unit, condition = seen.unit, seen.unit.condition
    # a unit that is down and that nobody refers to is forgotten by systemd, its invocation with it
    old = before is not None and unit.invocation in ("", before.invocation)
    if old and condition is not Condition.FAILED:
        return Verdict(State.BEFORE, _still_old(condition))
    if condition is Condition.FAILED:
        return Verdict(State.FAILED, _ended("the unit failed", seen))
    if condition is Condition.RESTARTING or (before and unit.restarts > 0):
        return Verdict(State.FAILED, _ended("the server died and systemd is restarting it", seen))
    if condition in (Condition.DOWN, Condition.ABSENT):
        return Verdict(State.FAILED, _ended("the unit is not running", seen))
    if condition is Condition.STOPPING:
        return Verdict(State.WAITING, _ended("the server is stopping", seen))
    if seen.listener and not seen.listener.ours:
        who = f"{seen.listener.command or 'a process'} (pid {seen.listener.pid})"
        return Verdict(State.FAILED, f"port {port} is held by {who}, which is not of this unit")
    settled = before is None and not seen.has_ready  # it was not started just now: the completion will tell
    if seen.ready != 200 and not (settled and seen.release):
        return Verdict(State.WAITING, str(seen.progress))
    return _identity(seen, release)


def _identity(seen: Observation, release: str) -> Verdict:
    if seen.listener is None:
        return Verdict(State.WAITING, "it answers, but nobody is seen listening yet")
    if seen.release is None:
        return Verdict(State.FAILED, "the server does not say which release it is")
    if seen.release != release:
        wrong = f"the server that answers is release {short(seen.release)}, not {short(release)}"
        return Verdict(State.FAILED, wrong)
    return Verdict(State.ANSWERING, "ready; asking for a completion")


def _still_old(condition: Condition) -> str:
    return "stopping the server before" if condition is Condition.STOPPING else "waiting for systemd to restart it"


def _ended(what: str, seen: Observation) -> str:
    told = [seen.unit.why_ended, reason(seen.lines)]
    return ": ".join([what, *(part for part in told if part)])


def judge_completion(completion: Completion, release: str, asked: int) -> str:
    """Why a completion is not good enough; empty if it is."""
    if completion.error:
        return f"a completion failed: {completion.error}"
    if completion.tokens != asked:
        return f"a completion returned {completion.tokens} tokens where {asked} were asked for"
    if completion.release is not None and completion.release != release:
        return f"a completion came from release {short(completion.release)}, not {short(release)}"
    return ""


class Probe(Protocol):
    """How one instance is looked at and asked; one round trip each."""

    def observe(self, watch_s: float = ..., extra: tuple[str, ...] = ...) -> Observation: ...
    def complete(self, tokens: int, deadline_s: float) -> Completion: ...


@dataclass(frozen=True)
class Waiting:
    """The wait for health of one release, with everything it needs injected."""

    probe: Probe
    release: str
    port: int
    clock: Clock
    check: Callable[[], None]
    say: Callable[[str, float], None]

    def until_healthy(self, seconds: float, before: Before | None = None) -> Completion:
        """Wait for health; raises UnhealthyError as soon as it is certain that it will not come.

        The server before has ``before.stop_s`` to end; then ``seconds`` begin, so that a long drain does not eat the
        time that loading needs.
        """
        deadline, waited_for = Deadline.after(before.stop_s if before else seconds, self.clock), State.BEFORE
        if before is None:
            waited_for = State.WAITING
        while True:
            self.check()
            verdict = judge(self.probe.observe(), self.release, self.port, before)
            if waited_for is State.BEFORE and verdict.state is not State.BEFORE:
                deadline, waited_for = Deadline.after(seconds, self.clock), State.WAITING
            if verdict.state is State.FAILED:
                raise UnhealthyError(verdict.line)
            self.say(verdict.line, deadline.left)
            if verdict.state is State.ANSWERING:
                return self._completion(deadline)
            if deadline.passed:
                late = "the server before did not end" if waited_for is State.BEFORE else "not healthy"
                limit = before.stop_s if before and waited_for is State.BEFORE else seconds
                raise UnhealthyError(f"{late} after {limit:.0f} s; last seen: {verdict.line}")
            self.clock.sleep(min(PAUSE_S, max(deadline.left, 0.05)))

    def _completion(self, deadline: Deadline) -> Completion:
        limit = min(COMPLETION_DEADLINE_S, max(deadline.left, 1.0))
        completion = self.probe.complete(COMPLETION_TOKENS, limit)
        if wrong := judge_completion(completion, self.release, COMPLETION_TOKENS):
            raise UnhealthyError(wrong)
        return completion
