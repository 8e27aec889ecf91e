"""The CPU engine's recurrence and convolution against the reference, which computes row by row in float64."""

from __future__ import annotations

import numpy as np
import pytest
from engine_trees import random_tree
from sglang_ddtree.cpu import delta
from sglang_ddtree.reference import gdn
from sglang_ddtree.reference.tree import conv_ancestors


@pytest.mark.parametrize("seed", range(6))
def test_delta_rule_equals_the_reference_on_random_trees(seed: int) -> None:
    rng = np.random.default_rng(seed)
    tree = random_tree(rng, rows=17, depths=6)
    heads, width, out_width = 2, 8, 6
    rows = gdn.GdnRows(
        q=rng.normal(size=(17, heads, width)), k=rng.normal(size=(17, heads, width)),
        v=rng.normal(size=(17, 2 * heads, out_width)), a=rng.normal(size=(17, 2 * heads)),
        b=rng.normal(size=(17, 2 * heads)), a_log=rng.normal(size=2 * heads), dt_bias=rng.normal(size=2 * heads),
    )  # fmt: skip
    state = rng.normal(size=(2 * heads, out_width, width))
    want = gdn.gdn_tree(rows, state, tree.parent)
    q, k = (np.repeat(delta.unit(x), 2, axis=1) for x in (rows.q, rows.k))
    out, states = delta.delta_rule(
        q * width**-0.5, k, rows.v,
        np.exp(-np.exp(rows.a_log) * delta.softplus(rows.a + rows.dt_bias)), delta.sigmoid(rows.b),
        state, delta.Rows(tree.parent, tree.depth),
    )  # fmt: skip
    np.testing.assert_allclose(out, want.out, atol=1e-12)
    np.testing.assert_allclose(states, want.states, atol=1e-12)


@pytest.mark.parametrize("seed", range(4))
def test_convolution_and_windows_equal_the_reference(seed: int) -> None:
    rng = np.random.default_rng(seed)
    tree = random_tree(rng, rows=17, depths=6)
    x, window, weight = rng.normal(size=(17, 5)), rng.normal(size=(3, 5)), rng.normal(size=(5, 4))
    out, windows = delta.conv(x, window, weight, delta.Rows(tree.parent, tree.depth))
    table = conv_ancestors(tree.parent, tree.num_nodes, 4)
    np.testing.assert_allclose(out, gdn.conv_tree(x, window.T, weight, None, table), atol=1e-12)
    for row in range(tree.num_nodes):
        committed = gdn.conv_window(x, window.T, tree.path(row))
        np.testing.assert_array_equal(windows[row, 1:].T, committed)


def test_rows_see_their_ancestors_and_themselves() -> None:
    rows = delta.Rows(np.array([0, 0, 0, 1]), np.array([0, 1, 1, 2]))
    assert rows.sees().tolist() == [
        [True, False, False, False],
        [True, True, False, False],
        [True, False, True, False],
        [True, True, False, True],
    ]
