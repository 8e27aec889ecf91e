"""A doctor's visit as a person reads it, and as a program does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rich.text import Text

from ddtree_ops.doctor import Finding, Level
from ddtree_ops.doctor.visit import Visit
from ddtree_ops.facts.gpu import Card
from ddtree_ops.facts.memory import TOKENS, Compared
from ddtree_ops.model import Mode
from ddtree_ops.planner import GIB, Ask, MemoryPlan, largest_context, largest_running, plan_memory
from ddtree_ops.ui.output import Output

STYLES = {Level.RED: "bold red", Level.YELLOW: "yellow"}
BUDGETS = (8, 16, 32, 64)


def show_visit(out: Output, seen: Visit, *, memory: bool) -> None:
    """Cards, findings with their repair, and the memory of each instance if asked for."""
    cards = seen.machine.gpus.cards
    out.line(f"{seen.host.name}: {len(cards)} GPUs, looked at in {seen.seconds:.1f} s", style="bold")
    if cards:
        out.table(("GPU", "NAME", "SM", "MIB", "UUID", "USED BY"), [card_row(card) for card in cards])
    for finding in seen.findings:
        line = Text(f"  {finding.check.level.value:6} ", style=STYLES[finding.check.level])
        line.append(f"{finding.target}: {finding.check.title}: {finding.seen}", style="default")
        out.line(line)
        out.line(f"         {finding.check.why}", style="dim")
        out.line(out.hint(f"         {finding.repair}"), style="cyan")
    if not seen.findings:
        out.line("  nothing is wrong", style="green")
    if memory:
        for name, proof in seen.proofs.items():
            out.line(f"{seen.host.name}:{name}: target and drafter", style="bold")
            out.table(("WHAT", "TARGET / DRAFTER"), proof.facts)
        for name, plan in seen.plans.items():
            show_plan(out, f"{seen.host.name}:{name}", plan)
            show_compared(out, seen.compared.get(name, ()))


def show_plan(out: Output, target: str, plan: MemoryPlan) -> None:
    """Where the memory goes, what is left, and the table of what would fit instead."""
    rows = [(item.name, f"{item.bytes / GIB:.2f}", item.how) for item in plan.items]
    rows += [
        ("reserve", f"{plan.reserve / GIB:.2f}", "activations, CUDA graphs, logits"),
        ("KV cache", f"{plan.left / GIB:.2f}", f"{plan.tokens} tokens x {plan.bytes_per_token} B"),
    ]
    out.line(f"{target}: {'fits' if plan.fits else 'does not fit'}; its limits, said explicitly:", style="bold")
    out.line("  " + " ".join(plan.flags()))
    if plan.ask.target.hybrid and plan.ask.mode.verifies_trees:
        out.line(f"  {plan.ask.kept.line}")
    out.table(("MEMORY", "GIB", "HOW"), rows)
    shown = [
        (name, f"{there.taken / GIB:.1f}", "yes" if there.fits else "no", str(there.tokens), str(running), str(context))
        for name, there, running, context in alternatives(plan.ask)
    ]
    out.table(("MODE", "GIB TAKEN", "FITS", "KV TOKENS", "MOST REQUESTS", "LONGEST CONTEXT"), shown)


def card_row(card: Card) -> tuple[str, ...]:
    """One GPU: who it is, and whose."""
    memory = f"{'?' if card.used_mib is None else card.used_mib}/{card.memory_mib or '?'}"
    holders = "; ".join(map(str, card.holders)) or card.sick or "-"
    return (str(card.index), card.name, card.capability or "?", memory, card.uuid, holders)


def show_compared(out: Output, rows: tuple[Compared, ...]) -> None:
    """How far the plan is from what the server reported when it started."""
    shown = [(row.name, amount(row, row.predicted), amount(row, row.reported), f"{row.off:+.1%}") for row in rows]
    if shown:
        out.table(("PLAN AND SERVER", "PLANNED", "REPORTED", "OFF"), shown)


def amount(row: Compared, value: int) -> str:
    return str(value) if row.name == TOKENS else f"{value / GIB:.2f} GiB"


def alternatives(ask: Ask) -> list[tuple[str, MemoryPlan, int, int]]:
    """The same instance without speculation, with a chain and with trees of several budgets, for a hybrid target with
    either way to keep their states.
    """
    asks = [("ar", replace(ask, mode=Mode.AR))]
    if ask.drafter is not None:
        asks.append(("linear", replace(ask, mode=Mode.LINEAR)))
        budgets = sorted({*BUDGETS, ask.budget} if ask.mode is Mode.TREE else BUDGETS)
        trees = [(f"tree {budget}", replace(ask, mode=Mode.TREE, budget=budget)) for budget in budgets]
        if not ask.target.hybrid:
            asks += trees
        else:
            asks += [
                (f"{name}, {way}", replace(tree, states=way))
                for way in ("records", "snapshots")
                for name, tree in trees
                if way == "snapshots" or replace(tree, states=None).records
            ]
    return [(name, plan_memory(each), largest_running(each), largest_context(each)) for name, each in asks]


def visit_data(seen: Visit) -> dict[str, Any]:
    """For ``--json``."""
    return {
        "host": seen.host.name,
        "seconds": round(seen.seconds, 3),
        "gpus": [
            {
                "index": card.index,
                "uuid": card.uuid,
                "name": card.name,
                "memory_mib": card.memory_mib,
                "used_mib": card.used_mib,
                "capability": card.capability,
                "driver": card.driver,
                "used_by": [str(holder) for holder in card.holders],
            }
            for card in seen.machine.gpus.cards
        ],
        "findings": [finding_data(finding) for finding in seen.findings],
        "memory": {name: plan_data(plan) for name, plan in seen.plans.items()},
        "reported": {
            name: [{"name": row.name, "planned": row.predicted, "reported": row.reported} for row in rows]
            for name, rows in seen.compared.items()
        },
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
        "states": plan.ask.kept.states,
        "states_why": plan.ask.kept.why,
        "alternatives": [
            {"mode": name, "fits": there.fits, "kv_tokens": there.tokens, "running": running, "context": context}
            for name, there, running, context in alternatives(plan.ask)
        ],
    }
