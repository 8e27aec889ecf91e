"""Tensor parallelism: where the ranks of a server could part, and the two places where they are kept together.

All ranks must walk the same tree, or their keys, states and lengths part in silence. They draft the same one
because each of them merges the same bytes: K candidates of every rank's shard of the vocabulary, gathered. They
verify it on the same bytes, too, since the target's logits are gathered from their owners; so argmax agrees, and
draws are broadcast from rank 0 (verify.target_tokens). Left open by those sources, and settled here:

* a shard can be padding alone (a vocabulary of 129, padded to 192, over four ranks): it offers no candidate;
* at temperature 0, where a processor of the user's own or a grammar touched the logits on each rank by itself, or
  SYNC_TOKEN_IDS_ACROSS_TP asks for it, rank 0's tokens count: where SGLang's sampler lets its ranks agree.

Hooks, not edits: the shipped records vouch for the sources they hook, on one GPU, where both pass through.
"""

from __future__ import annotations

from typing import Any

import torch


def around_draft_topk(
    original: Any, logits: torch.Tensor, ids: torch.Tensor, values: torch.Tensor, lse: torch.Tensor, **options: Any
) -> None:
    """kernels.topk.draft_topk, which asks for one valid column at least: none is k entries of -inf, which no tree
    takes.
    """
    if logits.shape[1] > 0:
        original(logits, ids, values, lse, **options)
        return
    ids.zero_()
    values.fill_(float("-inf"))
    lse.fill_(float("-inf"))


def around_target_tokens(
    original: Any,
    logits: torch.Tensor,
    positions: torch.Tensor,
    info: Any,
    reqs: list[Any],
    tags: Any,
    tp_group: Any = None,
) -> torch.Tensor:
    """verify.target_tokens, with rank 0's word where each rank adjusted the logits by itself."""
    target: torch.Tensor = original(logits, positions, info, reqs, tags, tp_group)
    if tp_group is not None and tp_group.world_size > 1 and (info is None or info.is_all_greedy) and _adjusted(reqs):
        tp_group.broadcast(target, src=0)
    return target


def _adjusted(reqs: list[Any]) -> bool:
    """Whether argmax over a batch's logits may differ between ranks; the same answer on all of them."""
    from sglang.srt.layers import sampler

    return bool(sampler.SYNC_TOKEN_IDS_ACROSS_TP) or any(
        getattr(request, name, None) is not None for request in reqs for name in ("grammar", "custom_logit_processor")
    )


def table() -> list[tuple[str, Any, str]]:
    """(target, hook, type) of every hook."""
    return [
        ("sglang_ddtree.head.draft_topk", around_draft_topk, "around"),
        ("sglang_ddtree.verify.target_tokens", around_target_tokens, "around"),
    ]
