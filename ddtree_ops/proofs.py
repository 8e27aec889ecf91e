"""Whether trees are proven on a combination: the engine's own verdict, so that doctor and engine never disagree.

The engine's rules need the standard library alone; they are loaded from the sources that are shipped to the hosts.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from functools import cache
from types import ModuleType
from typing import Any

from ddtree_ops.backends import Case, dotted
from ddtree_ops.data import data_dir
from ddtree_ops.model import Mode

PROOFS = "/opt/ddtree/proofs"  # where the engine looks on a host unless told otherwise

Record = tuple[str, Any]


@cache
def engine_rules() -> ModuleType:
    """The module ``sglang_ddtree.proofs``, without the package around it, which needs torch."""
    name, path = "ddtree_ops._engine_proofs", data_dir("patches") / "sglang-ddtree/src/sglang_ddtree/proofs.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def needs_proof(case: Case) -> bool:
    """Whether the engine refuses trees there without a proof, or the flag that stands for one."""
    hybrid = case.target is not None and case.target.hybrid
    return case.mode.verifies_trees and bool(engine_rules().needs_proof(hybrid, case.tp))


def proven_by(case: Case, budget: int, driver: str | None, on_host: Sequence[Record]) -> str | None:
    """The name of the record, shipped or on the host, that proves trees of ``budget`` nodes; None if there is none."""
    rules, kept = engine_rules(), case.flag("--speculative-ddtree-states") or "snapshots"
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
    )
    name: str | None = rules.judge(wanted, [*rules.shipped(), *on_host])[0]
    return name
