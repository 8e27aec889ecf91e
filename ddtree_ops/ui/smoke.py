"""A smoke test's report: JUnit XML for the machine that runs it, Markdown for the people who read it. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from xml.etree import ElementTree

from ddtree_ops.release import short
from ddtree_ops.smoke import Case, Smoke, Verdict, groups
from ddtree_ops.text import unusable

SIGNS = {Verdict.PASSED: "passed", Verdict.FAILED: "**failed**", Verdict.SKIPPED: "skipped"}


def hinted(seen: Smoke, hint: Callable[[str], str]) -> Smoke:
    """The report with the commands in it as they are to be run from here."""
    cases = (replace(case, details=tuple(map(hint, case.details))) for case in seen.cases)
    return replace(seen, cases=tuple(cases))


def junit(seen: Smoke) -> bytes:
    """The XML that CI systems read: one suite, one test case a step, gate and way back."""
    suite = ElementTree.Element(
        "testsuite",
        name=f"ddtree-ops smoke {seen.target}",
        tests=str(len(seen.cases)),
        failures=str(seen.count(Verdict.FAILED)),
        errors="0",
        skipped=str(seen.count(Verdict.SKIPPED)),
        time=f"{seen.seconds:.3f}",
    )
    for case in seen.cases:
        entry = ElementTree.SubElement(
            suite, "testcase", classname=f"{seen.target}.{case.group}", name=case.name, time=f"{case.seconds:.3f}"
        )
        text = "\n".join(map(printable, (case.line, *case.details)))
        if case.verdict is Verdict.FAILED:
            ElementTree.SubElement(entry, "failure", message=printable(case.line)).text = text
        elif case.verdict is Verdict.SKIPPED:
            ElementTree.SubElement(entry, "skipped", message=printable(case.line))
        else:
            ElementTree.SubElement(entry, "system-out").text = text
    root = ElementTree.Element("testsuites")
    root.append(suite)
    return bytes(ElementTree.tostring(root, encoding="utf-8", xml_declaration=True))


def printable(text: str) -> str:
    """Without the control characters that XML has no way to say."""
    return "".join(
        c if c in "\n\t" or (c >= " " and unusable(c) is None) else "\N{REPLACEMENT CHARACTER}" for c in text
    )


def markdown(seen: Smoke) -> str:
    """A page for a job's summary or a comment."""
    verdict = "passed" if seen.code == 0 else f"failed (exit code {int(seen.code)})"
    lines = [
        f"# Smoke test of {seen.target}: {verdict}",
        "",
        f"Release {short(seen.release)}, {seen.seconds:.0f} s; before: {short(seen.before)}.",
    ]
    for group, cases in groups(seen.cases).items():
        lines += ["", f"## {group}", "", "| case | verdict | seconds | what was seen |", "| --- | --- | --- | --- |"]
        lines += [row(case) for case in cases]
    return "\n".join(lines) + "\n"


def row(case: Case) -> str:
    seen = "<br>".join(cell(text) for text in (case.line, *case.details) if text)
    return f"| {cell(case.name)} | {SIGNS[case.verdict]} | {case.seconds:.1f} | {seen} |"


def cell(text: str) -> str:
    """Text that cannot end its cell or begin markup."""
    escaped = printable(text).replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")
    return " ".join(escaped.split())


def smoke_data(seen: Smoke) -> dict[str, Any]:
    """For ``--json``."""
    return {
        "target": seen.target,
        "exit_code": int(seen.code),
        "seconds": round(seen.seconds, 3),
        "release": seen.release,
        "before": seen.before,
        "cases": [
            {
                "group": case.group,
                "name": case.name,
                "verdict": str(case.verdict),
                "line": case.line,
                "seconds": round(case.seconds, 3),
                "details": list(case.details),
            }
            for case in seen.cases
        ],
    }
