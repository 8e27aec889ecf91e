"""Counts of accepted nodes by width: against the reference, and against trees that really were narrower."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sglang_ddtree.auto.shapes import intervals, shapes_of, told_by
from sglang_ddtree.kernels.nested import count_nested
from sglang_ddtree.reference import nested
from sglang_ddtree.reference.accept import accept
from sglang_ddtree.reference.tree import build_tree

BLOCK, WIDTHS, CHILDREN = 7, (3, 8, 20), 4
SHAPES = shapes_of(WIDTHS, BLOCK)


def paths(random: np.random.Generator, requests: int, rows: int) -> list[list[int]]:
    lengths = random.integers(1, BLOCK + 1, requests)
    return [[0, *sorted(random.choice(np.arange(1, rows), n - 1, replace=False).tolist())] for n in lengths]


def accept_index(found: list[list[int]], rows: int) -> torch.Tensor:
    index = torch.full((len(found), BLOCK), -1, dtype=torch.int32)
    for request, path in enumerate(found):
        index[request, : len(path)] = torch.tensor(path) + request * rows
    return index


@pytest.mark.parametrize("shape", range(len(SHAPES)))
def test_totals_equal_the_reference(shape: int) -> None:
    random = np.random.default_rng(shape)
    bounds = torch.tensor(intervals(SHAPES), dtype=torch.int32)
    rows, tells = SHAPES[shape].nodes + 1, told_by(SHAPES, shape)
    totals = torch.zeros((3, len(SHAPES)), dtype=torch.int64)
    expected = np.zeros((3, len(SHAPES)), dtype=np.int64)
    for requests in (1, 5, 2):
        found = (
            paths(random, requests, min(rows, BLOCK) if SHAPES[shape].chain else rows)
            if rows > BLOCK
            else [[0, *range(1, n)] for n in random.integers(1, rows + 1, requests)]
        )
        count_nested(accept_index(found, rows), rows, shape, tells, bounds, totals)
        sums, squares = nested.count_nested(found, bounds.numpy())
        expected[0, shape] += requests
        expected[1, tells.start : tells.stop] += sums[tells.start : tells.stop]
        expected[2, tells.start : tells.stop] += squares[tells.start : tells.stop]
    assert totals.tolist() == expected.tolist()
    assert expected[1, tells.start :].sum() > 0


@pytest.mark.parametrize("keep_spine", [False, True])
def test_a_wide_tree_tells_what_narrower_ones_accept(keep_spine: bool) -> None:
    """Rows keep the order of emission, so the first rows of a tree are the narrower tree, whatever was asked of it."""
    random = np.random.default_rng(3)
    bounds = np.array(intervals(SHAPES))
    deep = 0
    for _ in range(150):
        logp = np.sort(np.log(random.dirichlet(np.full(CHILDREN, 0.7), BLOCK - 1)))[:, ::-1]
        ids = np.argsort(random.random((BLOCK - 1, CHILDREN + 4)))[:, :CHILDREN]
        truth = [int(ids[d, random.integers(0, 2)]) if random.random() < 0.9 else 99 for d in range(BLOCK - 1)] + [0]
        accepted = []
        for width in WIDTHS:
            tree = build_tree(logp, ids, 0, width + 1, keep_spine=keep_spine)
            targets = np.array([truth[int(depth)] for depth in tree.depth])
            accepted.append([int(row) for row in accept(tree, targets).path])
        told, _ = nested.count_nested([accepted[-1]], bounds)
        assert np.cumsum(told[:-1]).tolist() == [len(path) - 1 for path in accepted]
        deep += told[1] > 0 and told[2] > 0
    assert deep > 5, "no path left the narrow trees: nothing was tested"


def test_wrong_shapes_are_refused() -> None:
    bounds = torch.tensor(intervals(SHAPES), dtype=torch.int32)
    totals, index = torch.zeros((3, 4), dtype=torch.int64), accept_index([[0]], 4)
    with pytest.raises(ValueError, match="shape 4 of 4"):
        count_nested(index, 4, 4, range(1), bounds, totals)
    with pytest.raises(ValueError, match="of 4"):
        count_nested(index, 4, 0, range(5), bounds, totals)
    with pytest.raises(ValueError, match="totals"):
        count_nested(index, 4, 0, range(1), bounds, totals[:2])
    count_nested(index[:0], 4, 0, range(1), bounds, totals)
    assert not totals.any()
