"""What the engine's tests share."""

from __future__ import annotations

import torch
from sglang_ddtree.kernels.checks import buffers_of
from sglang_ddtree.reference.examples import leading_targets, random_ids, random_logp, random_tree

__all__ = ["buffers_of", "leading_targets", "poison", "random_ids", "random_logp", "random_tree"]


def poison(*tensors: torch.Tensor) -> None:
    """Fill outputs with values no kernel writes, so that a cell left out is seen."""
    for tensor in tensors:
        tensor.fill_(-77)
