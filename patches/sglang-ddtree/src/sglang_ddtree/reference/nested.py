"""Accepted nodes of narrower trees, read off the accepted path of a wider one."""

from collections.abc import Sequence

import numpy as np


def count_nested(paths: Sequence[Sequence[int]], bounds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Nodes, int64 [S], and their squares over all requests, by interval.

    paths: of each request the accepted rows within its tree, the root's 0 included. bounds [S, 2]: interval i holds
    the rows low < row <= high. Since rows are emitted best-first, rows 1..m of a path are what a tree of m nodes
    would have had accepted.
    """
    counts = np.array([[sum(low < row <= high for row in path) for low, high in bounds] for path in paths])
    return counts.sum(0).astype(np.int64), (counts**2).sum(0).astype(np.int64)
