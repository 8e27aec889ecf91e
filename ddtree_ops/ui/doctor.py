"""A doctor's visit as a person reads it, and as a program does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rich.text import Text

from ddtree_ops.doctor import Finding, Level
from ddtree_ops.doctor.visit import Visit
from ddtree_ops.model import Mode
from ddtree_ops.planner import GIB, Ask, MemoryPlan, largest_context, largest_running, plan_memory
from ddtree_ops.ui.output import Output

STYLES = {Level.RED: "bold red", Level.YELLOW: "yellow"}
BUDGETS = (8, 16, 32, 64)


def show_visit(out: Output, seen: Visit, *, memory: bool) -> None:
    """Cards, findings with their repair, and the memory of each instance if asked for."""
    cards = [f"{card.index} {card.name} ({card.capability or '?'})" for card in seen.machine.gpus.cards]
    out.line(f"{seen.host.name}: {len(cards)} GPUs, looked at in {seen.seconds:.1f} s", style="bold")
    for finding in seen.findings:
        line = Text(f"  {finding.check.level.value:6} ", style=STYLES[finding.check.level])
        line.append(f"{finding.target}: {finding.check.title}: {finding.seen}", style="default")
        out.line(line)
        out.line(f"         {finding.check.why}", style="dim")
        out.line(f"         {finding.repair}", style="cyan")
    if not seen.findings:
        out.line("  nothing is wrong", style="green")
    if memory:
        for name, plan in seen.plans.items():
            show_plan(out, f"{seen.host.name}:{name}", plan)


def show_plan(out: Output, target: str, plan: MemoryPlan) -> None:
    """Where the memory goes, what is left, and the table of what would fit instead."""
    rows = [(item.name, f"{item.bytes / GIB:.2f}", item.how) for item in plan.items]
    rows += [
        ("reserve", f"{plan.reserve / GIB:.2f}", "activations, CUDA graphs, logits"),
        ("KV cache", f"{plan.left / GIB:.2f}", f"{plan.tokens} tokens x {plan.bytes_per_token} B"),
    ]
    out.line(f"{target}: {'fits' if plan.fits else 'does not fit'}; its limits, said explicitly:", style="bold")
    out.line("  " + " ".join(plan.flags()))
    out.table(("MEMORY", "GIB", "HOW"), rows)
    shown = [
        (name, f"{there.taken / GIB:.1f}", "yes" if there.fits else "no", str(there.tokens), str(running), str(context))
        for name, there, running, context in alternatives(plan.ask)
    ]
    out.table(("MODE", "GIB TAKEN", "FITS", "KV TOKENS", "MOST REQUESTS", "LONGEST CONTEXT"), shown)


def alternatives(ask: Ask) -> list[tuple[str, MemoryPlan, int, int]]:
    """The same instance without speculation, with a chain and with trees of several budgets."""
    asks = [("ar", replace(ask, mode=Mode.AR))]
    if ask.drafter is not None:
        asks.append(("linear", replace(ask, mode=Mode.LINEAR)))
        budgets = sorted({*BUDGETS, ask.budget} if ask.mode is Mode.TREE else BUDGETS)
        asks += [(f"tree {budget}", replace(ask, mode=Mode.TREE, budget=budget)) for budget in budgets]
    return [(name, plan_memory(each), largest_running(each), largest_context(each)) for name, each in asks]


def visit_data(seen: Visit) -> dict[str, Any]:
    """For ``--json``."""
    return {
        "host": seen.host.name,
        "seconds": round(seen.seconds, 3),
        "gpus": [
            {"index": c.index, "uuid": c.uuid, "name": c.name, "memory_mib": c.memory_mib, "capability": c.capability}
            for c in seen.machine.gpus.cards
        ],
        "findings": [finding_data(finding) for finding in seen.findings],
        "memory": {name: plan_data(plan) for name, plan in seen.plans.items()},
        "pairs": {name: dict(proof.facts) | {"fits": proof.fits} for name, proof in seen.proofs.items()},
    }


def finding_data(finding: Finding) -> dict[str, Any]:
    check = finding.check
    return {
        "id": check.id,
        "level": check.level.value,
        "target": finding.target,
        "title": check.title,
        "seen": finding.seen,
        "why": check.why,
        "repair": finding.repair,
    }


def plan_data(plan: MemoryPlan) -> dict[str, Any]:
    return {
        "fits": plan.fits,
        "items": {item.name: item.bytes for item in plan.items},
        "reserve": plan.reserve,
        "kv_tokens": plan.tokens,
        "flags": list(plan.flags()),
        "alternatives": [
            {"mode": name, "fits": there.fits, "kv_tokens": there.tokens, "running": running, "context": context}
            for name, there, running, context in alternatives(plan.ask)
        ],
    }
