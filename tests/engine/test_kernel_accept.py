"""Acceptance, links, mask and slots against oracles that know only the parents."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from engine_trees import buffers_of, poison, random_tree
from sglang_ddtree.kernels.accept import accept_tree
from sglang_ddtree.kernels.buffers import AcceptBuffers, TreeCounters
from sglang_ddtree.kernels.mask import write_tree_mask
from sglang_ddtree.kernels.slots import prepare_round
from sglang_ddtree.reference import accept as ref_accept
from sglang_ddtree.reference import tree as ref


def parent_map_walk(tree: ref.Tree, target: np.ndarray) -> list[int]:
    """The accepted path by scanning all rows for (parent, token): no links involved."""
    path = [0]
    while True:
        rows = range(1, tree.num_nodes)
        match = [r for r in rows if tree.parent[r] == path[-1] and tree.tokens[r] == target[path[-1]]]
        if not match:
            return path
        assert len(match) == 1
        path.append(match[0])


def targets_for(rng: np.random.Generator, tree: ref.Tree) -> np.ndarray:
    """Target tokens [N] that lead to a random row (often a leaf), random ones elsewhere."""
    target = rng.integers(0, 14, size=len(tree.tokens)).astype(np.int64)
    if rng.random() < 0.8:
        path = tree.path(int(rng.integers(tree.num_nodes)))
        for above, below in itertools.pairwise(path):
            target[above] = tree.tokens[below]
    return target


@pytest.mark.parametrize(("rows", "depths", "cases"), [(1, 15, 10), (2, 3, 60), (9, 5, 190), (17, 4, 180), (33, 15, 45),
                                                       (65, 15, 15)])  # fmt: skip
def test_accept_equals_the_parent_map(rows: int, depths: int, cases: int) -> None:
    rng = np.random.default_rng(rows)
    trees = [random_tree(rng, rows, depths, int(rng.integers(1, rows + 1))) for _ in range(cases)]
    target = np.stack([targets_for(rng, t) for t in trees])
    lens = rng.integers(1, 10**6, size=cases)
    width = depths + 1
    slots = np.stack([rng.permutation(10**6)[: max(rows, width) + 2] for _ in trees]).astype(np.int64)
    out = AcceptBuffers.allocate(cases + 1, width, "cpu")
    poison(*vars(out).values())
    counters = TreeCounters.allocate(width, "cpu")
    accept_tree(
        torch.from_numpy(target), buffers_of(trees, list(lens)), torch.from_numpy(slots),
        torch.from_numpy(lens), out.rows(cases), counters,
    )  # fmt: skip
    assert all(bool((t[cases] == -77).all()) for t in vars(out).values())
    want_total, want_offered, want_accepted = np.zeros(4, int), np.zeros(width, int), np.zeros(width, int)
    for r, tree in enumerate(trees):
        want = ref_accept.accept(tree, target[r])
        assert want.path == parent_map_walk(tree, target[r])
        length = want.commit_len
        pad = [0] * (width - length)
        assert out.accept_index[r].tolist() == [r * rows + p for p in want.path] + [-1] * (width - length)
        assert int(out.commit_lens[r]) == length
        assert int(out.bonus[r]) == want.bonus
        assert out.out_tokens[r].tolist() == want.tokens + pad
        assert int(out.new_seq_lens[r]) == lens[r] + length
        assert int(out.last_row[r]) == want.path[-1]
        assert out.src_slots[r].tolist() == list(slots[r][want.path]) + pad
        assert out.tgt_slots[r].tolist() == list(slots[r][:length]) + pad
        off = [i for i in range(1, length) if any(tree.rank[p] for p in want.path[1 : i + 1])]
        want_total += [1, tree.num_nodes - 1, length - 1, len(off)]
        for d, row in enumerate(want.path, start=1):
            want_offered[d : d + 1] += int((tree.parent[1 : tree.num_nodes] == row).any())
        want_accepted[1:length] += 1
    assert counters.total.tolist() == want_total.tolist()
    assert counters.offered.tolist() == want_offered.tolist()
    assert counters.accepted.tolist() == want_accepted.tolist()


def test_accept_equals_sglangs_own_walk(stock_kernel) -> None:
    stock = stock_kernel("speculative/spec_tree").verify_tree_greedy_kernel_triton
    rng = np.random.default_rng(3)
    rows, width, cases = 12, 7, 25
    trees = [random_tree(rng, rows, width - 1, int(rng.integers(2, rows + 1))) for _ in range(cases)]
    target = torch.from_numpy(np.stack([targets_for(rng, t) for t in trees]))
    lens = torch.full((cases,), 5)
    buffers = buffers_of(trees, [5] * cases)
    slots = torch.arange(cases * rows).view(cases, rows)
    out = AcceptBuffers.allocate(cases, width, "cpu")
    accept_tree(target, buffers, slots, lens, out)
    predicts = torch.zeros(cases * rows, dtype=torch.int32)
    index = torch.full((cases, width), -1, dtype=torch.int32)
    accepted = torch.zeros(cases, dtype=torch.int32)
    retrieve = torch.arange(cases * rows).view(cases, rows)
    stock[(cases,)](predicts, index, accepted, buffers.tokens, retrieve, buffers.next_token, buffers.next_sibling,
                    target, cases, width, rows)  # fmt: skip
    assert torch.equal(out.accept_index, index)
    assert torch.equal(out.commit_lens, accepted + 1)
    last = out.accept_index.gather(1, (out.commit_lens[:, None] - 1).long())[:, 0].long()
    assert torch.equal(out.bonus, predicts[last].long())


def test_moves_equal_gather_then_scatter() -> None:
    rng = np.random.default_rng(4)
    for _ in range(60):
        rows, depths = int(rng.integers(1, 33)), 7
        tree = random_tree(rng, rows, depths)
        target = targets_for(rng, tree)[None]
        slots = (rng.permutation(200)[: max(rows, depths + 1)] + 1).astype(np.int64)
        out = AcceptBuffers.allocate(1, depths + 1, "cpu")
        accept_tree(torch.from_numpy(target), buffers_of([tree], [9]), torch.from_numpy(slots[None]),
                    torch.tensor([9]), out)  # fmt: skip
        cache = rng.normal(size=(201, 3))
        want = ref_accept.compact(cache, slots, ref_accept.accept(tree, target[0]).path)
        moved = cache.copy()
        # In order, one at a time: the weakest guarantee a mover can give is still enough.
        for src, tgt in zip(out.src_slots[0].tolist(), out.tgt_slots[0].tolist(), strict=True):
            moved[tgt] = moved[src]
        np.testing.assert_array_equal(moved, want)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool])
def test_mask_writes_the_tails_and_nothing_else(dtype: torch.dtype) -> None:
    rng = np.random.default_rng(5)
    for rows in (1, 8, 17, 65):
        trees = [random_tree(rng, rows, 15, int(rng.integers(1, rows + 1))) for _ in range(3)]
        lens = [5, 1, 40]
        cells = sum(rows * (n + rows) for n in lens)
        mask = torch.full((cells + 7,), 1, dtype=dtype)
        if dtype == torch.uint8:
            mask.fill_(77)
        before = mask.clone()
        write_tree_mask(buffers_of(trees, lens), torch.tensor(lens, dtype=torch.int32), mask)
        base = 0
        for tree, length in zip(trees, lens, strict=True):
            block = mask[base : base + rows * (length + rows)].view(rows, length + rows)
            seen = ref.ancestors(tree.parent, tree.num_nodes)
            np.testing.assert_array_equal(block[:, length:].numpy().astype(bool), seen)
            if dtype == torch.uint8:
                assert set(block[:, length:].flatten().tolist()) <= {0, 1}
            untouched = before[base : base + rows * (length + rows)].view(rows, length + rows)
            assert torch.equal(block[:, :length], untouched[:, :length])
            base += rows * (length + rows)
        assert torch.equal(mask[base:], before[base:])


def test_prepare_round() -> None:
    rng = np.random.default_rng(6)
    bs, block, width = 5, 16, 33
    table = torch.from_numpy(rng.integers(1, 10**6, size=(9, 64)).astype(np.int32))
    view = torch.zeros(9, 100, dtype=torch.int32)[:, :64]
    view.copy_(table)  # a row stride that is not the width
    lens, pool = torch.tensor([0, 7, 30, 40, 63]), torch.tensor([3, 8, 0, 1, 2], dtype=torch.int32)
    bonus = torch.arange(bs) + 70
    ids, positions, slots = (torch.full((bs, n), -77) for n in (block, block, width))
    prepare_round(bonus, lens, pool, view, 9999, ids, positions, slots)
    for r in range(bs):
        assert ids[r].tolist() == [70 + r] + [9999] * (block - 1)
        assert positions[r].tolist() == list(range(int(lens[r]), int(lens[r]) + block))
        row = table[pool[r], int(lens[r]) :][:width].tolist()
        assert slots[r].tolist() == row + [0] * (width - len(row))
