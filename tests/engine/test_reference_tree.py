"""The reference tree against brute force over all paths."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from engine_trees import random_ids, random_logp
from sglang_ddtree.reference import tree as ref


def best_paths(logp: np.ndarray, budget: int) -> list[tuple[int, ...]]:
    """All rank paths by (weight descending, path), cut to the budget."""
    depths, width = logp.shape
    weighted = []
    for length in range(1, depths + 1):
        for path in itertools.product(range(width), repeat=length):
            weight = 0.0
            for d, r in enumerate(path):
                weight = weight + float(logp[d, r])
            if weight > -np.inf:
                weighted.append((-weight, path))
    return [path for _, path in sorted(weighted)[:budget]]


@pytest.mark.parametrize("ties", [False, True])
def test_tree_is_the_most_probable_paths_in_order(ties: bool) -> None:
    rng = np.random.default_rng(1)
    for case in range(60):
        depths, width, budget = int(rng.integers(1, 5)), int(rng.integers(1, 5)), int(rng.integers(0, 30))
        logp = random_logp(rng, depths, width)
        if ties:
            logp = np.sort(rng.choice(np.float32([0.0, -0.5, -1.0, -np.inf]), size=logp.shape), axis=1)[:, ::-1]
        ids = random_ids(rng, depths, width)
        tree = ref.build_tree(logp, ids, 7, budget + 1)
        found = [tree.rank_path(row) for row in range(1, tree.num_nodes)]
        assert found == best_paths(logp, budget), case


def test_rows_links_and_ancestors_agree_with_the_parents() -> None:
    rng = np.random.default_rng(2)
    for _ in range(50):
        depths, width, rows = 6, 4, int(rng.integers(1, 40))
        tree = ref.build_tree(random_logp(rng, depths, width), random_ids(rng, depths, width), 3, rows)
        seen = ref.ancestors(tree.parent, tree.num_nodes)
        for row in range(tree.num_nodes):
            assert row == 0 or tree.parent[row] < row
            assert set(np.flatnonzero(seen[row])) == set(tree.path(row))
            children, child = [], int(tree.next_token[row])
            while child != ref.NO_LINK:
                children.append(child)
                child = int(tree.next_sibling[child])
            assert children == sorted(children)
            assert [int(tree.rank[c]) for c in children] == list(range(len(children)))
            assert all(tree.parent[c] == row for c in children)
        for row in range(tree.num_nodes, rows):
            assert (tree.tokens[row], tree.parent[row], tree.depth[row]) == (0, 0, 0)
            assert list(np.flatnonzero(seen[row])) == [row]


def test_spine_is_kept_whole_and_the_rest_is_best_first() -> None:
    rng = np.random.default_rng(3)
    for _ in range(30):
        depths, width, budget = 5, 3, int(rng.integers(1, 20))
        logp, ids = random_logp(rng, depths, width, 0.3), random_ids(rng, depths, width)
        tree = ref.build_tree(logp, ids, 0, budget + 1, keep_spine=True)
        spine = min(depths, budget)
        assert [tree.rank_path(r) for r in range(1, spine + 1)] == [(0,) * d for d in range(1, spine + 1)]
        rest = [tree.rank_path(r) for r in range(spine + 1, tree.num_nodes)]
        everything = best_paths(logp, 10**6)
        assert rest == [p for p in everything if any(p)][: budget - spine]


def test_packed_bits_and_conv_table() -> None:
    rng = np.random.default_rng(4)
    parent = np.array([0] + [int(rng.integers(0, i)) for i in range(1, 70)], dtype=np.int32)
    seen = ref.ancestors(parent, 66)
    packed = ref.pack_bits(seen)
    assert packed.shape == (70, 2)
    for i, j in itertools.product(range(70), range(70)):
        assert bool((int(packed[i, j // 64]) >> (j % 64)) & 1) == bool(seen[i, j])
    table = ref.conv_ancestors(np.array([0, 0, 1, 1, 3, 0], dtype=np.int32), 5, 4)
    assert table.tolist() == [[-1, -2, -3], [0, -1, -2], [1, 0, -1], [1, 0, -1], [3, 1, 0], [0, -1, -2]]
