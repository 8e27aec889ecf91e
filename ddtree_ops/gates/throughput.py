"""Gate ``throughput``: a mode is kept because it was measured faster, not because it is believed to be. Pure.

At each concurrency the same prompts were asked in both arms, so times are paired by prompt. The gate holds if the
lower 95 % bound of the speedup over linear reaches ``min_speedup`` at every concurrency. The bound covers the spread
between prompts and rounds, not that between two starts of a server.
"""

from __future__ import annotations

from typing import Any

from ddtree_ops.gates.measure import Measurement, Run
from ddtree_ops.gates.result import GateResult, Verdict, could_not_run
from ddtree_ops.gates.stats import speedup, speedup_bounds
from ddtree_ops.model import GateSettings


def judge(gates: GateSettings, linear: Measurement, candidate: Measurement) -> GateResult:
    """Compare at every declared concurrency."""
    rows: list[dict[str, Any]] = []
    for concurrency in gates.concurrencies:
        base, new = linear.at(concurrency), candidate.at(concurrency)
        if base is None or new is None:
            which = "the baseline" if base is None else "the release"
            return could_not_run("throughput", f"{which} was not measured at {streams(concurrency)}")
        if new.errors:
            return GateResult("throughput", Verdict.FAILED, new.errors[0], new.errors)
        rows.append(compare(base, new))
    slow = [row for row in rows if row["lower"] < gates.min_speedup]
    findings = tuple(_finding(row, gates.min_speedup) for row in slow)
    line = findings[0] if findings else ", ".join(_line(row) for row in rows)
    return GateResult("throughput", Verdict.FAILED if slow else Verdict.PASSED, line, findings, {"runs": rows})


def compare(base: Run, new: Run) -> dict[str, Any]:
    """The figures of one concurrency."""
    base_s, new_s = base.seconds_by_prompt(), new.seconds_by_prompt()
    shared = sorted(set(base_s) & set(new_s))
    pairs = [base_s[prompt] for prompt in shared], [new_s[prompt] for prompt in shared]
    lower, upper = speedup_bounds(*pairs)
    return {
        "concurrency": new.concurrency,
        "tokens_per_s": new.tokens_per_s,
        "linear_tokens_per_s": base.tokens_per_s,
        "speedup": speedup(*pairs),
        "lower": lower,
        "upper": upper,
        "accept_length": new.accept_length,
    }


def _finding(row: dict[str, Any], wanted: float) -> str:
    bounds = f"{row['lower']:.2f} to {row['upper']:.2f}"
    slower = "slower than linear" if row["upper"] < 1 else f"not surely {wanted:.2f} times linear"
    figures = f"{row['speedup']:.2f} times ({bounds}), {row['tokens_per_s']:.0f} tok/s"
    return f"{slower} at {streams(row['concurrency'])}: {figures}"


def _line(row: dict[str, Any]) -> str:
    return f"{row['speedup']:.2f} times linear at {streams(row['concurrency'])} ({row['tokens_per_s']:.0f} tok/s)"


def streams(concurrency: int) -> str:
    """For a person."""
    return "1 stream" if concurrency == 1 else f"{concurrency} streams"
