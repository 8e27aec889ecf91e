"""The gated delta rule and its convolution over the rows of a tree, in the arrays' own precision.

The same formulas as :mod:`sglang_ddtree.reference.gdn`, which is their oracle, but one depth of the tree at a time
instead of one row, so that a round of a real model takes milliseconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np


@dataclass(frozen=True)
class Rows:
    """Rows of one request: parent row of each (the root's is itself) and depth below the root.

    Rows come parents first. A chain, plain decoding and a prompt are trees with one row at each depth.
    """

    parent: np.ndarray
    depth: np.ndarray

    @classmethod
    def chain(cls, count: int) -> Rows:
        index = np.arange(count)
        return cls(np.maximum(index - 1, 0), index)

    @cached_property
    def levels(self) -> list[np.ndarray]:
        """Row numbers by depth."""
        return [np.flatnonzero(self.depth == d) for d in range(int(self.depth.max()) + 1)]

    def sees(self) -> np.ndarray:
        """bool [N, N]: is column j on the path from the root to row i."""
        seen = np.eye(len(self.parent), dtype=bool)
        for level in self.levels[1:]:
            seen[level] |= seen[self.parent[level]]
        return seen


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1.0 / (1.0 + np.exp(-x))


def silu(x: np.ndarray) -> np.ndarray:
    return x * sigmoid(x)


def unit(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).sum(axis=-1, keepdims=True) + 1e-6)


def softplus(x: np.ndarray) -> np.ndarray:
    return np.where(x <= 20, np.log1p(np.exp(np.minimum(x, 20))), x)


def delta_rule(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, decay: np.ndarray, beta: np.ndarray, state: np.ndarray, rows: Rows
) -> tuple[np.ndarray, np.ndarray]:
    """Outputs [N, H, V] and the state after each row [N, H, V, K].

    q, k [N, H, K] (normalised, q scaled), v [N, H, V], decay = exp(g) and beta [N, H]; ``state`` [H, V, K] is the
    committed one, the root's parent.
    """
    states = np.empty((len(k), *state.shape), dtype=k.dtype)
    out = np.empty(v.shape, dtype=k.dtype)
    for depth, level in enumerate(rows.levels):
        # one array through all steps: what a row costs is the memory it touches
        at = np.repeat(state[None], len(level), axis=0) if depth == 0 else states[rows.parent[level]]
        at *= decay[level, :, None, None]
        seen = np.matmul(at, k[level, :, :, None])[..., 0]
        write = beta[level, :, None] * (v[level] - seen)
        at += write[..., :, None] * k[level, :, None, :]
        states[level] = at
        out[level] = np.matmul(at, q[level, :, :, None])[..., 0]
    return out, states


def conv(x: np.ndarray, window: np.ndarray, weight: np.ndarray, rows: Rows) -> tuple[np.ndarray, np.ndarray]:
    """SiLU of the causal convolution over each row's ancestors, and each row's window [N, W, C], newest last.

    x [N, C]; window [W - 1, C] holds the inputs before the root; weight [C, W].
    """
    width = weight.shape[1]
    windows = np.empty((len(x), width, x.shape[1]), dtype=x.dtype)
    for depth, level in enumerate(rows.levels):
        older = window[None] if depth == 0 else windows[rows.parent[level], 1:]
        windows[level, :-1] = older
        windows[level, -1] = x[level]
    return silu((windows * weight.T).sum(axis=1)), windows
