"""The buffers the kernels of a round write, allocated once and owned by the caller."""

from dataclasses import dataclass, fields
from typing import Any

import torch


def require(condition: bool, message: str) -> None:
    """Raise ValueError(message) unless the condition holds."""
    if not condition:
        raise ValueError(message)


def check(name: str, tensor: torch.Tensor, dtype: torch.dtype, *shape: int) -> None:
    """The tensor is contiguous and has this dtype and shape (-1 matches any size)."""
    fits = tensor.dim() == len(shape) and all(w in (-1, s) for w, s in zip(shape, tensor.shape, strict=True))
    if tensor.dtype != dtype or not fits or not tensor.is_contiguous():
        raise ValueError(
            f"{name}: expected contiguous {dtype} {list(shape)}, "
            f"got {tensor.dtype} {list(tensor.shape)} with strides {list(tensor.stride())}"
        )


@dataclass(frozen=True)
class _Rows:
    """Tensors whose first dimension is the batch."""

    def rows(self, bs: int) -> Any:
        """Views of the first ``bs`` requests."""
        return type(self)(**{f.name: getattr(self, f.name)[:bs] for f in fields(self)})


@dataclass(frozen=True)
class TreeBuffers(_Rows):
    """The draft trees of a batch in N rows each (see :mod:`sglang_ddtree.reference.tree`).

    ``next_token`` and ``next_sibling`` are SGLang's ``retrieve_next_token`` / ``retrieve_next_sibling``;
    ``positions`` its ``positions``. A parent's row is smaller than its child's, siblings ascend.
    Unused rows: token 0, position of the root, parent 0, depth 0, rank 0, links -1, self-visible.
    """

    tokens: torch.Tensor  # int64 [B, N]
    positions: torch.Tensor  # int64 [B, N], sequence length before the round + depth
    parent: torch.Tensor  # int32 [B, N]
    depth: torch.Tensor  # int32 [B, N]
    rank: torch.Tensor  # int32 [B, N], 0 = the parent's likeliest child
    next_token: torch.Tensor  # int64 [B, N], first child or -1
    next_sibling: torch.Tensor  # int64 [B, N], next sibling or -1
    ancestors: torch.Tensor  # int64 [B, N, ceil(N / 64)], bit j % 64 of word j // 64: row j is seen
    conv_ancestors: torch.Tensor  # int32 [B, N, conv_width - 1], row 1, 2, .. steps up; -1, -2 .. window
    num_nodes: torch.Tensor  # int32 [B], used rows, the root included

    @property
    def width(self) -> int:
        """N, rows of a tree."""
        return self.tokens.shape[1]

    @classmethod
    def allocate(cls, batch: int, width: int, device: torch.device | str, conv_width: int = 4) -> "TreeBuffers":
        """Buffers for ``batch`` trees of ``width`` = budget + 1 rows, holding lone roots."""

        def new(dtype: torch.dtype, *shape: int, fill: int = 0) -> torch.Tensor:
            return torch.full((batch, *shape), fill, dtype=dtype, device=device)

        i32, i64 = torch.int32, torch.int64
        buffers = cls(
            tokens=new(i64, width),
            positions=new(i64, width),
            parent=new(i32, width),
            depth=new(i32, width),
            rank=new(i32, width),
            next_token=new(i64, width, fill=-1),
            next_sibling=new(i64, width, fill=-1),
            ancestors=new(i64, width, (width + 63) // 64),
            conv_ancestors=new(i32, width, conv_width - 1),
            num_nodes=new(i32, fill=1),
        )
        for row in range(width):
            bit = 1 << (row % 64)
            buffers.ancestors[:, row, row // 64] = bit if bit < 1 << 63 else bit - (1 << 64)
            above = torch.arange(0, 1 - conv_width, -1, device=device)
            buffers.conv_ancestors[:, row] = (above - 1 if row == 0 else above).to(i32)
        return buffers


@dataclass(frozen=True)
class AcceptBuffers(_Rows):
    """What one verify yields. SGLang copies results to the host while the next round runs, so a caller
    rotates at least two sets."""

    accept_index: torch.Tensor  # int32 [B, W], global row (request * N + row) of the path, then -1
    commit_lens: torch.Tensor  # int32 [B], rows to commit = accepted nodes + 1 = tokens emitted
    bonus: torch.Tensor  # int64 [B], the last emitted token, root of the next round
    out_tokens: torch.Tensor  # int64 [B, W], emitted tokens, then 0
    new_seq_lens: torch.Tensor  # int64 [B], sequence length before the round + commit_lens
    last_row: torch.Tensor  # int32 [B], row of the last accepted node within its tree
    src_slots: torch.Tensor  # int64 [B, W], KV slots to read, then 0
    tgt_slots: torch.Tensor  # int64 [B, W], KV slots to write, then 0

    @property
    def width(self) -> int:
        """W, the longest root path."""
        return self.accept_index.shape[1]

    @classmethod
    def allocate(cls, batch: int, width: int, device: torch.device | str) -> "AcceptBuffers":
        """A set for ``batch`` requests and root paths of up to ``width`` = block size rows."""

        def new(dtype: torch.dtype, *shape: int) -> torch.Tensor:
            return torch.zeros((batch, *shape), dtype=dtype, device=device)

        i32, i64 = torch.int32, torch.int64
        return cls(
            accept_index=new(i32, width),
            commit_lens=new(i32),
            bonus=new(i64),
            out_tokens=new(i64, width),
            new_seq_lens=new(i64),
            last_row=new(i32),
            src_slots=new(i64, width),
            tgt_slots=new(i64, width),
        )


@dataclass(frozen=True)
class TreeCounters:
    """Counts since the start, summed over requests and rounds, on the device.

    ``total`` int64 [4]: verified trees, nodes offered (roots excluded), nodes accepted, accepted nodes
    off the top-1 spine. ``offered`` and ``accepted`` int64 [W]: at index d, trees with a node at depth
    d below the accepted node of depth d - 1, and those of them that had it accepted; index 0 unused.
    """

    total: torch.Tensor
    offered: torch.Tensor
    accepted: torch.Tensor

    @classmethod
    def allocate(cls, width: int, device: torch.device | str) -> "TreeCounters":
        """Counters for root paths of up to ``width`` rows."""
        return cls(*(torch.zeros(n, dtype=torch.int64, device=device) for n in (4, width, width)))
