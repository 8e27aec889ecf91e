"""What a stage showed, from the files it left: pure functions over its folder, its exit status and its lateness.

green: it ran to its end and everything holds. red: something does not hold. cut: the time ran out first, and what was
seen until then holds. not run: it never began, or this host cannot run it.
"""

from __future__ import annotations

import json
import xml.etree.ElementTree
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.engine.bench import NO_TIME
from benchmarks.engine.summary import cells

REASONS = 12  # the first ones are told; the files have all


@dataclass(frozen=True)
class Outcome:
    """How a stage ended. status: its exit status; late: it was ended because its time was up."""

    folder: Path
    status: int
    late: bool = False


@dataclass(frozen=True)
class Verdict:
    status: str
    reasons: list[str] = field(default_factory=list)
    result: Any = None

    @property
    def shown(self) -> list[str]:
        more = len(self.reasons) - REASONS
        return self.reasons[:REASONS] + ([f"and {more} more"] if more > 0 else [])


def judge(name: str, outcome: Outcome) -> Verdict:
    """The verdict on the stage called ``name``; a file that is damaged or missing is a reason, never an exception."""
    try:
        return JUDGES[name](outcome)
    except (OSError, ValueError, KeyError, TypeError, xml.etree.ElementTree.ParseError) as error:
        if outcome.late:
            return Verdict("cut", ["the time was up before it wrote a result"])
        return Verdict("red", [f"exit status {outcome.status}, and no result: {error}", *tail(outcome.folder / "log")])


def tail(log: Path, lines: int = 3) -> list[str]:
    """The last lines of a log that say something."""
    if not log.exists():
        return []
    return [line[:300] for line in log.read_text(errors="replace").splitlines() if line.strip()][-lines:]


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def ended(outcome: Outcome, wrong: list[str], result: Any) -> Verdict:
    """The verdict where a result is whole: its own faults, then the exit status, then the time."""
    if wrong:
        return Verdict("red", wrong, result)
    if outcome.late:
        return Verdict("cut", ["the time was up"], result)
    if outcome.status != 0:
        return Verdict("red", [f"exit status {outcome.status}", *tail(outcome.folder / "log")], result)
    return Verdict("green", [], result)


def tests(outcome: Outcome) -> Verdict:
    """pytest's JUnit file."""
    cases = list(xml.etree.ElementTree.parse(outcome.folder / "junit.xml").iter("testcase"))
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    wrong = [f"{case.get('name')}: {_message(case)}" for case in failed]
    skipped = [case.get("name") for case in cases if case.find("skipped") is not None]
    wrong += [f"{name} was skipped" for name in skipped]
    if not cases:
        wrong.append("no test ran")
    result = {case.get("name"): "failed" if case in failed else round(float(case.get("time", 0)), 1) for case in cases}
    return ended(outcome, wrong, result)


def _message(case: xml.etree.ElementTree.Element) -> str:
    for kind in ("failure", "error"):
        if (found := case.find(kind)) is not None:
            return (found.get("message") or "").splitlines()[0][:300]
    return ""


def suite(outcome: Outcome) -> Verdict:
    """The parity suite's rows. An arm for which there was no time makes it cut, a wrong one red."""
    rows = read(outcome.folder / "report.json")["rows"]
    wrong = [f"{row['arm']}: {line}" for row in rows for line in row["wrong"] if not row.get("late")]
    late = [f"{row['arm']}: {line}" for row in rows for line in row["wrong"] if row.get("late")]
    if not rows:
        wrong.append("no arm ran")
    if wrong or not late:
        return ended(Outcome(outcome.folder, outcome.status, outcome.late), wrong, rows)
    return Verdict("cut", late, rows)


def costs(outcome: Outcome) -> Verdict:
    """The suite's rows, each with what it measured."""
    found = suite(outcome)
    empty = [
        f"{row['arm']}: nothing was measured" for row in found.result if not row["wrong"] and "measured" not in row
    ]
    return Verdict("red", [*found.reasons, *empty], found.result) if empty else found


def selftest(outcome: Outcome) -> Verdict:
    """The record that it leaves."""
    records = sorted((outcome.folder / "proofs").glob("*.json"))
    if not records:
        raise FileNotFoundError("it left no record")
    record = read(records[0])
    late = [line for line in record["suite"]["unproven"] if "ran out of time" in line or "the time was up" in line]
    if late and not record["passed"]:
        return Verdict("cut", late, record)
    return ended(outcome, [] if record["passed"] else record["suite"]["unproven"], record)


def server(outcome: Outcome) -> Verdict:
    """What was captured, and what should have been and was not."""
    found = read(outcome.folder / "captures" / "summary.json")
    return ended(outcome, found["wrong"], found)


def benchmark(outcome: Outcome) -> Verdict:
    """Parity of all arms, and the figures of each; the stage's own file has every answer."""
    if outcome.status == NO_TIME:
        return Verdict("cut", ["no time was left to measure when all arms were up and equal"])
    found = read(outcome.folder / "result.json")
    wrong = [f"{one['arm']}: {len(one['wrong'])} answers differ" for one in found["parity"] if one["wrong"]]
    result = {key: found[key] for key in ("grid", "baseline", "parity", "trees", "prompt_set")}
    result["cells"] = [asdict(one) for one in cells(found)]
    if not wrong and found["cut"]:
        return Verdict("cut", [f"time was up after {len(found['blocks'])} blocks"], result)
    return ended(outcome, wrong, result)


def kernel_times(outcome: Outcome) -> Verdict:
    found = read(outcome.folder / "kernels.json")
    wrong = [f"{name}: {value}" for name, value in found["parity"].items() if isinstance(value, str)]
    return ended(outcome, wrong or ([] if found["kernels"] else ["nothing was timed"]), found)


def sanitizer(outcome: Outcome) -> Verdict:
    """Each tool's verdict; a host without the tool, or on which it cannot run, is told from a kernel at fault."""
    found = read(outcome.folder / "sanitizer.json")
    wrong = [f"{tool['tool']}: {line}" for tool in found["tools"] for line in tool["wrong"]]
    if found["unable"] and not wrong:
        return Verdict("not run", [found["unable"]], found)
    return ended(outcome, wrong, found)


def host(outcome: Outcome) -> Verdict:
    found = read(outcome.folder / "host.json")
    return ended(outcome, found["wrong"], found)


JUDGES: dict[str, Callable[[Outcome], Verdict]] = {
    "host": host,
    "parity": suite,
    "parity-records": suite,
    "parity-rest": suite,
    "parity-long": suite,
    "parity-two": suite,
    "kernels": tests,
    "suite-tests": tests,
    "selftest": selftest,
    "selftest-records": selftest,
    "selftest-two": selftest,
    "selftest-two-records": selftest,
    "pair-two": costs,
    "server": server,
    "server-records": server,
    "costs": costs,
    "costs-slice": costs,
    "costs-of-eight": costs,
    "benchmark": benchmark,
    "kernel-times": kernel_times,
    "sanitizer": sanitizer,
}
