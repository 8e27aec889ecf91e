"""Gate ``soak``: healthy once is not healthy. Pure.

Lossless decoding hides a dead drafter from every test of answers, so the accept length is watched too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ddtree_ops.gates.result import GateResult, Verdict, could_not_run
from ddtree_ops.model import GateSettings, Mode


@dataclass(frozen=True)
class Look:
    """One look during the soak: seconds since its begin, health's own verdict, and what a request showed."""

    at_s: float
    healthy: bool
    line: str
    restarts: int
    invocation: str
    accept_length: float | None = None
    error: str = ""


def judge(gates: GateSettings, mode: Mode, looks: Sequence[Look]) -> GateResult:
    """The first thing that went wrong, or that nothing did for as long as was asked."""
    if not looks or looks[-1].at_s < gates.soak_s:
        seen = looks[-1].at_s if looks else 0.0
        return could_not_run("soak", f"watched for {seen:.0f} s of {gates.soak_s} s")
    known = [look.accept_length for look in looks if look.accept_length is not None]
    mean = sum(known) / len(known) if known else None
    evidence = {"looks": len(looks), "seconds": looks[-1].at_s, "accept_length": mean}
    wrong = _wrong(looks) or _accept(gates, mode, mean)
    if wrong:
        return GateResult("soak", Verdict.FAILED, wrong, (wrong,), evidence)
    accept = f", accept length {mean:.2f}" if mean is not None else ""
    return GateResult("soak", Verdict.PASSED, f"healthy for {looks[-1].at_s:.0f} s{accept}", (), evidence)


def _wrong(looks: Sequence[Look]) -> str:
    first = looks[0]
    for look in looks:
        after = f"after {look.at_s:.0f} s"
        if (look.invocation, look.restarts) != (first.invocation, first.restarts):
            return f"the server was restarted {after}"
        if not look.healthy:
            return f"{after}: {look.line}"
        if look.error:
            return f"{after} a request failed: {look.error}"
    return ""


def _accept(gates: GateSettings, mode: Mode, mean: float | None) -> str:
    if not mode.speculates:
        return ""
    if mean is None:
        return "no request told its accept length, so the drafter may be dead"
    if mean < gates.accept_floor:
        return f"accept length {mean:.2f} is below the floor of {gates.accept_floor:.2f}: the drafter hardly helps"
    return ""
