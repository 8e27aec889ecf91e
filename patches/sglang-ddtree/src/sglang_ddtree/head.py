"""The drafter's head: every depth in one product with the target's lm_head, then the likeliest tokens of each depth.

Inside the draft graph when there is one. A product per depth would read the head's weights D times: 15 x 2.5 GB
a round on a 27B target, which alone made trees slower than chains once.
"""

from __future__ import annotations

from typing import Any

import torch

from sglang_ddtree.kernels.topk import TopKWorkspace, draft_topk, merge_topk


class HeadUnsupportedError(RuntimeError):
    """The target's lm_head cannot draft; the message says why."""


class DraftHead:
    """Hidden states of a draft block [bs * B, H] -> ids int64 [bs, D, K] and log-probabilities float32 [bs, D, K],
    descending.

    Rows 1..B-1 of each block are the drafted depths (row 0 is the anchor). Only the first `num_org` rows of the
    weight are tokens; the padding of a vocabulary shard takes part in neither the choice nor the normalisation.
    Of two equal logits the lower id comes first, as in SGLang's argmax. With tensor parallelism each rank
    scores its shard and all ranks merge the same K candidates.
    """

    def __init__(
        self,
        *,
        weight: torch.Tensor,
        num_org: int,
        org_vocab_start: int,
        block_size: int,
        children: int,
        capacity: int,
        tp_group: Any = None,
    ) -> None:
        self.weight = weight[:num_org]
        self.start = org_vocab_start
        self.block_size = block_size
        self.depths = block_size - 1
        self.tp_group = tp_group
        device, rows = weight.device, capacity * self.depths
        self.ids = torch.zeros((capacity, self.depths, children), dtype=torch.int64, device=device)
        self.logp = torch.zeros((capacity, self.depths, children), dtype=torch.float32, device=device)
        self.lse = torch.zeros(rows, dtype=torch.float32, device=device)
        self.workspace = TopKWorkspace.allocate(rows, num_org, children, device)
        self.out = torch.zeros(rows, dtype=torch.int64, device=device)  # top-1, read by DFLASH's own chain

    def __call__(self, hidden_states: torch.Tensor, _input_ids: torch.Tensor | None = None) -> None:
        """Score a block; the second argument is what SGLang's tail hook passes."""
        batch = hidden_states.shape[0] // self.block_size
        rows = hidden_states.view(batch, self.block_size, -1)[:, 1:, :].reshape(batch * self.depths, -1)
        logits = torch.matmul(rows.to(self.weight.dtype), self.weight.T)
        ids, logp = self.ids[:batch].flatten(0, 1), self.logp[:batch].flatten(0, 1)
        if self.tp_group is None:
            draft_topk(logits, ids, logp, self.lse[: len(rows)], vocab_start=self.start, workspace=self.workspace)
        else:
            self._merge(logits, ids, logp)
        self.out[: len(rows)].copy_(ids[:, 0])

    def _merge(self, logits: torch.Tensor, ids: torch.Tensor, logp: torch.Tensor) -> None:
        """K candidates, K logits and one log-sum-exp of each rank and row are exchanged: no logits travel."""
        local = (torch.empty_like(ids), torch.empty_like(logp), torch.empty_like(self.lse[: len(ids)]))
        draft_topk(logits, *local, vocab_start=self.start, normalise=False, workspace=self.workspace)
        ranks = self.tp_group.world_size
        gathered = [part.new_empty((ranks * part.shape[0], *part.shape[1:])) for part in local]
        for target, part in zip(gathered, local, strict=True):
            self.tp_group.all_gather_into_tensor(target, part)
        merge_topk(*(g.view(ranks, *part.shape) for g, part in zip(gathered, local, strict=True)), ids, logp)


def build_head(target_model: Any, *, block_size: int, children: int, capacity: int, tp_group: Any) -> DraftHead:
    """The head over a loaded target, or HeadUnsupportedError: same conditions as SGLang's graph-folded greedy head."""
    lm_head = getattr(target_model, "lm_head", None)
    if lm_head is None or not hasattr(lm_head, "weight"):
        raise HeadUnsupportedError("the target model has no lm_head with a weight")
    if not torch.is_floating_point(lm_head.weight) or lm_head.weight.element_size() < 2:
        raise HeadUnsupportedError(f"the target's lm_head is quantised ({lm_head.weight.dtype})")
    sharded = tp_group is not None and tp_group.world_size > 1
    shard = getattr(lm_head, "shard_indices", None)
    if shard is None:
        if sharded:
            raise HeadUnsupportedError("the target's lm_head does not say which token ids its shard holds")
        num_org, start = int(lm_head.weight.shape[0]), 0
    else:
        if int(shard.num_added_elements) != 0:
            raise HeadUnsupportedError("the target's vocabulary has added tokens beyond the drafter's")
        num_org, start = int(shard.num_org_elements), int(shard.org_vocab_start_index)
    return DraftHead(
        weight=lm_head.weight,
        num_org=num_org,
        org_vocab_start=start,
        block_size=block_size,
        children=children,
        capacity=capacity,
        tp_group=tp_group if sharded else None,
    )
