"""Best-first construction of a draft tree, its links and its ancestor tables.

The drafter gives, for each of D depths, the K likeliest tokens and their log-probabilities,
independently of the tokens chosen above. Under that surrogate the log-probability of a path is the
sum along it, and the T most probable paths form a tree: a path's prefixes and better-ranked siblings
are at least as probable as itself. A heap pops them in order (DDTree, arXiv 2604.12989).

Rows of a tree: 0 is the root (the last committed token), 1..T the nodes in pop order. So a parent's
row is smaller than its child's and siblings ascend by rank; the recurrence kernels rely on both.
"""

import heapq
from dataclasses import dataclass

import numpy as np

NO_LINK = -1


@dataclass(frozen=True)
class Tree:
    """One request's draft tree in N rows; rows from ``num_nodes`` on are unused.

    An unused row has token 0, parent 0, depth 0, rank 0, no links, and sees only itself: nothing
    reaches it, and whatever is computed for it is never read.
    """

    tokens: np.ndarray  # int64 [N]
    parent: np.ndarray  # int32 [N]; the root's is 0
    depth: np.ndarray  # int32 [N]
    rank: np.ndarray  # int32 [N], among the siblings
    next_token: np.ndarray  # int64 [N], first child or -1
    next_sibling: np.ndarray  # int64 [N], next sibling or -1
    logw: np.ndarray  # float64 [N], log-probability of the path; 0 at the root
    num_nodes: int  # used rows, the root included

    def path(self, row: int) -> list[int]:
        """The rows from the root to ``row``."""
        rows = [row]
        while row != 0 and row < self.num_nodes:
            row = int(self.parent[row])
            rows.append(row)
        return rows[::-1]

    def rank_path(self, row: int) -> tuple[int, ...]:
        return tuple(int(self.rank[r]) for r in self.path(row)[1:])


def build_tree(logp: np.ndarray, ids: np.ndarray, root_token: int, rows: int, *, keep_spine: bool = False) -> Tree:
    """The tree of the ``rows - 1`` most probable paths; logp and ids are [D, K], logp descending.

    Ties: of two equally probable candidates the one with the lexicographically smaller rank path
    comes first, so a parent precedes its descendants. Candidates at -inf or NaN are never emitted.
    ``keep_spine`` emits the top-1 path to its full depth first and then the rest best-first.
    """
    depths, width = logp.shape
    chosen = _pop_best(np.asarray(logp, dtype=np.float64), depths, width, rows - 1, keep_spine)
    tokens = np.zeros(rows, dtype=np.int64)
    parent, depth, rank = (np.zeros(rows, dtype=np.int32) for _ in range(3))
    logw = np.zeros(rows)
    row_of: dict[tuple[int, ...], int] = {(): 0}
    tokens[0] = root_token
    for row, (weight, path) in enumerate(chosen, start=1):
        row_of[path] = row
        tokens[row] = ids[len(path) - 1, path[-1]]
        parent[row], depth[row], rank[row], logw[row] = row_of[path[:-1]], len(path), path[-1], weight
    used = len(chosen) + 1
    next_token, next_sibling = links(parent, used)
    return Tree(tokens, parent, depth, rank, next_token, next_sibling, logw, used)


def _pop_best(
    logp: np.ndarray, depths: int, width: int, budget: int, keep_spine: bool
) -> list[tuple[float, tuple[int, ...]]]:
    heap: list[tuple[float, tuple[int, ...], float]] = []  # (-weight, rank path, parent's weight)

    def push(base: float, path: tuple[int, ...]) -> None:
        if len(path) <= depths and path[-1] < width:
            weight = base + logp[len(path) - 1, path[-1]]
            if weight > -np.inf:
                heapq.heappush(heap, (-weight, path, base))

    push(0.0, (0,))
    chosen: list[tuple[float, tuple[int, ...]]] = []
    while heap and len(chosen) < budget:
        spine = (0,) * (len(chosen) + 1)
        forced = next((c for c in heap if c[1] == spine), None) if keep_spine else None
        if forced is None:
            key, path, base = heapq.heappop(heap)
        else:
            key, path, base = forced
            heap.remove(forced)
            heapq.heapify(heap)
        chosen.append((-key, path))
        push(base, (*path[:-1], path[-1] + 1))
        push(-key, (*path, 0))
    return chosen


def links(parent: np.ndarray, used: int) -> tuple[np.ndarray, np.ndarray]:
    """First-child and next-sibling links of rows 0..used-1, siblings in ascending row order."""
    next_token = np.full(len(parent), NO_LINK, dtype=np.int64)
    next_sibling = np.full(len(parent), NO_LINK, dtype=np.int64)
    last_child: dict[int, int] = {}
    for row in range(1, used):
        above = int(parent[row])
        if above in last_child:
            next_sibling[last_child[above]] = row
        else:
            next_token[above] = row
        last_child[above] = row
    return next_token, next_sibling


def ancestors(parent: np.ndarray, used: int) -> np.ndarray:
    """bool [N, N]: does row i see row j, that is, is j on the path from the root to i."""
    seen = np.eye(len(parent), dtype=bool)
    for row in range(1, used):
        seen[row] |= seen[parent[row]]
    return seen


def pack_bits(seen: np.ndarray) -> np.ndarray:
    """int64 [N, ceil(N / 64)]: column j of ``seen`` is bit j % 64 of word j // 64."""
    rows = len(seen)
    words = (rows + 63) // 64
    padded = np.zeros((rows, words * 64), dtype=bool)
    padded[:, :rows] = seen
    packed = np.packbits(padded, axis=1, bitorder="little")
    return packed.view("<u8").view(np.int64)


def conv_ancestors(parent: np.ndarray, used: int, conv_width: int) -> np.ndarray:
    """int32 [N, conv_width - 1]: the rows 1, 2, .. steps above each row.

    Above the root the steps count into the committed window: -1 is its newest input, -2 the one
    before. An unused row stands directly below the root.
    """
    table = np.zeros((len(parent), conv_width - 1), dtype=np.int32)
    for row in range(len(parent)):
        at = row
        for step in range(conv_width - 1):
            at = at - 1 if at <= 0 else int(parent[at]) if at < used else 0
            table[row, step] = at
    return table
