"""The algorithm object SGLang asks: a member of the DFlash family with a verify width of its own."""

from __future__ import annotations

from typing import Any

from sglang.srt.speculative.spec_registry import CustomSpecAlgo

from sglang_ddtree import args, config


class DDTreeSpecAlgo(CustomSpecAlgo):
    """DDTREE as SGLang's dispatch sees it.

    Being of the DFlash family gives it the capture of target layers, the shared pool sizes, the draft graph's
    embeddings and the read-done event before the target's replay; the last obliges a round to read req_to_token
    before that replay only.
    """

    def is_dflash_family(self) -> bool:
        return True

    def supports_target_verify_for_draft(self) -> bool:
        return True

    def supports_grammar_overlap(self) -> bool:
        return True  # each mode builds the grammar mask itself: over the chain or over the tree

    def has_draft_kv(self) -> bool:
        return False  # the drafter writes into the slots of the verify rows

    def carries_draft_hidden_states(self) -> bool:
        return False

    def need_topk(self) -> bool:
        return False

    def create_future_map(
        self, device: Any, req_to_token_pool: Any, needs_cpu_seq_lens: bool = True, needs_confidence_relay: bool = False
    ) -> Any:
        """As the built-in algorithms do; CustomSpecAlgo of 0.5.17 lacks it."""
        from sglang.srt.managers.overlap_utils import FutureMap

        return FutureMap(device, self, req_to_token_pool, needs_cpu_seq_lens, needs_confidence_relay)

    def get_num_tokens_per_req_for_target_verify(self, num_draft_tokens: int, is_draft_worker: bool) -> int:
        from sglang.srt.runtime_context import get_server_args

        if is_draft_worker:
            resolved = config.of(get_server_args())
            if resolved is not None:
                return resolved.block_size  # the drafter always sees its whole block, whatever the tree's width
        return num_draft_tokens

    def handle_server_args(self, server_args: Any) -> None:
        args.resolve(server_args)


def worker_class(_server_args: Any) -> type:
    """Factory for SGLang's registry; imported late, since the worker pulls in the model executor."""
    from sglang_ddtree.worker import DDTreeWorker

    return DDTreeWorker
