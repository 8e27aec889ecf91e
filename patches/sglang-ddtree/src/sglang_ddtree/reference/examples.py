"""Random drafts and trees, for tests and for the checks a GPU host runs."""

import numpy as np

from sglang_ddtree.reference.tree import Tree, links


def random_logp(rng: np.random.Generator, depths: int, width: int, scale: float = 2.0) -> np.ndarray:
    """float32 [D, K], descending: the top of a softmax over a somewhat larger vocabulary."""
    logits = np.sort(rng.normal(size=(depths, width + 5)) * scale, axis=1)[:, ::-1]
    logp = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return logp[:, :width].astype(np.float32)


def random_ids(rng: np.random.Generator, depths: int, width: int, vocab: int = 1000) -> np.ndarray:
    """int64 [D, K], distinct within a depth."""
    return np.stack([rng.permutation(max(vocab, width))[:width] for _ in range(depths)]).astype(np.int64)


def random_tree(rng: np.random.Generator, rows: int, depths: int, used: int | None = None) -> Tree:
    """Any topology under the ordering rules, tokens distinct among siblings only."""
    used = rows if used is None else used
    parent, depth, rank = (np.zeros(rows, dtype=np.int32) for _ in range(3))
    tokens = np.zeros(rows, dtype=np.int64)
    tokens[0] = rng.integers(1000)
    taken: dict[int, set[int]] = {}
    for row in range(1, used):
        candidates = [p for p in range(row) if depth[p] < depths]
        parent[row] = rng.choice(candidates[-6:] if rng.random() < 0.7 else candidates)
        depth[row] = depth[parent[row]] + 1
        siblings = taken.setdefault(int(parent[row]), set())
        rank[row] = len(siblings)
        token = int(rng.integers(12))
        while token in siblings:
            token += 1
        siblings.add(token)
        tokens[row] = token
    next_token, next_sibling = links(parent, used)
    return Tree(tokens, parent, depth, rank, next_token, next_sibling, np.zeros(rows), used)


def leading_targets(rng: np.random.Generator, tree: Tree) -> np.ndarray:
    """Target tokens [N] that mostly lead down to a random row, random ones elsewhere."""
    target = rng.integers(0, 14, size=len(tree.tokens)).astype(np.int64)
    if rng.random() < 0.8:
        path = tree.path(int(rng.integers(tree.num_nodes)))
        target[path[:-1]] = tree.tokens[path[1:]]
    return target
