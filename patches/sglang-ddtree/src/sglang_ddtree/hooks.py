"""The hooks on SGLang: few, small, each for one place that decides by the algorithm's name or width.

All of them pass through unless the server runs DDTREE, so that a process with this plugin serves any other
algorithm as before.
"""

from __future__ import annotations

from typing import Any

from sglang_ddtree import args, config

_MEBI = 1 << 20


def around_get_spec_info(original: Any, runner: Any, num_tokens: int) -> Any:
    """Graph capture of the target: SGLang's DFlash branch captures a causal pass, which a tree is not."""
    model_runner = runner.model_runner
    resolved = config.of(model_runner.server_args)
    if resolved is None or not resolved.tree or model_runner.is_draft_worker:
        return original(runner, num_tokens)
    from sglang_ddtree.info import dummy_verify_input

    return dummy_verify_input(resolved, runner.buffers.custom_mask)


def around_dummy_verify_input(
    original: Any,
    spec_algorithm: Any,
    server_args: Any,
    custom_mask: Any,
    num_tokens_per_req: int,
    is_draft_worker: bool,
) -> Any:
    """Warm-up and autotuning: the draft's width is its block, which SGLang would read from the target's arguments."""
    resolved = config.of(server_args)
    if resolved is None or not resolved.tree:
        return original(spec_algorithm, server_args, custom_mask, num_tokens_per_req, is_draft_worker)
    from sglang_ddtree import info

    if is_draft_worker:
        return info.dummy_draft_input(num_tokens_per_req)
    return info.dummy_verify_input(resolved, custom_mask)


def around_alloc_len(original: Any, server_args: Any = None) -> int:
    """KV slots a decode round may take: a tree narrower than the block still drafts the block."""
    resolved = _resolved(server_args)
    length = int(original(server_args))
    return length if resolved is None else max(length, resolved.slots)


def around_extra_context(original: Any, server_args: Any) -> int:
    """Head room of a req_to_token row: the reserve of a round runs 2 x slots past the committed length, and
    SGLang's DFlash family leaves 4 + rows, so a request near its context limit would write into its neighbour's
    row.
    """
    resolved = config.of(server_args)
    extra = int(original(server_args))
    return extra if resolved is None else max(extra, 2 * resolved.slots + (server_args.page_size or 1))


def around_mamba_cache(original: Any, configurator: Any, total_rest_memory: float) -> Any:
    """Before the state pool is sized: refuse a budget that leaves no room, with the largest one that fits."""
    resolved = config.of(configurator.server_args)
    if resolved is not None and resolved.tree:
        from sglang.srt.runtime_context import get_schedule

        per_row = int(configurator.mambaish_config.mamba2_cache_params.mamba_cache_per_req)
        refuse_oversized(
            resolved, per_row, int(get_schedule().max_running_requests), int(total_rest_memory * (1 << 30))
        )
    return original(configurator, total_rest_memory)


def largest_budget(per_row: int, requests: int, free: int) -> int:
    """Largest T whose snapshots, (requests + 1) x (T + 1) rows, and the states themselves leave a tenth of the
    memory for keys and values. per_row: bytes of all layers' state and window of one row.
    """
    usable = free * 9 // 10 - (requests + 1) * per_row
    return usable // ((requests + 1) * per_row) - 1


def refuse_oversized(resolved: config.Resolved, per_row: int, requests: int, free: int) -> None:
    fits = largest_budget(per_row, requests, free)
    if resolved.config.budget <= fits:
        return
    need = (requests + 1) * resolved.rows * per_row // _MEBI
    advice = f"the largest budget that fits is {fits}" if fits >= 1 else "no budget fits; lower --max-running-requests"
    raise ValueError(
        f"--speculative-ddtree-budget {resolved.config.budget} needs {need} MiB of state snapshots for {requests} "
        f"requests of {resolved.rows} rows, and {free // _MEBI} MiB are free for states and KV cache: {advice}, "
        f"or lower --max-running-requests."
    )


def after_internal_state(result: Any, scheduler: Any, _request: Any) -> None:
    """/server_info shows what the server runs with; private attributes would stay unseen."""
    resolved = config.of(scheduler.server_args)
    if resolved is not None:
        state = result.internal_state
        state["ddtree"] = {**resolved.public(), **scheduler.draft_worker.ddtree_counters()}


def _resolved(server_args: Any) -> config.Resolved | None:
    if server_args is None:
        from sglang.srt.runtime_context import get_server_args

        server_args = get_server_args()
    return config.of(server_args)


def table() -> list[tuple[str, Any, str]]:
    """(target, hook, type) of every hook."""
    return [
        ("sglang.srt.server_args.ServerArgs.add_cli_args", args.hook_add_cli_args, "around"),
        ("sglang.srt.server_args.ServerArgs.from_cli_args", args.hook_from_cli_args, "around"),
        ("sglang.srt.server_args.ServerArgs.__post_init__", args.before_post_init, "before"),
        (
            "sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner.get_spec_info",
            around_get_spec_info,
            "around",
        ),
        ("sglang.srt.speculative.spec_info.create_dummy_verify_input", around_dummy_verify_input, "around"),
        ("sglang.srt.mem_cache.allocation_sizing.get_alloc_len_per_decode", around_alloc_len, "around"),
        ("sglang.srt.mem_cache.allocation_sizing.get_req_to_token_extra_context_len", around_extra_context, "around"),
        (
            "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._handle_max_mamba_cache",
            around_mamba_cache,
            "around",
        ),
        ("sglang.srt.managers.scheduler.Scheduler.get_internal_state", after_internal_state, "after"),
    ]


def register_all() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target, hook, kind in table():
        HookRegistry.register(target, hook, HookType(kind))
