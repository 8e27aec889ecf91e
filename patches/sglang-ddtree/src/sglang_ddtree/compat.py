"""What this plugin relies on in SGLang, as data, and the check that it is still so.

SGLang swallows the exceptions of plugins and of hooks, and a hook on a function whose parameters moved fails in
the middle of a request. So every function that is hooked, overridden or called is listed here with its
parameters, and `register` refuses to add the algorithm when any of them differs: the command line then says
that DDTREE is unknown and the log says why.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from typing import Any

from sglang_ddtree import SGLANG_VERSION


@dataclasses.dataclass(frozen=True)
class Target:
    """A function of SGLang by its path, the parameters it must have, and what it is needed for."""

    path: str
    parameters: tuple[str, ...]
    use: str  # hook, override or call


def _t(path: str, parameters: str, use: str) -> Target:
    return Target(f"sglang.srt.{path}", tuple(parameters.split()), use)


_SPEC = "speculative.spec_info.SpeculativeAlgorithm"
_WORKER = "speculative.dflash_worker_v2.DFlashWorkerV2"
_DRAFT_INPUT = "speculative.dflash_info_v2.DFlashDraftInputV2"
_RUNNER = "model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner"

TARGETS: tuple[Target, ...] = (
    _t("server_args.ServerArgs.add_cli_args", "parser", "hook"),
    _t("server_args.ServerArgs.from_cli_args", "cls args", "hook"),
    _t("server_args.ServerArgs.__post_init__", "self", "hook"),
    _t(f"{_RUNNER}.get_spec_info", "self num_tokens", "hook"),
    _t(
        "speculative.spec_info.create_dummy_verify_input",
        "spec_algorithm server_args custom_mask num_tokens_per_req is_draft_worker",
        "hook",
    ),
    _t("mem_cache.allocation_sizing.get_alloc_len_per_decode", "server_args", "hook"),
    _t("mem_cache.allocation_sizing.get_req_to_token_extra_context_len", "server_args", "hook"),
    _t("mem_cache.kv_cache_configurator.KVCacheConfigurator._handle_max_mamba_cache", "self total_rest_memory", "hook"),
    _t("managers.scheduler.Scheduler.get_internal_state", "self recv_req", "hook"),
    _t(
        "mem_cache.memory_pool.MambaPool.__init__",
        "self size spec_state_size cache_params mamba_layer_ids device enable_memory_saver "
        "speculative_num_draft_tokens speculative_eagle_topk enable_linear_replayssm linear_replayssm_cache_len "
        "envelope_layout enable_linear_replayssm_spec",
        "hook",
    ),
    _t(
        "layers.attention.linear.gdn_backend.GDNAttnBackend.forward_extend",
        "self layer forward_batch mixed_qkv a b kwargs",
        "hook",
    ),
    _t(
        "layers.attention.hybrid_linear_attn_backend.HybridLinearAttnBackend.update_mamba_state_after_mtp_verify",
        "self last_correct_step_indices mamba_track_indices mamba_steps_to_track model req_pool_indices",
        "hook",
    ),
    _t("mem_cache.memory_pool.HybridReqToTokenPool.mamba2_layer_cache", "self layer_id", "call"),
    _t("configs.mamba_utils.mamba2_state_dtype", "config", "call"),
    _t("utils.common.get_cuda_graph_max_batch_size", "server_args max_batch_size", "call"),
    # Not called: its attributes are what a verify over records reads of a layer.
    _t(
        "layers.radix_linear_attention.RadixLinearAttention.__init__",
        "self layer_id num_q_heads num_k_heads num_v_heads head_q_dim head_k_dim head_v_dim conv_weights bias "
        "activation A_log dt_bias",
        "call",
    ),
    _t("distributed.parallel_state.GroupCoordinator.all_gather_into_tensor", "self output input", "call"),
    _t("distributed.parallel_state.GroupCoordinator.broadcast", "self input_ src", "call"),
    _t("arg_groups.speculative_hook._handle_dflash", "server_args", "call"),
    _t(f"{_SPEC}.register", "cls name supports_overlap validate_server_args spec_class", "call"),
    _t(
        f"{_SPEC}.create_future_map",
        "self device req_to_token_pool needs_cpu_seq_lens needs_confidence_relay",
        "override",
    ),
    _t(
        "managers.overlap_utils.FutureMap.__init__",
        "self device spec_algo req_to_token_pool needs_cpu_seq_lens needs_confidence_relay",
        "call",
    ),
    _t(f"{_WORKER}.__init__", "self server_args gpu_id ps nccl_port target_worker", "override"),
    _t(f"{_WORKER}.init_attention_backends", "self", "override"),
    _t(f"{_WORKER}.init_cuda_graphs", "self", "override"),
    _t(f"{_WORKER}._maybe_build_draft_sampler", "self", "override"),
    _t(f"{_WORKER}.forward_batch_generation", "self batch on_publish grammar_barrier", "override"),
    _t(f"{_WORKER}._make_next_draft_input_prefill", "self bonus_tokens seq_lens", "override"),
    _t(f"{_WORKER}._make_next_draft_input_decode", "self bonus_tokens new_seq_lens", "override"),
    _t(
        f"{_WORKER}._append_target_hidden_to_draft_kv_by_loc",
        "self target_hidden cache_loc positions cache_loc_2d commit_lens",
        "call",
    ),
    _t(f"{_WORKER}._ensure_draft_block_buffers", "self bs", "call"),
    _t(f"{_DRAFT_INPUT}.prepare_for_decode", "self batch", "override"),
    _t(
        "speculative.eagle_info.EagleVerifyInput.__init__",
        "self draft_token custom_mask positions retrieve_index retrieve_next_token retrieve_next_sibling "
        "retrieve_cum_len spec_steps topk "
        "draft_token_num capture_hidden_mode seq_lens_sum seq_lens_cpu draft_probs num_tokens_per_req",
        "call",
    ),
    _t("speculative.eagle_utils.eagle_prepare_for_decode", "batch", "call"),
    _t("speculative.spec_utils.prepare_mamba_track_for_verify", "batch", "call"),
    _t(
        "speculative.spec_utils.commit_mamba_states_after_verify",
        "target_worker batch accept_lens accept_index draft_token_num",
        "call",
    ),
    _t("speculative.spec_utils.build_grammar_vocab_mask", "reqs tree sampling_info device barrier", "call"),
    _t(
        "speculative.spec_utils.GrammarTree.from_device",
        "cls retrieve_next_token retrieve_next_sibling draft_token",
        "call",
    ),
    _t("mem_cache.memory_pool.MHATokenToKVPool.move_kv_cache", "self tgt_loc src_loc", "call"),
    _t(
        "mem_cache.memory_pool.MHATokenToKVPool.set_kv_buffer_prefix_valid",
        "self layer loc_2d commit_lens cache_k cache_v k_scale v_scale layer_id_override",
        "call",
    ),
    _t(
        "model_executor.forward_batch_info.ForwardBatch.init_new",
        "cls batch model_runner capture_hidden_mode return_hidden_states_before_norm",
        "call",
    ),
    # Mode auto: a backend and a graph runner for each width, and replays that are timed at the start.
    _t("model_executor.model_runner.ModelRunner._get_attention_backend", "self init_new_workspace", "call"),
    _t("model_executor.model_runner.ModelRunner._decode_cuda_graph_runner_cls", "self", "call"),
    _t(
        f"{_RUNNER}.__init__",
        "self model_runner attn_backend speculative_num_steps speculative_num_draft_tokens",
        "call",
    ),
    _t(f"{_RUNNER}._make_graph_key", "self size stream_idx variant_label", "call"),
    _t(
        "model_executor.runner_backend.full_cuda_graph_backend.FullCudaGraphBackend.replay",
        "self shape_key static_forward_batch kwargs",
        "call",
    ),
    _t(
        "layers.attention.triton_backend.TritonAttnBackend.init_cuda_graph_state",
        "self max_bs max_num_tokens kv_indices_buf cuda_graph_num_kv_splits_buf",
        "call",
    ),
)

# A spec class must answer what the enum answers; SGLang's own check looks at is_* and supports_* only.
ENUM_METHODS = (
    "create_future_map",
    "need_topk",
    "carries_draft_hidden_states",
    "handle_server_args",
    "get_num_tokens_per_req_for_target_verify",
    "has_draft_kv",
    "create_worker",
    "build_disagg_draft_input",
)


def resolve(path: str) -> Any:
    """The object behind a dotted path, without descriptor magic, so that static and class methods keep their
    parameters.
    """
    parts = path.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError as error:
            # Only a missing tail of this very path means 'try a shorter module'; a missing dependency is a real
            # failure.
            if error.name is None or not path.startswith(error.name):
                raise
            continue
        for name in parts[cut:]:
            found = inspect.getattr_static(found, name)
        return found
    raise ModuleNotFoundError(path)


def parameters(found: Any) -> tuple[str, ...]:
    """Parameter names, seen through decorators and wrappers, as the author of the function wrote them."""
    if isinstance(found, (staticmethod, classmethod)):
        found = found.__func__
    return tuple(inspect.signature(inspect.unwrap(found)).parameters)


def check_target(target: Target) -> str | None:
    """None if the target is as expected, else one line saying what differs."""
    try:
        seen = parameters(resolve(target.path))
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        return f"{target.path} ({target.use}): {type(error).__name__}: {error}"
    if seen != target.parameters:
        return f"{target.path} ({target.use}): parameters are {' '.join(seen)}; expected {' '.join(target.parameters)}"
    return None


def check_enum(enum: type, methods: tuple[str, ...] = ENUM_METHODS) -> list[str]:
    return [f"SpeculativeAlgorithm has no {name} any more" for name in methods if name not in vars(enum)]


def problems(version: str, targets: tuple[Target, ...] = TARGETS) -> list[str]:
    """Everything in which the running SGLang differs from the one this plugin was written for; empty when it
    may register.
    """
    if version != SGLANG_VERSION:
        return [f"SGLang is {version}; this plugin was written for {SGLANG_VERSION} and hooks its internals"]
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    found = [problem for target in targets if (problem := check_target(target)) is not None]
    return found + check_enum(SpeculativeAlgorithm)
