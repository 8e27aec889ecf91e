"""Whether the ranks of a model on several GPUs walked the same trees: a sum over each round's integers, on its device.

A sum costs some small kernels a round and nothing read back, so that it can be kept beside overlap and graphs. What
ranks must share goes in: tokens and parents of the trees, the target's token of each row, the walk, and the slots
that keys and values are moved from and to.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

STEP = 0x9E3779B97F4A7C1  # odd: no two places of a tensor weigh the same


def checksum(*tensors: torch.Tensor) -> torch.Tensor:
    """int64 [], of integer tensors in order, modulo 2^64; never waits for the device."""
    total = torch.zeros((), dtype=torch.int64, device=tensors[0].device)
    for tensor in tensors:
        cells = tensor.reshape(-1).to(torch.int64)
        weights = torch.arange(1, cells.numel() + 1, device=cells.device) * STEP
        total = total * 31 + ((cells + 1) * weights).sum()
    return total


@dataclasses.dataclass
class Watch:
    """The sums of this process's rounds, one after the other. on: whether more are taken; time is measured without."""

    sums: list[torch.Tensor] = dataclasses.field(default_factory=list)
    on: bool = True

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        self.on = False
        try:
            yield
        finally:
            self.on = True


def watch() -> Watch:
    """Take the sum of every round to come of this process; install before the worker is built."""
    from sglang_ddtree import worker

    plain, seen = worker.accept_tree, Watch()

    def watched(
        target: torch.Tensor, trees: Any, slots: torch.Tensor, lengths: torch.Tensor, out: Any, *rest: Any
    ) -> None:
        plain(target, trees, slots, lengths, out, *rest)
        if not seen.on:
            return
        walk = (out.out_tokens, out.commit_lens, out.new_seq_lens, out.src_slots, out.tgt_slots)
        seen.sums.append(checksum(target, trees.num_nodes, trees.tokens, trees.parent, *walk))

    worker.accept_tree = watched
    return seen
