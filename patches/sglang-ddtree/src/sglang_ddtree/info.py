"""What travels between scheduler, attention backends and worker: the verify input of a tree and the draft state of
a request.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.speculative.dflash_info import DFlashVerifyInput
from sglang.srt.speculative.dflash_info_v2 import DFlashDraftInputV2
from sglang.srt.speculative.eagle_info import EagleVerifyInput

from sglang_ddtree.config import Resolved


@dataclass
class DDTreeVerifyInput(EagleVerifyInput):
    """An irregular tree of N rows. It is an EagleVerifyInput because the hybrid backends copy links for that
    class only.
    """

    path_length: int = 0  # W, most rows on a path from the root

    @property
    def max_tree_depth(self) -> int:
        return self.path_length

    @property
    def tree_topk(self) -> int:
        return -1  # no fixed branching

    def begin(self, batch: Any, target_worker: Any) -> tuple[ForwardBatch, bool]:
        """The target's forward batch and whether a captured graph can run it.

        The caller has put the rows' slots into batch.out_cache_loc.
        """
        from sglang.srt.speculative.spec_utils import prepare_mamba_track_for_verify

        batch.input_ids = self.draft_token
        batch.spec_info = self
        batch.forward_mode = ForwardMode.TARGET_VERIFY
        prepare_mamba_track_for_verify(batch)
        runner = target_worker.model_runner
        forward_batch = ForwardBatch.init_new(
            batch, runner, capture_hidden_mode=CaptureHiddenMode.FULL, return_hidden_states_before_norm=False
        )
        graphs = runner.decode_cuda_graph_runner
        return forward_batch, bool(graphs and graphs.can_run_graph(forward_batch))

    def load(self, forward_batch: ForwardBatch, replay: bool, target_worker: Any, mask: torch.Tensor) -> None:
        """Fill the graph's static inputs, or the eager metadata: the last reader of req_to_token in a round.

        Links, positions and mask are final here, replay reads the copies made now. Under replay the mask
        already lies in the backend's buffer, and an empty view keeps the backend from copying that buffer onto
        itself.
        """
        runner = target_worker.model_runner
        self.custom_mask = mask[:0] if replay else mask
        if replay:
            runner.decode_cuda_graph_runner.load_batch(forward_batch)
        else:
            runner.attn_backend.init_forward_metadata(forward_batch)


def verify_input(
    resolved: Resolved, *, tokens: Any, positions: Any, mask: Any, next_token: Any, next_sibling: Any
) -> DDTreeVerifyInput:
    """tokens and positions int64 [bs * N]; links int64 [bs, N] or None at capture; mask uint8, FULL_MASK layout."""
    return DDTreeVerifyInput(
        draft_token=tokens,
        custom_mask=mask,
        positions=positions,
        retrieve_index=None,
        retrieve_next_token=next_token,
        retrieve_next_sibling=next_sibling,
        retrieve_cum_len=None,
        spec_steps=1,
        topk=max(2, resolved.config.children),
        draft_token_num=resolved.rows,
        capture_hidden_mode=CaptureHiddenMode.FULL,
        seq_lens_sum=None,
        seq_lens_cpu=None,
        path_length=resolved.width,
    )


def dummy_verify_input(resolved: Resolved, mask: torch.Tensor) -> DDTreeVerifyInput:
    """For capture and warm-up: a mask is present, so the captured pass reads one; links come from the backend's
    buffers.
    """
    return verify_input(resolved, tokens=None, positions=None, mask=mask, next_token=None, next_sibling=None)


def dummy_draft_input(width: int) -> DFlashVerifyInput:
    return DFlashVerifyInput(
        draft_token=None,
        positions=None,
        draft_token_num=width,
        custom_mask=None,
        capture_hidden_mode=CaptureHiddenMode.NULL,
    )


@dataclass
class DDTreeDraftInput(DFlashDraftInputV2):
    """A request's draft state in tree mode; differs from DFlash's in how a round is reserved and accounted for."""

    def prepare_for_decode(self, batch: Any) -> None:
        """Before each round, on the scheduler's side: penalties, evictions and KV head room.

        SGLang's DFlash state does not account for emitted tokens, so penalties would never see one; and it
        reserves by the verify width alone, which a tree narrower than the drafter's block would overrun.
        """
        from sglang.srt.mem_cache.allocation import alloc_for_spec_decode
        from sglang.srt.mem_cache.allocation_sizing import get_alloc_reserve_per_decode

        batch.maybe_evict_swa()
        if batch.sampling_info.penalizer_orchestrator.is_required:
            batch.cumulate_penalty_output_tokens()
        reserve = get_alloc_reserve_per_decode()
        committed = [int(request.kv_committed_len) for request in batch.reqs]
        allocated = [int(request.kv.kv_allocated_len) for request in batch.reqs]
        reserved = [max(have, length + reserve) for have, length in zip(allocated, committed, strict=True)]
        for request in batch.reqs:
            request.decode_batch_idx += 1
        have_cpu = torch.tensor(allocated, dtype=torch.int32)
        want_cpu = torch.tensor(reserved, dtype=torch.int32)
        alloc_for_spec_decode(
            batch.tree_cache,
            batch.req_to_token_pool,
            reqs=batch.reqs,
            req_pool_indices=batch.req_pool_indices,
            cur_kv_lens=have_cpu.to(batch.device, non_blocking=True),
            cur_kv_lens_cpu=have_cpu,
            nxt_kv_lens=want_cpu.to(batch.device, non_blocking=True),
            nxt_kv_lens_cpu=want_cpu,
            num_needed_tokens=sum(reserved) - sum(allocated),
            batch=batch,
        )
        # The committed lengths lag one round under overlap; the scheduler overwrites them with what the worker
        # publishes.
        batch.seq_lens_cpu = torch.tensor(committed, dtype=torch.int64)
        batch.seq_lens_sum = sum(committed)
        self.reserved_seq_lens_cpu = want_cpu
        self.reserved_seq_lens_sum = sum(reserved)


def draft_input(base: DFlashDraftInputV2) -> DDTreeDraftInput:
    """The tree's draft state of a state SGLang's own helper made."""
    return DDTreeDraftInput(
        topk_p=base.topk_p,
        topk_index=base.topk_index,
        bonus_tokens=base.bonus_tokens,
        new_seq_lens=base.new_seq_lens,
        hidden_states=base.hidden_states,
    )
