"""An error as labelled lines for a person, and as data for a program. Pure."""

from __future__ import annotations

from typing import Any

from ddtree_ops.errors import DdtreeError


def error_lines(error: DdtreeError) -> list[tuple[str, str]]:
    """(label, text) pairs: what was found and where, every further finding, why it matters, what to run next."""
    lines = [("error", str(error))]
    problems = error.data.get("problems")
    if isinstance(problems, (list, tuple)) and len(problems) > 1:
        lines += [("also", str(problem)) for problem in problems[1:]]
    if error.why:
        lines.append(("why", error.why))
    if error.next:
        lines.append(("next", error.next))
    return lines


def error_data(error: DdtreeError) -> dict[str, Any]:
    """The error for ``--json``; ``kind`` is the class name, stable like the exit code."""
    return {
        "kind": type(error).__name__,
        "exit_code": int(error.exit_code),
        "found": error.found,
        "host": error.host,
        "why": error.why,
        "next": error.next,
        "data": error.data,
    }
