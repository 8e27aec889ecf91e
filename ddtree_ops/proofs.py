"""Whether trees are proven on a combination: the engine's own verdict, so that doctor and engine never disagree."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

from ddtree_ops.backends import Case, dotted
from ddtree_ops.engine import engine_module
from ddtree_ops.model import Mode

PROOFS = "/opt/ddtree/proofs"  # where the engine looks on a host unless told otherwise

Record = tuple[str, Any]


def engine_rules() -> ModuleType:
    """The engine's module ``proofs``."""
    return engine_module("proofs")


def needs_proof(case: Case) -> bool:
    """Whether the engine refuses trees there without a proof, or the flag that stands for one."""
    hybrid = case.target is not None and case.target.hybrid
    return case.mode.verifies_trees and bool(engine_rules().needs_proof(hybrid, case.tp))


def proven_by(
    case: Case, budget: int, driver: str | None, on_host: Sequence[Record], *, cached: bool = False
) -> str | None:
    """The name of the record, shipped or on the host, that proves trees of ``budget`` nodes; None if there is none.

    ``cached``: with their states in the prefix cache, where the case has any there.
    """
    rules, kept = engine_rules(), case.kept(budget).states
    hybrid = case.target is not None and case.target.hybrid
    wanted = rules.Combination(
        architecture=case.target.architecture if case.target else "",
        backend=case.attention or "triton",
        compute_capability=dotted(case),
        engine=rules.engine_digest(states=kept, tp=case.tp),
        driver=driver or None,
        budget=budget,
        states=kept,
        tp=case.tp,
        dense=not hybrid,
        auto=rules.auto_digest(states=kept) if case.mode is Mode.AUTO else None,
        prefix_cache=case.prefix_cache if cached else None,
    )
    name: str | None = rules.judge(wanted, [*rules.shipped(), *on_host])[0]
    return name
