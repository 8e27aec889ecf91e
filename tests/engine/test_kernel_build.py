"""The tree builder against the reference heap: row for row, on 500 random cases."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from engine_trees import poison, random_ids, random_logp
from sglang_ddtree.kernels.buffers import TreeBuffers
from sglang_ddtree.kernels.build import build_tree
from sglang_ddtree.reference import tree as ref


def run(
    logp: np.ndarray, ids: np.ndarray, rows: int, *, keep_spine: bool = False, seq_dtype: torch.dtype = torch.int64
) -> tuple[TreeBuffers, np.ndarray, np.ndarray]:
    bs = len(logp)
    out = TreeBuffers.allocate(bs + 1, rows, "cpu")  # one request more than the batch
    poison(*vars(out).values())
    bonus, lens = np.arange(bs) + 500, np.arange(bs) * 1000 + 3
    build_tree(
        torch.from_numpy(np.ascontiguousarray(logp)),
        torch.from_numpy(np.ascontiguousarray(ids)),
        torch.from_numpy(bonus),
        torch.from_numpy(lens).to(seq_dtype),
        out,
        keep_spine=keep_spine,
    )
    assert all(bool((t[bs] == -77).all()) for t in vars(out).values()), "wrote beyond the batch"
    return out.rows(bs), bonus, lens


def assert_equals_reference(
    out: TreeBuffers, logp: np.ndarray, ids: np.ndarray, bonus: np.ndarray, lens: np.ndarray, keep_spine: bool = False
) -> None:
    for r in range(len(logp)):
        want = ref.build_tree(logp[r], ids[r], int(bonus[r]), out.width, keep_spine=keep_spine)
        assert int(out.num_nodes[r]) == want.num_nodes
        for name in ("tokens", "parent", "depth", "rank", "next_token", "next_sibling"):
            np.testing.assert_array_equal(getattr(out, name)[r].numpy(), getattr(want, name), err_msg=name)
        np.testing.assert_array_equal(out.positions[r].numpy(), lens[r] + want.depth)
        seen = ref.ancestors(want.parent, want.num_nodes)
        np.testing.assert_array_equal(out.ancestors[r].numpy(), ref.pack_bits(seen))
        table = ref.conv_ancestors(want.parent, want.num_nodes, 4)
        np.testing.assert_array_equal(out.conv_ancestors[r].numpy(), table)


SHAPES = [
    # depths, width, rows, requests: K = 1, a lone root, T below, at and above the depth, T > K * D, wide caps
    (15, 1, 9, 60), (15, 8, 1, 20), (15, 4, 2, 60), (15, 8, 5, 150), (15, 8, 9, 80), (15, 8, 16, 30), (15, 8, 17, 30),
    (3, 2, 20, 16), (1, 5, 8, 50), (7, 16, 12, 20), (4, 17, 12, 20), (15, 8, 33, 10), (15, 8, 65, 4), (15, 16, 65, 2),
]  # fmt: skip


@pytest.mark.parametrize(("depths", "width", "rows", "requests"), SHAPES)
def test_equals_the_heap(depths: int, width: int, rows: int, requests: int) -> None:
    rng = np.random.default_rng(depths * 10000 + width * 100 + rows)
    logp = np.stack([random_logp(rng, depths, width, float(rng.choice([0.2, 1.0, 4.0]))) for _ in range(requests)])
    ids = np.stack([random_ids(rng, depths, width) for _ in range(requests)])
    out, bonus, lens = run(logp, ids, rows)
    assert_equals_reference(out, logp, ids, bonus, lens)


def test_cases_counted() -> None:
    assert sum(s[3] for s in SHAPES) >= 500


@pytest.mark.parametrize("keep_spine", [False, True])
def test_ties_infinities_and_nan(keep_spine: bool) -> None:
    rng = np.random.default_rng(5)
    levels = np.float32([0.0, -0.25, -0.5, -1.0, -np.inf])
    logp = np.sort(rng.choice(levels, size=(16, 5, 4)), axis=2)[:, :, ::-1].copy()
    logp[:3] = -np.inf
    logp[3, 2] = np.nan
    ids = np.stack([random_ids(rng, 5, 4) for _ in range(16)])
    out, bonus, lens = run(logp, ids, 18, keep_spine=keep_spine)
    assert_equals_reference(out, logp, ids, bonus, lens, keep_spine)
    assert out.num_nodes[:3].tolist() == [1, 1, 1]


def test_spine_kept() -> None:
    rng = np.random.default_rng(6)
    logp = np.stack([random_logp(rng, 15, 4, 0.3) for _ in range(10)])
    ids = np.stack([random_ids(rng, 15, 4) for _ in range(10)])
    out, bonus, lens = run(logp, ids, 25, keep_spine=True, seq_dtype=torch.int32)
    assert_equals_reference(out, logp, ids, bonus, lens, keep_spine=True)


def test_refuses_what_it_cannot_order() -> None:
    logp = torch.zeros(1, 15, 31)
    ids = torch.zeros(1, 15, 31, dtype=torch.int64)
    one = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match="63 bits"):
        build_tree(logp, ids, one, one, TreeBuffers.allocate(1, 17, "cpu"))
    logp, ids, many = torch.zeros(2, 3, 2), torch.zeros(2, 3, 2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match="buffers for 1"):
        build_tree(logp, ids, many, many, TreeBuffers.allocate(1, 17, "cpu"))


def test_allocated_buffers_hold_lone_roots() -> None:
    fresh = TreeBuffers.allocate(1, 66, "cpu")
    poisoned, _, _ = run(np.full((1, 2, 2), -np.inf, np.float32), np.zeros((1, 2, 2), np.int64), 66)
    for name in ("parent", "depth", "next_token", "next_sibling", "ancestors", "conv_ancestors", "num_nodes"):
        assert torch.equal(getattr(fresh, name), getattr(poisoned, name)), name
