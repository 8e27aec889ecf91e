"""The tables of ``bench`` and ``sweep``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.text import Text

from ddtree_ops.bench import Benched
from ddtree_ops.measuring import Swept
from ddtree_ops.release import short
from ddtree_ops.sweep import Verdict
from ddtree_ops.ui.output import Output

FIGURES = ("STREAMS", "TOK/S", "ACCEPT", "SPEEDUP", "95 %")
STYLES = {Verdict.MEASURED: "green", Verdict.REFUSED: "yellow"}


def show_bench(output: Output, found: Sequence[Benched]) -> None:
    """One row for each server and concurrency, then what was compared with what."""
    rows: list[Sequence[str | Text]] = [
        (Text(each.target, "cyan"), _mode(each), short(each.release), *_figures(run))
        for each in found
        for run in each.runs
    ]
    output.table(("TARGET", "MODE", "RELEASE", *FIGURES), rows)
    for each in found:
        if each.beside:
            output.line(Text(f"{each.target}  ", "cyan").append(f"beside {each.beside}: {each.answers}", "default"))


def show_sweep(output: Output, swept: Swept) -> None:
    """One row for each arm and concurrency, what went wrong, and what is recommended."""
    rows: list[Sequence[str | Text]] = []
    for each in swept.results:
        verdict = Text(str(each.verdict), STYLES.get(each.verdict, "red"))
        rows += [(Text(each.name, "cyan"), verdict, *_figures(run)) for run in each.runs or ({},)]
    output.table(("ARM", "RESULT", *FIGURES), rows)
    for each in swept.results:
        if each.line and each.verdict is not Verdict.MEASURED:
            output.line(Text(f"{each.name}  ", "cyan").append(each.line, "default"))
    name = swept.recommended.name if swept.recommended else "nothing"
    output.line(f"recommended: {name} ({swept.why})")
    if swept.recommended is not None and not swept.saved:
        output.line(output.hint(f"    next: ddtree-ops deploy {swept.target} {flags(swept)}"))


def flags(swept: Swept) -> str:
    """The options that deploy what is recommended."""
    assert swept.recommended is not None
    settings = swept.recommended.settings
    sizes = f" --budget {settings.budget} --topk-cap {settings.topk_cap}" if settings.mode.builds_trees else ""
    unsafe = " --allow-hybrid-unsafe --reason TEXT" if settings.allow_hybrid_unsafe else ""
    return f"--mode {settings.mode}{sizes}{unsafe}"


def _mode(each: Benched) -> str:
    return (
        f"{each.settings.mode} {each.settings.budget}" if each.settings.mode.builds_trees else str(each.settings.mode)
    )


def _figures(run: Mapping[str, Any]) -> tuple[str, ...]:
    if not run:
        return ("-",) * len(FIGURES)
    accept = run["accept_length"]
    beside = ("-", "-")
    if "speedup" in run:
        beside = (f"{run['speedup']:.2f}", f"{run['lower']:.2f} to {run['upper']:.2f}")
    length = "-" if accept is None else f"{accept:.2f}"
    return (str(run["concurrency"]), f"{run['tokens_per_s']:.1f}", length, *beside)
