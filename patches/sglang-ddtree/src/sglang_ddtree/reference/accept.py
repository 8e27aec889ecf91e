"""Which nodes the target accepts, and where their keys and values go.

The target gives one token per row: its argmax, or one draw from its law at that row. Walking from the
root to the child that carries the row's token, as long as there is one, is greedy decoding in the
first case and ancestral sampling in the second: the tree only decides how far one pass can go, never
what is emitted. Siblings carry distinct tokens, so at most one child matches.
"""

from dataclasses import dataclass

import numpy as np

from sglang_ddtree.reference.tree import NO_LINK, Tree


@dataclass(frozen=True)
class Accepted:
    path: list[int]  # rows, the root first: the rows whose state is committed
    tokens: list[int]  # what is emitted: the path's tokens below the root, then the bonus

    @property
    def commit_len(self) -> int:
        return len(self.path)

    @property
    def bonus(self) -> int:
        return self.tokens[-1]


def accept(tree: Tree, target_tokens: np.ndarray) -> Accepted:
    """Walk the links with the target's tokens [N]."""
    path, tokens, row = [0], [], 0
    while True:
        wanted = int(target_tokens[row])
        tokens.append(wanted)
        child = int(tree.next_token[row])
        while child != NO_LINK and int(tree.tokens[child]) != wanted:
            child = int(tree.next_sibling[child])
        if child == NO_LINK:
            return Accepted(path, tokens)
        path.append(child)
        row = child


def compact(cache: np.ndarray, slots: np.ndarray, path: list[int]) -> np.ndarray:
    """The cache [S, ...] after moving the path's rows to the first slots: all reads, then all writes."""
    moved = cache.copy()
    moved[slots[: len(path)]] = cache[slots[path]]
    return moved
