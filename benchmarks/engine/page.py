"""One self-contained HTML page from results: what was seen first, then the figures, then where they come from."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from benchmarks.engine.summary import Cell, cells
from benchmarks.engine.svg import bars, intervals, lines, number, palette

STYLE = """
:root{color-scheme:light;--ink:#111827;--soft:#4b5563;--line:#e5e7eb;--paper:#fff;--tint:#f9fafb}
body{font:16px/1.55 system-ui,sans-serif;color:var(--ink);background:var(--paper);margin:0 auto;max-width:1240px;
padding:32px 20px 80px}
h1{font-size:28px;line-height:1.2;margin:0 0 4px}h2{font-size:21px;margin:44px 0 8px;padding-top:20px;
border-top:1px solid var(--line)}h3{font-size:16px;margin:26px 0 6px}p{margin:8px 0;max-width:76ch}
.sub,.note,figcaption{color:var(--soft);font-size:14px}.figures{display:grid;gap:20px;
grid-template-columns:repeat(auto-fit,minmax(420px,1fr))}
.wide{margin-top:18px;max-width:560px}figure{margin:0;padding:14px;border:1px solid var(--line);
border-radius:8px}figcaption{font-weight:600;color:var(--ink)}svg{width:100%;height:auto;display:block}
.tick{font:11px system-ui,sans-serif;fill:#4b5563}.grid{stroke:#e5e7eb}.one{stroke:#111827;stroke-dasharray:4 3}
.keys{display:flex;flex-wrap:wrap;gap:4px 14px;font-size:13px;margin:4px 0 6px}.key i{display:inline-block;width:10px;
height:10px;border-radius:2px;margin-right:5px}table{border-collapse:collapse;font-size:13px;width:100%}
.scroll{overflow-x:auto;margin-top:18px}th,td{padding:5px 6px;text-align:right;
border-bottom:1px solid var(--line);white-space:nowrap}
th:first-child,td:first-child,th.l,td.l{text-align:left}th{color:var(--soft);font-weight:600}
.banner{background:#fef3c7;border:1px solid #f59e0b;border-radius:8px;padding:10px 14px;margin:14px 0}
ul.seen{padding-left:20px}ul.seen li{margin:6px 0}
pre{background:var(--tint);border:1px solid var(--line);border-radius:8px;padding:12px;overflow-x:auto;font-size:12.5px}
"""


class View:
    """A result with its cells, and whether its times mean anything."""

    def __init__(self, result: Mapping[str, Any]) -> None:
        self.result = result
        self.cells: list[Cell] = cells(result)
        self.arms: list[str] = list(result["arms"])
        self.colours = palette(self.arms)
        self.baseline: str = result["baseline"]
        self.notice: str = next((str(a["server"]["stand_in"]) for a in result["arms"].values()
                                 if a["server"].get("stand_in")), "")  # fmt: skip

    @property
    def timed(self) -> bool:
        return not self.notice

    @property
    def temperatures(self) -> list[float]:
        return sorted({cell.temperature for cell in self.cells})

    def at(self, temperature: float) -> list[Cell]:
        return [cell for cell in self.cells if cell.temperature == temperature]

    def by_concurrency(self, temperature: float) -> dict[str, list[Cell]]:
        found: dict[str, list[Cell]] = {}
        for cell in sorted(self.at(temperature), key=lambda c: c.concurrency):
            found.setdefault(f"{cell.concurrency} user{'s' if cell.concurrency > 1 else ''}", []).append(cell)
        return found


def render(results: Sequence[Mapping[str, Any]]) -> str:
    views = [View(result) for result in results]
    body = "".join(section(view) for view in views)
    title = "Chains against trees"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{title}</title><style>{STYLE}</style></head><body><h1>{title}</h1>"
        '<p class="sub">Speculative decoding of the self-test pair: plain decoding, the drafter\'s chain (linear) and '
        "trees of several budgets, on the same prompts. Made by <code>python -m benchmarks.engine.bench</code>; "
        f"nothing on this page was typed by hand.</p>{body}</body></html>\n"
    )


def section(view: View) -> str:
    result = view.result
    where = "; ".join(result["host"]["gpu"]) or result["host"]["cpu"]
    parts = [
        f"<h2>{escape(result['title'])}</h2>",
        f'<p class="sub">{escape(where)} · {escape(result["when"])} · {len(result["prompts"])} prompts of '
        f"{len({p['category'] for p in result['prompts']})} kinds, {result['grid']['tokens']} tokens each</p>",
    ]
    if not view.timed:
        parts.append(f'<p class="banner">{escape(view.notice)}. Accept lengths below are real, times are left out.</p>')
    parts.append(seen(view))
    for temperature in view.temperatures:
        parts.append(f"<h3>Temperature {temperature:g}</h3>")
        parts.append('<div class="figures">' + "".join(figures(view, temperature)) + "</div>")
        parts.append(table(view, temperature))
    parts += ["<h3>Parity</h3>", parity(view), trees(view), "<h3>Where this comes from</h3>", origin(view)]
    return "".join(parts)


def seen(view: View) -> str:
    """The findings in words, from the figures alone."""
    said = []
    for temperature in view.temperatures:
        here = view.at(temperature)
        alone = [cell for cell in here if cell.concurrency == min(c.concurrency for c in here)]
        base = next(cell for cell in alone if cell.arm == view.baseline)
        trees = [cell for cell in alone if cell.arm not in ("ar", view.baseline) and cell.accept_length]
        if trees and base.accept_length:
            longest = max(trees, key=lambda cell: cell.accept_length or 0)
            gain = (longest.accept_length or 0) / base.accept_length - 1
            said.append(
                f"T={temperature:g}: a round of {view.baseline} gives {base.accept_length:.2f} tokens, a round of "
                f"{longest.arm} {longest.accept_length:.2f} ({gain:+.0%})."
            )
        if view.timed and trees:
            said += [verdict(view, temperature, concurrency) for concurrency in view.result["grid"]["concurrencies"]]
    return '<ul class="seen">' + "".join(f"<li>{escape(line)}</li>" for line in said) + "</ul>"


def verdict(view: View, temperature: float, concurrency: int) -> str:
    """Does any tree beat the baseline here, beyond the interval, and does any lose to it?"""
    here = [(c.arm, c.speedup) for c in view.at(temperature) if c.concurrency == concurrency and c.arm != "ar"]
    arm, speed = max(((arm, speed) for arm, speed in here if speed), key=lambda entry: entry[1].value)
    word = "not told apart from" if not speed.certain else "faster than" if speed.value > 1 else "slower than"
    said = (
        f"T={temperature:g}, {concurrency} at once: the fastest tree ({arm}) is {word} {view.baseline}: "
        f"{speed.value:.3f} of its speed, interval {speed.low:.3f} to {speed.high:.3f}."
    )
    slower = [f"{one} ({found.value:.3f})" for one, found in here if one != arm and found and found.high < 1]
    return f"{said} Slower than {view.baseline}: {', '.join(slower)}." if slower else said


def figures(view: View, temperature: float) -> list[str]:
    groups = view.by_concurrency(temperature)
    found = speed_figures(view, groups) if view.timed else []
    alone = next(iter(groups.values()))
    speculating = [cell for cell in alone if cell.accept_length]
    categories = sorted({name for cell in speculating for name in cell.by_category})
    lengths = {
        name: {cell.arm: cell.by_category[name] for cell in speculating if name in cell.by_category}
        for name in categories
    }
    paired = by_kind(categories, alone)
    if view.timed and any(paired.values()):
        title = f"Speed against {view.baseline} by kind of prompt, {next(iter(groups))}"
        found.append(intervals(title, "ratio and 95% interval", paired, view.colours))
    unit = "tokens a round, the target's own included"
    found.append(bars("Accept length by kind of prompt", unit, lengths, view.colours))
    shares = {cell.arm: [n / sum(cell.histogram) for n in cell.histogram] for cell in speculating if cell.histogram}
    if shares:
        unit = "tokens a round gives (1: the target's own alone); share of rounds"
        found.append(lines("Rounds by tokens given", unit, shares, view.colours))
    return found


def by_kind(kinds: Sequence[str], row: Sequence[Cell]) -> dict[str, dict[str, tuple[float, float, float]]]:
    """Every speculating arm's speed over the baseline's, for each kind of prompt."""
    return {
        kind: {
            cell.arm: (speed.value, speed.low, speed.high)
            for cell in row
            if cell.arm != "ar" and (speed := cell.speedup_by_category.get(kind))
        }
        for kind in kinds
    }


def speed_figures(view: View, groups: Mapping[str, list[Cell]]) -> list[str]:
    speeds = {label: {cell.arm: cell.user_tok_s for cell in row} for label, row in groups.items()}
    ratios = {
        label: {c.arm: (c.speedup.value, c.speedup.low, c.speedup.high) for c in row if c.speedup and c.arm != "ar"}
        for label, row in groups.items()
    }
    found = [bars("Decode speed of one user", "tokens a second, median", speeds, view.colours)]
    if any(ratios.values()):
        title = f"Speed against {view.baseline}, same prompts"
        found.append(intervals(title, "ratio and 95% interval", ratios, view.colours))
    return found


def table(view: View, temperature: float) -> str:
    kinds = sorted({name for cell in view.at(temperature) for name in cell.by_category})
    heads = ["arm", "users", "accept length", *(f"on {kind}" for kind in kinds)]
    if view.timed:
        heads += ["tok/s a user", "tok/s in all", "TTFT ms", "TTFT p99 ms", "ms a round", f"against {view.baseline}"]
    rows = []
    for cell in sorted(view.at(temperature), key=lambda c: (c.concurrency, view.arms.index(c.arm))):
        row = [cell.arm, str(cell.concurrency), f"{cell.accept_length:.2f}" if cell.accept_length else "1"]
        row += [f"{cell.by_category[kind]:.2f}" if kind in cell.by_category else "1" for kind in kinds]
        if view.timed:
            row += [number(cell.user_tok_s), number(cell.total_tok_s), number(cell.ttft_ms), number(cell.ttft_p99_ms)]
            row.append(f"{cell.round_ms:.2f}" if cell.round_ms else "")
            speed = cell.speedup
            row.append(f"{speed.value:.2f} ({speed.low:.2f} to {speed.high:.2f})" if speed else "")
        rows.append(row)
    return grid(heads, rows)


def parity(view: View) -> str:
    rows = []
    for judged in view.result["parity"]:
        wrong, ties = judged["wrong"], judged["near_ties"]
        state = "wrong" if wrong else "equal" if not ties else "equal up to near ties"
        gap = max((tie["gap"] for tie in ties), default=None)
        counts = [str(judged["identical"]), str(len(ties)), "" if gap is None else f"{gap:.3f}"]
        rows.append([judged["arm"], state, *counts])
    note = (
        '<p class="note">Greedy answers of every arm against those of plain decoding, token for token, at one user and '
        "at the most. A near tie: the first different token was one of plain decoding's two best, at most 0.75 nats "
        "apart.</p>"
    )
    return note + grid(["arm", "verdict", "identical", "near ties", "largest gap"], rows)


def trees(view: View) -> str:
    """What the trees were like, over the whole run; empty if no server counted."""
    told = {arm: found.get("counters", found) for arm, found in view.result["trees"].items() if found}
    counted = {arm: found for arm, found in told.items() if found.get("trees")}
    if not counted:
        return ""
    heads = ["arm", "rounds", "nodes a tree", "accepted a tree", "off the spine"]
    rows = [
        [
            arm,
            str(found["trees"]),
            number(found.get("nodes_per_tree", 0)),
            number(found.get("accepted_per_tree", 0)),
            f"{found.get('off_spine_share', 0):.1%}",
        ]
        for arm, found in counted.items()
    ]
    depths = {arm: found["acceptance_by_depth"] for arm, found in counted.items() if found.get("acceptance_by_depth")}
    unit = "depth below the root; share of offers taken"
    chart = lines("Acceptance by depth", unit, depths, view.colours) if depths else ""
    return (
        "<h3>Trees, over the whole run</h3>" + grid(heads, rows) + f'<div class="figures wide">{chart}</div>'
        '<p class="note">Off the spine: accepted nodes that the drafter\'s top-1 chain does not hold. By depth: of the '
        "rounds whose accepted path reached a node with children, those in which one of them was taken.</p>"
    )


def origin(view: View) -> str:
    result = view.result
    shown = {
        "host": result["host"], "grid": result["grid"],
        "prompt set": result["prompt_set"], "arms": result["arms"],
    }  # fmt: skip
    shown_text = escape(json.dumps(shown, indent=1))
    return (
        f"<p><code>{escape(result['command'])}</code></p>"
        f"<details><summary>Host, grid and every arm's settings</summary><pre>{shown_text}</pre></details>"
    )


def grid(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = "".join(f"<th>{escape(head)}</th>" for head in heads)
    body = "".join("<tr>" + "".join(f"<td>{escape(value)}</td>" for value in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><tr>{top}</tr>{body}</table></div>'
