"""From the target's logits at each row to one token a row: adjustments, then argmax or one seeded draw."""

from __future__ import annotations

from typing import Any

import torch

from sglang_ddtree.kernels.sample import SamplingParams, sample_targets
from sglang_ddtree.tags import Tags


def adjust_logits(logits: torch.Tensor, info: Any, rows: int) -> None:
    """What plain decoding does to logits before sampling, in place; logits [bs * rows, V].

    Penalties concern the root row alone: whoever has them gets a tree of its root alone (tags.needs_root_only).
    """
    if info.has_custom_logit_processor:
        from sglang.srt.layers.sampler import apply_custom_logit_processor

        apply_custom_logit_processor(logits, info, num_tokens_in_batch=rows)
    trees = logits.view(-1, rows, logits.shape[-1])
    if info.acc_additive_penalties is not None:
        trees[:, 0].add_(info.acc_additive_penalties)
    if info.acc_scaling_penalties is not None:
        root, scale = trees[:, 0], info.acc_scaling_penalties
        root.copy_(torch.where(root < 0, root * scale, root / scale))
    if info.logit_bias is not None:
        trees.add_(info.logit_bias[:, None, :])


def target_tokens(
    logits: torch.Tensor, positions: torch.Tensor, info: Any, reqs: list[Any], tags: Tags, tp_group: Any = None
) -> torch.Tensor:
    """The target's token of each row, int64 [bs, rows]; positions int64 [bs, rows]."""
    if info is None or info.is_all_greedy:
        return torch.argmax(logits, dim=-1).view(positions.shape)
    out = torch.empty(positions.numel(), dtype=torch.int64, device=logits.device)
    top_k = max(int(request.sampling_params.top_k) for request in reqs)
    params = SamplingParams(
        temperatures=info.temperatures,
        top_ks=info.top_ks,
        top_ps=info.top_ps,
        min_ps=info.min_ps,
        seeds=tags.seeds if info.sampling_seed is None else info.sampling_seed,
        max_top_k=top_k if top_k < logits.shape[-1] else None,
        filtered=bool(info.need_top_k_sampling or info.need_top_p_sampling or info.need_min_p_sampling),
    )
    sample_targets(logits, positions.reshape(-1), params, out)
    if tp_group is not None and tp_group.world_size > 1:
        tp_group.broadcast(out, src=0)  # ranks may round differently; one tree walk for all
    return out.view(positions.shape)


def grammar_tree(trees: Any) -> Any:
    """The verify tree on its way to the host, for the grammar's state machine; to be started before the target runs."""
    from sglang.srt.speculative.spec_utils import GrammarTree

    return GrammarTree.from_device(trees.next_token, trees.next_sibling, trees.tokens)


def apply_grammar(batch: Any, tree: Any, logits: torch.Tensor, barrier: Any) -> None:
    """Mask each row by the grammar state its path leads to, in place."""
    from sglang.srt.speculative.spec_utils import build_grammar_vocab_mask

    mask = build_grammar_vocab_mask(
        reqs=batch.reqs, tree=tree, sampling_info=batch.sampling_info, device=logits.device, barrier=barrier
    )
    if mask is not None:
        mask.apply(logits)
