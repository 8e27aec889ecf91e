"""``bench``: what servers that run do, measured on their own hosts as the gates measure; nothing is changed.

Targets take turns at each concurrency, so that clocks and heat drift for all alike. The first is what the others are
compared with; a single one is compared with linear's recorded baseline, where its host has one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from ddtree_ops.clock import Clock
from ddtree_ops.connection import LEASE_S, Connection
from ddtree_ops.errors import MovedError
from ddtree_ops.events import Event, Kind, Report
from ddtree_ops.gates import throughput
from ddtree_ops.gates.measure import Measurement, Run
from ddtree_ops.gates.result import GateError
from ddtree_ops.gates.run import Subject, kept_baseline, load_at, prove
from ddtree_ops.interrupt import Checks
from ddtree_ops.model import GateSettings, Mode, Settings
from ddtree_ops.release import short
from ddtree_ops.steps import RENEW_EVERY_S

RECORDED = "the recorded linear baseline"


@dataclass(frozen=True)
class Benched:
    """One server: its figures at each concurrency, and what they are compared with."""

    target: str
    settings: Settings
    release: str
    runs: tuple[Mapping[str, Any], ...]
    beside: str = ""
    answers: str = ""

    def as_json(self) -> dict[str, Any]:
        trees = self.settings.mode.builds_trees
        sizes = {"budget": self.settings.budget, "topk_cap": self.settings.topk_cap} if trees else {}
        return {
            "target": self.target,
            "mode": str(self.settings.mode),
            **sizes,
            "release": self.release,
            "compared_with": self.beside or None,
            "answers": self.answers or None,
            "runs": [dict(run) for run in self.runs],
        }


@dataclass
class Alive:
    """Called while we measure: ends it when a person does, and holds on to the host's lock."""

    connection: Connection
    clock: Clock
    token: Checks
    at: float = field(default=0.0)

    def __call__(self) -> None:
        self.token.check()
        now = self.clock.monotonic()
        if now - self.at >= RENEW_EVERY_S:
            self.at = now
            self.connection.renew(LEASE_S)


@dataclass(frozen=True)
class Bench:
    """Everything that is the same for all targets. ``headers``: what a server's key needs, by host and instance."""

    gates: Callable[[Connection, Settings], GateSettings]
    clock: Clock
    token: Checks
    report: Report
    headers: Callable[[Connection, Settings], Mapping[str, str]]
    lock_wait_s: float = 0.0

    def run(self, targets: Sequence[tuple[Connection, Settings]]) -> list[Benched]:
        """Measure all; raises what keeps one from being measured."""
        with ExitStack() as held:
            locked: set[str] = set()
            subjects = []
            for connection, wanted in targets:
                if connection.host.name not in locked:
                    held.enter_context(self._held(connection, wanted))
                    locked.add(connection.host.name)
                subjects.append(self._subject(connection, wanted))
            found = self._measure(subjects)
            return self._compare(subjects, found)

    @contextmanager
    def _held(self, connection: Connection, settings: Settings) -> Iterator[None]:
        """Nobody deploys while we measure."""

        def say(line: str) -> None:
            self.report(Event(Kind.PROGRESS, connection.host.name, settings.instance, "lock", line))

        with connection.locked(f"bench {settings.instance}", self.lock_wait_s, say, self.token.check):
            yield

    def _subject(self, connection: Connection, wanted: Settings) -> Subject:
        """The server that is there, and that it is healthy and the one it should be."""
        target = f"{connection.host.name}:{wanted.instance}"
        there = connection.facts([wanted]).instance(wanted.instance)
        on_disk = there.releases.get(there.current or "")
        if there.current is None or on_disk is None or on_disk.settings is None or on_disk.engine is None:
            raise MovedError(
                "nothing is deployed here that could be measured",
                host=target,
                why="bench measures what runs",
                next=f"ddtree-ops deploy {target}",
            )

        def say(line: str) -> None:
            self.report(Event(Kind.PROGRESS, connection.host.name, wanted.instance, "bench", line))

        headers = self.headers(connection, on_disk.settings)
        subject = Subject(
            target=target,
            settings=on_disk.settings,
            release=there.current,
            engine=on_disk.engine,
            gates=None,
            probe=connection.probe(on_disk.settings),
            call=connection.call,
            clock=self.clock,
            check=Alive(connection, self.clock, self.token, self.clock.monotonic()),
            say=say,
            headers=headers,
        )
        try:
            prove(subject)
        except GateError as wrong:
            raise MovedError(
                wrong.found,
                host=target,
                why=f"what would be measured is not release {short(there.current)}",
                next=f"ddtree-ops status {target}",
            ) from wrong
        return subject.with_gates(self.gates(connection, on_disk.settings))

    def _measure(self, subjects: Sequence[Subject]) -> list[Measurement]:
        """In turn at each concurrency, the order reversed at every second one."""
        runs: list[list[Run]] = [[] for _ in subjects]
        wanted = dict.fromkeys(each for subject in subjects for each in _gates(subject).concurrencies)
        for turn, concurrency in enumerate(wanted):
            places = range(len(subjects)) if turn % 2 == 0 else reversed(range(len(subjects)))
            for place in places:
                run = load_at(subjects[place], concurrency)
                if run.errors:
                    raise MovedError(
                        f"requests failed at {throughput.streams(concurrency)}: {run.errors[0]}",
                        host=subjects[place].target,
                        why="a server that does not answer everything has no figures",
                        next=f"ddtree-ops logs {subjects[place].target}",
                    )
                runs[place].append(run)
        return [Measurement(tuple(each)) for each in runs]

    def _compare(self, subjects: Sequence[Subject], found: Sequence[Measurement]) -> list[Benched]:
        first, alone = subjects[0], len(subjects) == 1
        base = kept_baseline(first, Mode.LINEAR) if alone else found[0]
        beside = RECORDED if alone else first.target
        made = []
        for subject, measurement in zip(subjects, found, strict=True):
            itself = not alone and subject is first
            other = None if itself else base
            rows = figures(measurement, other)
            made.append(
                Benched(
                    subject.target,
                    subject.settings,
                    subject.release,
                    rows,
                    beside if other is not None else "",
                    alike(other, measurement) if other is not None else "",
                )
            )
        return made


def alike(base: Measurement, new: Measurement) -> str:
    """How many prompts got the same answer from both. Two right servers may part at a near tie: no verdict. Pure."""
    known: dict[int, set[tuple[int, ...]]] = {}
    for sample in base.samples():
        known.setdefault(sample.prompt, set()).add(sample.tokens)
    prompts = {sample.prompt for sample in new.samples() if sample.prompt in known}
    same = prompts - {s.prompt for s in new.samples() if s.prompt in known and s.tokens not in known[s.prompt]}
    return f"{len(same)} of {len(prompts)} prompts answered alike"


def figures(measurement: Measurement, base: Measurement | None) -> tuple[dict[str, Any], ...]:
    """One row for each concurrency; beside ``base`` where that was measured at it. Pure."""
    rows = []
    for run in measurement.runs:
        old = base.at(run.concurrency) if base is not None else None
        own = {"concurrency": run.concurrency, "tokens_per_s": run.tokens_per_s, "accept_length": run.accept_length}
        rows.append(throughput.compare(old, run) if old is not None else own)
    return tuple(rows)


def _gates(subject: Subject) -> GateSettings:
    assert subject.gates is not None
    return subject.gates
