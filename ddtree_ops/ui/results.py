"""Plans and outcomes for a person."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from ddtree_ops.outcome import Outcome, Status
from ddtree_ops.plan import Effect, Plan
from ddtree_ops.release import short
from ddtree_ops.ui.output import Output

STYLES = {
    Status.DEPLOYED: "green",
    Status.UNCHANGED: "green",
    Status.DEMOTED: "yellow",
    Status.ROLLED_BACK: "yellow",
    Status.NOT_ROLLED_BACK: "bold red",
    Status.NOT_BEGUN: "dim",
}


def show_outcomes(output: Output, outcomes: Sequence[Outcome], last: str = "") -> None:
    """One line each; why and what to do next below those that did not go well; ``last`` is about all of them."""
    for outcome in outcomes:
        line = Text(f"{outcome.target}  ", "cyan").append(outcome.line, STYLES.get(outcome.status, "red"))
        output.line(line)
        for note in outcome.notes:
            output.line(output.hint(f"    note: {note}"))
        if outcome.error is not None:
            problems = outcome.error.data.get("problems", [])
            for problem in problems[1:]:
                output.line(f"    also: {problem}")
            for label, text in (("why", outcome.error.why), ("next", outcome.error.next)):
                if text:
                    output.line(output.hint(f"    {label}: {text}"))
    if last:
        output.line(output.hint(last))


def show_plan(output: Output, plan: Plan) -> None:
    """The exact change: why, what travels, settings, the unit's diff, the steps."""
    style = "green" if plan.effect is Effect.NOTHING else "bold yellow"
    head = Text(f"{plan.target}  ", "cyan").append(f"{plan.effect}", style)
    output.line(head.append(f"  {short(plan.before)} -> {short(plan.release)}" if plan.why else "", "default"))
    for reason in plan.why:
        output.line(f"    why: {reason}")
    for note in plan.notes:
        output.line(output.hint(f"    note: {note}"))
    for change in plan.settings_diff if plan.before else ():
        output.line(f"    {change.setting}: {change.before or '-'} -> {change.after or '-'}")
    for travel in plan.travels:
        output.line(f"    travels: {travel.what}, {travel.size} bytes")
    show_diff(output, plan.unit_diff)
    for number, step in enumerate(plan.steps, 1):
        output.line(f"    {number:2}. {step.name.value}: {step.line}")


def show_diff(output: Output, diff: str) -> None:
    """A unified diff, set off by empty lines; nothing if nothing differs."""
    if not diff:
        return
    output.line()
    for line in diff.splitlines():
        output.line(Text(line, _diff_style(line)))
    output.line()


def _diff_style(line: str) -> str:
    if line.startswith(("---", "+++", "@@")):
        return "bold"
    return {"+": "green", "-": "red"}.get(line[:1], "default")
