"""The draft worker: SGLang's DFLASH in mode linear, trees scored beside it in shadow-linear, trees verified in
mode tree.

One tree round, nothing of which the host reads back before it enqueues the next one:

    slots and block -> embeddings -> draft graph [block, head over all depths, top-k, tree] -> mask -> load graph inputs
    -> target graph over N rows -> one token a row -> accept -> recurrent states -> publish lengths -> keys and values
    -> the drafter's keys and values of the accepted path
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Iterator
from typing import Any

import torch
from sglang.srt.distributed import get_tp_group
from sglang.srt.managers.scheduler import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.runtime_context import get_context, get_exec
from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_utils import commit_mamba_states_after_verify

from sglang_ddtree import config, info, metrics, verify
from sglang_ddtree.head import DraftHead, HeadUnsupportedError, build_head
from sglang_ddtree.kernels.accept import accept_tree
from sglang_ddtree.kernels.buffers import AcceptBuffers, TreeBuffers, TreeCounters
from sglang_ddtree.kernels.build import build_tree
from sglang_ddtree.kernels.mask import write_tree_mask
from sglang_ddtree.kernels.shadow import ShadowRing, shadow_step
from sglang_ddtree.kernels.slots import prepare_round
from sglang_ddtree.tags import RequestTags

logger = logging.getLogger(__name__)


class DDTreeWorker(DFlashWorkerV2):
    """Draft worker of algorithm DDTREE; `self.ddtree` holds the resolved settings."""

    def __init__(self, server_args: Any, gpu_id: int, ps: Any, nccl_port: int, target_worker: Any) -> None:
        resolved = config.of(server_args)
        if resolved is None:
            raise RuntimeError(
                "DDTREE's settings are missing from ServerArgs: the plugin did not run where they were resolved"
            )
        self.ddtree = resolved
        super().__init__(draft_args(server_args, resolved), gpu_id, ps, nccl_port, target_worker)
        self.head: DraftHead | None = None
        self.trees: TreeBuffers | None = None
        self.reporter: metrics.Reporter | None = None
        self._mask: torch.Tensor | None = None
        self._round = 0

    # -- start ---------------------------------------------------------------------------------------------------------

    def init_attention_backends(self) -> None:
        with draft_widths(self.ddtree):
            super().init_attention_backends()

    def init_cuda_graphs(self) -> None:
        if self.ddtree.config.mode != "linear":
            self._allocate()
        if self.ddtree.tree:
            self.draft_model_runner.capture_tail_hooks.append(self._draft_tail)
        with draft_widths(self.ddtree):
            super().init_cuda_graphs()

    def _allocate(self) -> None:
        """Everything a round writes, once, for every request the scheduler may run."""
        settings, device = self.ddtree, self.device
        graph_batches = get_exec().graph.cuda_graph_config.decode.bs or [1]
        capacity = max(int(self.model_runner.req_to_token_pool.size), *graph_batches)
        self.head = build_head(
            self._target_worker.model_runner.model,
            block_size=settings.block_size,
            children=settings.config.children,
            capacity=capacity,
            tp_group=get_tp_group(),
        )
        self.trees = TreeBuffers.allocate(capacity, settings.config.budget + 1, device)
        self.tags = RequestTags(device)
        if settings.tree:
            # Two sets: a round's results are copied to the host while the next round runs.
            self.accepts = [AcceptBuffers.allocate(capacity, settings.width, device) for _ in range(2)]
            self.counters = TreeCounters.allocate(settings.width, device)
            self.blocks = [
                torch.zeros((capacity, settings.block_size), dtype=torch.int64, device=device) for _ in range(2)
            ]
            self.slots = torch.zeros((capacity, settings.slots), dtype=torch.int64, device=device)
            source = (self.counters.total, self.counters.offered, self.counters.accepted)
            summarise: Any = metrics.tree_summary
        else:
            self.ring = ShadowRing.allocate(
                int(self.model_runner.req_to_token_pool.req_to_token.shape[0]),
                settings.block_size - 1,
                settings.config.budget + 1,
                device,
            )
            source, summarise = (self.ring.total, self.ring.histogram), metrics.shadow_summary
        sinks: list[Any] = [lambda summary: logger.info("DDTREE %s: %s", settings.config.mode, summary)]
        if self.server_args.enable_metrics and self.ps.tp_rank == 0:
            sinks.append(metrics.Gauges({"model_name": self.server_args.served_model_name or ""}).set)
        self.reporter = metrics.Reporter(source, summarise, settings.config.log_interval, sinks)

    def _maybe_build_draft_sampler(self) -> Any:
        """What DFLASH's chain reads its tokens from. Watching trees, the head serves both; verifying them, it has
        its own tail.
        """
        if self.ddtree.config.mode == "linear":
            return super()._maybe_build_draft_sampler()
        return None if self.ddtree.tree else self.head

    def _draft_tail(self, _runner: Any, out: Any, forward_batch: Any, _num_tokens: int) -> None:
        """Captured behind the draft's last layer: head and tree, from the graph's own static inputs."""
        self._head_and_tree(out.hidden_states, forward_batch.input_ids, forward_batch.positions)

    def _head_and_tree(self, hidden: torch.Tensor, block_ids: torch.Tensor, positions: torch.Tensor) -> None:
        block = self.ddtree.block_size
        self.head(hidden)
        bonus, lengths = block_ids.view(-1, block)[:, 0].contiguous(), positions.view(-1, block)[:, 0].contiguous()
        batch = bonus.shape[0]
        build_tree(
            self.head.logp[:batch],
            self.head.ids[:batch],
            bonus,
            lengths,
            self.trees,
            keep_spine=self.ddtree.config.keep_spine,
        )

    # -- rounds --------------------------------------------------------------------------------------------------------

    def _make_next_draft_input_prefill(self, *, bonus_tokens: torch.Tensor, seq_lens: torch.Tensor) -> Any:
        state = super()._make_next_draft_input_prefill(bonus_tokens=bonus_tokens, seq_lens=seq_lens)
        return info.draft_input(state) if self.ddtree.tree else state

    def _make_next_draft_input_decode(self, *, bonus_tokens: torch.Tensor, new_seq_lens: torch.Tensor) -> Any:
        state = super()._make_next_draft_input_decode(bonus_tokens=bonus_tokens, new_seq_lens=new_seq_lens)
        return info.draft_input(state) if self.ddtree.tree else state

    def forward_batch_generation(self, batch: Any, on_publish: Any = None, grammar_barrier: Any = None) -> Any:
        decode = not (batch.forward_mode.is_extend() or batch.is_extend_in_batch or batch.forward_mode.is_idle())
        if not decode or self.ddtree.config.mode == "linear" or batch.spec_info is None:
            return super().forward_batch_generation(batch, on_publish, grammar_barrier)
        if not self.ddtree.tree:
            return self._watched_round(batch, on_publish, grammar_barrier)
        with torch.inference_mode():
            return self._tree_round(batch, on_publish, grammar_barrier)

    def _watched_round(self, batch: Any, on_publish: Any, grammar_barrier: Any) -> Any:
        """DFLASH's own round; then the tree its drafter would have given, scored by what is emitted now and later."""
        lengths, bonus, slots = batch.seq_lens, batch.spec_info.bonus_tokens, batch.req_pool_indices
        result = super().forward_batch_generation(batch, on_publish, grammar_barrier)
        rows = len(lengths)
        if result.can_run_cuda_graph and self.head is self._draft_sampler:
            build_tree(
                self.head.logp[:rows],
                self.head.ids[:rows],
                bonus,
                lengths,
                self.trees,
                keep_spine=self.ddtree.config.keep_spine,
            )
            shadow_step(
                self.ring,
                self.trees.rows(rows),
                slots,
                self.tags.of(batch.reqs).generations,
                lengths,
                result.next_token_ids.view(rows, -1),
                result.accept_lens,
            )
        self.reporter.round_done()
        return result

    def _tree_round(self, batch: Any, on_publish: Any, grammar_barrier: Any) -> GenerationBatchResult:
        rows = len(batch.seq_lens)
        # The lengths were published by the last round, possibly on another stream.
        batch.seq_lens.record_stream(torch.get_device_module(self.device).current_stream())
        lengths = batch.seq_lens
        tags = self.tags.of(batch.reqs)
        slots = self._draft(batch, rows)
        trees = self.trees.rows(rows)
        if tags.alone is not None:
            trees.num_nodes.masked_fill_(tags.alone, 1)
        grammar = verify.grammar_tree(trees) if batch.has_grammar else None
        output, replayed = self._verify(batch, trees, slots)
        logits = output.next_token_logits
        verify.adjust_logits(logits, batch.sampling_info, self.ddtree.rows)
        if grammar is not None:
            verify.apply_grammar(batch, grammar, logits, grammar_barrier)
        target = verify.target_tokens(logits, trees.positions, batch.sampling_info, batch.reqs, tags, get_tp_group())
        accept = self.accepts[self._round % 2].rows(rows)
        self._round += 1
        accept_tree(target, trees, slots, lengths, accept, self.counters)
        commit_mamba_states_after_verify(
            self.target_worker, batch, accept.commit_lens, accept.accept_index, self.ddtree.rows
        )
        if on_publish is not None:
            on_publish(accept.new_seq_lens)
        self._commit(accept, slots, output.hidden_states, rows)
        output.hidden_states = None  # large, and the scheduler would copy it to the host
        self.reporter.round_done()
        return GenerationBatchResult(
            logits_output=output,
            next_token_ids=accept.out_tokens.reshape(-1),
            accept_lens=accept.commit_lens,
            can_run_cuda_graph=replayed,
            speculative_num_draft_tokens=self.ddtree.width,
            new_seq_lens=accept.new_seq_lens,
            next_draft_input=self._make_next_draft_input_decode(
                bonus_tokens=accept.bonus, new_seq_lens=accept.new_seq_lens
            ),
        )

    def _draft(self, batch: Any, rows: int) -> torch.Tensor:
        """Run the drafter over [bonus, mask, ..] and leave the trees in self.trees; returns the slots [bs, M]."""
        block = self.ddtree.block_size
        ids, positions, slots = self.blocks[0][:rows], self.blocks[1][:rows], self.slots[:rows]
        prepare_round(
            batch.spec_info.bonus_tokens,
            batch.seq_lens,
            batch.req_pool_indices,
            self.model_runner.req_to_token_pool.req_to_token,
            int(self._mask_token_id),
            ids,
            positions,
            slots,
        )
        embedding = self.target_worker.model_runner.model.get_input_embeddings()(ids)
        host_lengths, host_sum = host_bound(batch, block)
        forward_batch = ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY,
            batch_size=rows,
            input_ids=ids.flatten(),
            req_pool_indices=batch.req_pool_indices,
            seq_lens=batch.seq_lens,
            out_cache_loc=slots[:, :block].reshape(-1),
            seq_lens_sum=host_sum,
            seq_lens_cpu=host_lengths,
            positions=positions.reshape(-1),
            input_embeds=embedding.view(-1, embedding.shape[-1]),
            spec_algorithm=SpeculativeAlgorithm.DFLASH,
            spec_info=self._draft_block_spec_info,
            capture_hidden_mode=CaptureHiddenMode.NULL,
        )
        drafted = self.draft_model_runner.forward(forward_batch)
        if not drafted.can_run_graph:
            self._head_and_tree(drafted.logits_output.hidden_states, ids, positions)
        return slots

    def _verify(self, batch: Any, trees: TreeBuffers, slots: torch.Tensor) -> tuple[Any, bool]:
        """The target over all rows of all trees: (logits and hidden states, whether a graph ran)."""
        tree_input = info.verify_input(
            self.ddtree,
            tokens=trees.tokens.reshape(-1),
            positions=trees.positions.reshape(-1),
            mask=None,
            next_token=trees.next_token,
            next_sibling=trees.next_sibling,
        )
        batch.out_cache_loc = slots[:, : self.ddtree.rows].reshape(-1)
        kept = batch.seq_lens_cpu, batch.seq_lens_sum
        batch.seq_lens_cpu, batch.seq_lens_sum = host_bound(batch, self.ddtree.rows)
        forward_batch, replay = tree_input.begin(batch, self.target_worker)
        mask = self._mask_buffer(trees.tokens.shape[0], replay)
        write_tree_mask(trees, batch.seq_lens, mask)
        tree_input.load(forward_batch, replay, self.target_worker, mask)
        batch.seq_lens_cpu, batch.seq_lens_sum = kept
        ran = self.target_worker.forward_batch_generation(
            batch=None, forward_batch=forward_batch, is_verify=True, skip_attn_backend_init=True
        )
        return ran.logits_output, ran.can_run_cuda_graph

    def _commit(self, accept: AcceptBuffers, slots: torch.Tensor, hidden: torch.Tensor, rows: int) -> None:
        """Keys and values of the accepted path to its first slots, in the target's pool by bytes, in the drafter's
        by value.
        """
        pool = self.model_runner.token_to_kv_pool_allocator.get_kvcache()
        pool.move_kv_cache(accept.tgt_slots.view(-1), accept.src_slots.view(-1))
        path = accept.accept_index.view(-1).clamp(min=0).to(torch.int64)
        path_slots = slots[:, : self.ddtree.width].contiguous()
        self._append_target_hidden_to_draft_kv_by_loc(
            target_hidden=hidden.index_select(0, path),
            cache_loc=path_slots.view(-1),
            cache_loc_2d=path_slots,
            positions=self.blocks[1][:rows].reshape(-1),
            commit_lens=accept.commit_lens,
        )

    def _mask_buffer(self, requests: int, replay: bool) -> torch.Tensor:
        """The mask the target's attention reads: its own under replay, else one large enough for any lengths."""
        if replay:
            return self.model_runner.attn_backend.verify_mask.buffer
        rows = self.ddtree.rows
        cells = requests * rows * (int(self.model_runner.req_to_token_pool.req_to_token.shape[1]) + rows)
        if self._mask is None or self._mask.numel() < cells:
            self._mask = torch.zeros(cells, dtype=torch.uint8, device=self.device)
        return self._mask

    def ddtree_counters(self) -> dict[str, Any]:
        """The counters of this moment, for /server_info."""
        return {} if self.reporter is None else {"counters": self.reporter.now()}


def host_bound(batch: Any, rows: int) -> tuple[torch.Tensor | None, int | None]:
    """Upper bounds of the lengths after a pass of `rows` rows, as the host knows them, for backends that plan
    on the host.
    """
    if batch.seq_lens_cpu is not None:
        lengths = (batch.seq_lens_cpu + rows).to(torch.int32)
        return lengths, int(lengths.sum())
    return batch.spec_info.reserved_seq_lens_cpu, batch.spec_info.reserved_seq_lens_sum


def draft_args(server_args: Any, resolved: config.Resolved) -> Any:
    """The drafter's arguments: one chain of B rows. With the tree's, its attention would enter tree code
    without a mask.
    """
    if not resolved.tree:
        return server_args
    draft = copy.deepcopy(server_args)
    draft.override("ddtree.draft", speculative_num_draft_tokens=resolved.block_size, speculative_eagle_topk=1)
    draft.__dict__.pop("max_speculative_num_draft_tokens", None)
    return draft


@contextlib.contextmanager
def draft_widths(resolved: config.Resolved) -> Iterator[None]:
    """The published settings, with the drafter's widths in place of the tree's, while the drafter sets itself up."""
    if not resolved.tree:
        yield
        return
    with get_context().preserve_config():
        get_context().override(
            "ddtree.draft", speculative_num_draft_tokens=resolved.block_size, speculative_eagle_topk=1
        )
        yield


__all__ = ["DDTreeWorker", "HeadUnsupportedError"]
