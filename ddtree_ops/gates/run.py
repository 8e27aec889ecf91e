"""Taking one instance through its gates: gathers through the helper, leaves every judgement to the pure modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from ddtree_ops import health
from ddtree_ops.clock import Clock, Deadline
from ddtree_ops.errors import UsageError
from ddtree_ops.gates import attest, baseline, identity, lossless, measure, soak, throughput
from ddtree_ops.gates.measure import Measurement, Run
from ddtree_ops.gates.result import NAMES, GateError, GateResult, Verdict, could_not_run, skipped
from ddtree_ops.inventory.checks import did_you_mean
from ddtree_ops.model import GateSettings, Mode, Settings

COMPLETION_TOKENS = 8
SOAK_EVERY_S = 5.0


class Call(Protocol):
    """One operation of the helper on the host."""

    def __call__(
        self,
        op: str,
        args: Mapping[str, Any] | None = None,
        *,
        deadline_s: float = 30.0,
        on_event: Callable[[dict[str, Any]], None] | None = None,
    ) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Subject:
    """The instance that is being proven, and everything needed to look at it.

    ``gates`` is None where the inventory declares none: then nothing is measured. ``skips`` are waived by a person,
    with a reason. ``check`` is called at least once a second: it raises if the person interrupts, and lets a host that
    waits to be confirmed know that we are alive. ``say`` is a line of progress.
    """

    target: str
    settings: Settings
    release: str
    engine: str
    gates: GateSettings | None
    probe: health.Probe
    call: Call
    clock: Clock
    check: Callable[[], None]
    say: Callable[[str], None]
    skips: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)

    def with_gates(self, gates: GateSettings) -> Subject:
        return replace(self, gates=gates)


def checked_skips(names: Sequence[str], reason: str | None) -> dict[str, str]:
    """``--skip-gate NAME ... --reason TEXT``. Raises UsageError for an unknown gate or a missing reason."""
    for name in names:
        if name not in NAMES:
            raise UsageError(
                f"unknown gate {name!r}.{did_you_mean(name, NAMES)}",
                why=f"the gates are {', '.join(NAMES)}",
                next=f"ddtree-ops deploy ... --skip-gate {NAMES[4]} --reason TEXT",
            )
    if names and not (reason or "").strip():
        raise UsageError(
            "a gate is skipped without a reason",
            why="who reads status later must learn what was not shown, and why",
            next='give --reason "..."',
        )
    return {name: str(reason) for name in names}


def prove(subject: Subject) -> dict[str, GateResult]:
    """All gates in order. Raises GateError at the first that does not hold, with every result so far in its data."""
    results: dict[str, GateResult] = {}
    for result in _gates(subject):
        results[result.name] = result
        subject.say(f"{result.name}: {result.verdict}, {result.line}")
        if not result.holds:
            raise _error(subject, result, results)
    return results


def measured(subject: Subject) -> Measurement:
    """What the server does at every declared concurrency, judged by nobody: for ``bench`` and ``sweep``."""
    return _Bench(subject).measurement()


def load_at(subject: Subject, concurrency: int) -> Run:
    """One run at one concurrency."""
    return _Bench(subject).load(concurrency)


def kept_baseline(subject: Subject, kind: Mode) -> Measurement | None:
    """The recorded measurement of ``kind`` that this instance can be compared with; None if there is none."""
    return _Bench(subject).baseline(kind)


def _gates(subject: Subject) -> Iterator[GateResult]:
    bench = _Bench(subject)
    doers: dict[str, Callable[[], GateResult]] = {
        "identity": lambda: identity.judge(bench.look(), subject.release, subject.settings.port),
        "attest": lambda: _attest(subject, bench),
        "completion": lambda: _completion(subject),
        "lossless": lambda: _lossless(bench),
        "throughput": lambda: _throughput(bench),
        "soak": lambda: _soak(subject, bench),
    }
    for name in NAMES:
        subject.check()
        if name in subject.skips:
            yield skipped(name, f"skipped: {subject.skips[name]}")
        elif subject.gates is None and name in ("lossless", "throughput", "soak"):
            yield skipped(name, "the inventory declares no gates for this instance")
        else:
            yield doers[name]()
    bench.keep()


def _error(subject: Subject, result: GateResult, results: Mapping[str, GateResult]) -> GateError:
    data = {"gate": result.name, "gates": {name: each.data() for name, each in results.items()}}
    if len(result.findings) > 1:
        data["problems"] = [result.line, *result.findings[1:]]
    return GateError(
        f"gate {result.name} {result.verdict}: {result.line}",
        host=subject.target,
        why="a release is proven only when every gate holds",
        next=f"ddtree-ops deploy {subject.target} --skip-gate {result.name} --reason TEXT, if that is acceptable",
        data=data,
    )


@dataclass
class _Bench:
    """Measures at most once, however many gates want to see it."""

    subject: Subject
    seen: health.Observation | None = None
    measured: Measurement | None = None

    @property
    def gates(self) -> GateSettings:
        assert self.subject.gates is not None
        return self.subject.gates

    @property
    def mode(self) -> Mode:
        return self.subject.settings.mode

    def look(self) -> health.Observation:
        self.seen = self.subject.probe.observe()
        return self.seen

    def measurement(self) -> Measurement:
        if self.measured is None:
            kept = self.mode in baseline.KINDS
            streams = baseline.baseline_concurrencies(self.gates) if kept else self.gates.concurrencies
            runs = [self.load(concurrency) for concurrency in streams]
            if self.mode is Mode.AR:  # one more, for its gaps alone: telling them costs time, so it is not compared
                runs.append(self.load(1, gaps=True))
            self.measured = Measurement(tuple(runs))
        return self.measured

    def load(self, concurrency: int, *, gaps: bool = False) -> Run:
        streams = throughput.streams(concurrency)
        self.subject.say(f"measuring with {streams}")

        def said(event: dict[str, Any]) -> None:
            self.subject.say(f"measuring with {streams}: {event.get('done')} of {event.get('of')} answers")

        return self.put_load(measure.load_request(self.gates, concurrency, gaps=gaps), said)

    def one_request(self) -> Run:
        """A single answer, to see that there is one and what its accept length is."""
        request = measure.load_request(self.gates, 1)
        return self.put_load(request | {"bodies": request["bodies"][:1], "rounds": 1, "warmup": 0}, lambda _event: None)

    def put_load(self, request: dict[str, Any], said: Callable[[dict[str, Any]], None]) -> Run:
        """Once a second the helper tells how far it is, and an interruption is looked for: a load may take minutes."""

        def on_event(event: dict[str, Any]) -> None:
            self.subject.check()
            said(event)

        seconds = measure.longest_s(request)
        answer = self.subject.call("load", self.where() | request, deadline_s=seconds, on_event=on_event)
        return measure.parse_run(answer, self.gates.tokens)

    def where(self) -> dict[str, Any]:
        settings = self.subject.settings
        return {"port": settings.port, "bind": settings.bind, "headers": dict(self.subject.headers)}

    def baseline(self, kind: Mode) -> Measurement | None:
        key = baseline.baseline_key(self.subject.settings, self.subject.engine, self.gates, kind)
        return baseline.unpack(self.subject.call("baseline", {"key": key})["value"], self.gates)

    def keep(self) -> None:
        """A linear (or ar) measurement becomes the baseline once every gate holds."""
        if self.measured is None or self.mode not in baseline.KINDS or self.measured.errors:
            return
        facts = baseline.baseline_facts(self.subject.settings, self.subject.engine, self.gates, self.mode)
        key = baseline.baseline_key(self.subject.settings, self.subject.engine, self.gates, self.mode)
        value = baseline.pack(self.measured, facts, self.subject.release, self.subject.clock.time())
        self.subject.call("keep_baseline", {"key": key, "value": value})
        self.subject.say(f"kept as the {self.mode} baseline of this host, engine and model")


def _attest(subject: Subject, bench: _Bench) -> GateResult:
    seen = bench.seen or bench.look()
    info = seen.resolved.raw if seen.resolved else {}
    return attest.judge(subject.settings, subject.release, info, seen.lines)


def _completion(subject: Subject) -> GateResult:
    completion = subject.probe.complete(COMPLETION_TOKENS, health.COMPLETION_DEADLINE_S)
    return identity.judge_completion(completion, subject.release, COMPLETION_TOKENS)


def _no_baseline(name: str) -> GateResult:
    return could_not_run(
        name, "no linear baseline of this host, engine and model; deploy with --baseline to measure one first"
    )


def _lossless(bench: _Bench) -> GateResult:
    if bench.mode in baseline.KINDS:
        return skipped("lossless", f"{bench.mode} is what is compared with")
    linear = bench.baseline(Mode.LINEAR)
    if linear is None:
        return _no_baseline("lossless")
    calibration = lossless.calibrate(linear, bench.baseline(Mode.AR))
    return lossless.judge(calibration, bench.measurement())


def _throughput(bench: _Bench) -> GateResult:
    if bench.mode in baseline.KINDS:
        return _as_baseline(bench)
    if bench.mode is Mode.SHADOW_LINEAR:
        return skipped("throughput", "shadow-linear scores trees beside linear; it is not meant to be faster")
    linear = bench.baseline(Mode.LINEAR)
    if linear is None:
        return _no_baseline("throughput")
    return throughput.judge(bench.gates, linear, bench.measurement())


def _as_baseline(bench: _Bench) -> GateResult:
    """Linear and ar are measured to be compared with; there is nothing they could fail but to answer."""
    found = bench.measurement()
    if found.errors:
        return could_not_run("throughput", found.errors[0], errors=list(found.errors))
    figures = {run.concurrency: run.tokens_per_s for run in found.runs}
    told = ", ".join(f"{value:.0f} tok/s at {streams}" for streams, value in figures.items())
    line = f"{bench.mode} is what is compared with: {told}"
    return GateResult("throughput", Verdict.SKIPPED, line, evidence={"tokens_per_s": figures})


def _soak(subject: Subject, bench: _Bench) -> GateResult:
    if bench.gates.soak_s == 0:
        return skipped("soak", "soak_s is 0")
    began = subject.clock.monotonic()
    deadline = Deadline.after(bench.gates.soak_s, subject.clock)
    looks = [_look(bench, 0.0)]
    while not deadline.passed and looks[-1].healthy and not looks[-1].error:
        subject.check()
        subject.say(f"soaking, {deadline.left:.0f} s left")
        subject.clock.sleep(min(SOAK_EVERY_S, deadline.left))
        looks.append(_look(bench, subject.clock.monotonic() - began))
    if not looks[-1].healthy or looks[-1].error:  # how long was asked for no longer matters
        return soak.judge(bench.gates.model_copy(update={"soak_s": 0}), bench.mode, looks)
    return soak.judge(bench.gates, bench.mode, looks)


def _look(bench: _Bench, at_s: float) -> soak.Look:
    """Health by identity, and one request that tells its accept length."""
    seen = bench.subject.probe.observe()
    verdict = health.judge(seen, bench.subject.release, bench.subject.settings.port)
    healthy = verdict.state is health.State.ANSWERING
    run = bench.one_request() if healthy else None
    accept = run.accept_length if run else None
    error = next(iter(run.errors), "") if run else ""
    return soak.Look(at_s, healthy, verdict.line, seen.unit.restarts, seen.unit.invocation, accept, error)
