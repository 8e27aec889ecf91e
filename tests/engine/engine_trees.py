"""Random trees and small helpers that the engine's tests share."""

from __future__ import annotations

import numpy as np
import torch
from sglang_ddtree.kernels.buffers import TreeBuffers
from sglang_ddtree.reference import tree as ref


def random_logp(rng: np.random.Generator, depths: int, width: int, scale: float = 2.0) -> np.ndarray:
    """float32 [D, K], descending: the top of a softmax over a somewhat larger vocabulary."""
    logits = np.sort(rng.normal(size=(depths, width + 5)) * scale, axis=1)[:, ::-1]
    logp = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return logp[:, :width].astype(np.float32)


def random_ids(rng: np.random.Generator, depths: int, width: int, vocab: int = 1000) -> np.ndarray:
    """int64 [D, K], distinct within a depth."""
    return np.stack([rng.permutation(max(vocab, width))[:width] for _ in range(depths)]).astype(np.int64)


def random_tree(rng: np.random.Generator, rows: int, depths: int, used: int | None = None) -> ref.Tree:
    """Any topology under the ordering rules, tokens distinct among siblings only."""
    used = rows if used is None else used
    parent = np.zeros(rows, dtype=np.int32)
    depth = np.zeros(rows, dtype=np.int32)
    rank = np.zeros(rows, dtype=np.int32)
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
    next_token, next_sibling = ref.links(parent, used)
    return ref.Tree(tokens, parent, depth, rank, next_token, next_sibling, np.zeros(rows), used)


def buffers_of(trees: list[ref.Tree], seq_lens: list[int], conv_width: int = 4) -> TreeBuffers:
    """The kernels' view of reference trees."""

    def stack(rows: list[np.ndarray], dtype: torch.dtype) -> torch.Tensor:
        return torch.from_numpy(np.stack(rows)).to(dtype).contiguous()

    i32, i64 = torch.int32, torch.int64
    seen = [ref.pack_bits(ref.ancestors(t.parent, t.num_nodes)) for t in trees]
    conv = [ref.conv_ancestors(t.parent, t.num_nodes, conv_width) for t in trees]
    return TreeBuffers(
        tokens=stack([t.tokens for t in trees], i64),
        positions=stack([t.depth + n for t, n in zip(trees, seq_lens, strict=True)], i64),
        parent=stack([t.parent for t in trees], i32),
        depth=stack([t.depth for t in trees], i32),
        rank=stack([t.rank for t in trees], i32),
        next_token=stack([t.next_token for t in trees], i64),
        next_sibling=stack([t.next_sibling for t in trees], i64),
        ancestors=stack(seen, i64),
        conv_ancestors=stack(conv, i32),
        num_nodes=torch.tensor([t.num_nodes for t in trees], dtype=i32),
    )


def poison(*tensors: torch.Tensor) -> None:
    """Fill outputs with values no kernel writes, so that a cell left out is seen."""
    for tensor in tensors:
        tensor.fill_(-77)
