"""How a tree's recurrent states are kept where nobody says it: one rule, for the server and for who plans for it.

A round with records costs less time and a sixtieth of the memory (docs/engine.md, "States"), so they are kept wherever
their kernels are written for the target and the tree; elsewhere, and where no tree is verified, it is snapshots.

ddtree_ops loads this file by itself, without the package, which needs torch: the standard library alone.
"""

from __future__ import annotations

import dataclasses

SNAPSHOTS, RECORDS = "snapshots", "records"  # the words of states.py, which a test compares


@dataclasses.dataclass(frozen=True)
class Target:
    """What records hang on. gdn: whether there are Gated DeltaNet layers; heads: their key and value head size;
    activation: behind their convolution; dtypes: of the activations, and of the convolution's windows.
    """

    architecture: str
    gdn: bool
    heads: tuple[int, int] = (0, 0)
    activation: str = ""
    dtypes: tuple[str, str] = ("", "")


@dataclasses.dataclass(frozen=True)
class Gap:
    """What the record kernels are not written for, and the change with which they would be, if there is one."""

    why: str
    change: str = ""

    def __str__(self) -> str:
        return self.why + (f"; for records {self.change}" if self.change else "")


def gap(target: Target, budget: int, most: int) -> Gap | None:
    """Why a tree of `budget` nodes on this target cannot keep records; None if it can. most: nodes the kernels hold."""
    if not target.gdn:
        return Gap(f"records are of Gated DeltaNet layers and {target.architecture} has none")
    if budget > most:
        return Gap(
            f"records are written for at most {most} nodes and the budget is {budget}",
            f"set --speculative-ddtree-budget {most}, or no wider width in mode auto",
        )
    key, value = target.heads
    if key < 16 or key & (key - 1) or value < 16 or value & (value - 1):
        return Gap(f"records need head sizes that are powers of two from 16 and these are {key} and {value}")
    if target.activation not in ("silu", "swish"):
        return Gap(f"the convolution over records knows SiLU only and this one has {target.activation!r}")
    computed, kept = target.dtypes
    if computed != kept:
        return Gap(
            f"records hold the convolution's inputs, which are {computed}, in the type of its windows, which is {kept}",
            f"set SGLANG_MAMBA_CONV_DTYPE={computed}",
        )
    return None


def choose(asked: str | None, recurrent: bool, found: Gap | None) -> tuple[str, str]:
    """(how states are kept, why it is snapshots though nobody asked for them). A word that was asked for stands; a
    target without recurrent layers has nothing to keep.
    """
    if asked is not None:
        return asked, ""
    if not recurrent:
        return SNAPSHOTS, ""
    return (RECORDS, "") if found is None else (SNAPSHOTS, str(found))
