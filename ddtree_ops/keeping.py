"""How a tree's recurrent states will be kept: as asked, else by the engine's own rule, so that plans and servers agree.

The rule is loaded from the sources that are shipped to the hosts; what it asks of the target is read here, as SGLang
0.5.17 reads it. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ddtree_ops.engine import engine_module
from ddtree_ops.model import MAX_RECORDS_BUDGET, Mode, States
from ddtree_ops.shapes import ModelShape

Dtypes = tuple[str, str]
"""Of the activations, and of the windows of the convolution before recurrent layers."""

_NAMES = {"half": "float16", "float": "float32"}
_WINDOWS = ("float32", "bfloat16", "float16")
_WINDOW = "bfloat16"


@dataclass(frozen=True)
class Kept:
    """How states are kept; ``why``: as snapshots though nobody asked for them, empty otherwise."""

    states: States
    why: str = ""

    @property
    def line(self) -> str:
        return f"states kept as {self.states}" + (f": {self.why}" if self.why else "")


def dtypes(target: ModelShape, flags: Mapping[str, str], env: Mapping[str, str]) -> Dtypes:
    """What a server of these flags and variables computes in and keeps windows in."""
    given = flags.get("--dtype", "auto").lower()
    computed = target.auto_dtype if given == "auto" else _NAMES.get(given, given)
    window = env.get("SGLANG_MAMBA_CONV_DTYPE", _WINDOW)
    return computed, window if window in _WINDOWS else _WINDOW


def gap(target: ModelShape, budget: int, types: Dtypes) -> Any | None:
    """What records are not written for, as the engine's ``Gap`` (why, change); None if a tree can keep them."""
    rules, gdn = engine_module("keeping"), target.recurrence
    heads = (gdn.key_dim, gdn.value_dim) if gdn else (0, 0)
    asked = rules.Target(target.architecture, gdn is not None, heads, target.activation, types)
    return rules.gap(asked, budget, MAX_RECORDS_BUDGET)


def kept(asked: States | None, mode: Mode, target: ModelShape | None, budget: int, types: Dtypes | None = None) -> Kept:
    """How a server in this mode keeps states. Without ``types`` they are those of no flag and no variable; of a target
    that nobody could look at, nothing is known that speaks against what was asked for, or against snapshots.
    """
    if not mode.verifies_trees or target is None:
        return Kept((asked if mode.verifies_trees else None) or "snapshots")
    found = gap(target, budget, types or dtypes(target, {}, {}))
    return Kept(*engine_module("keeping").choose(asked, target.hybrid, found))
