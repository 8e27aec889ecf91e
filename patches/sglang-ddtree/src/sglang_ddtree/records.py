"""Records in place of SGLang's state snapshots: the hooks that allocate, write and replay them.

The records lie beside the state pool and are allocated with it, before any graph is captured, so that a captured
verify reads and writes them, and with them the trees of all rounds, at their final addresses. The pool itself is
allocated as for plain decoding: a verify that fell back to SGLang's kernels would find no place for its snapshots
and stop, rather than go on with wrong states.

All hooks pass through on a pool without records.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Iterator
from typing import Any

import torch

from sglang_ddtree import algo, hooks, states
from sglang_ddtree.kernels.buffers import TreeBuffers
from sglang_ddtree.kernels.hybrid import HybridTree

logger = logging.getLogger(__name__)
_ATTRIBUTE = "ddtree_records"
_GIBI = 1 << 30


def of_pool(req_to_token_pool: Any) -> HybridTree | None:
    """Trees and records of a pool of requests; None where it has no recurrent states, or snapshots of them."""
    return getattr(getattr(req_to_token_pool, "mamba_pool", None), _ATTRIBUTE, None)


@contextlib.contextmanager
def using(req_to_token_pool: Any, kept: HybridTree) -> Iterator[None]:
    """Other trees and records in the place of a pool's own, which come back: those of a narrower width."""
    pool = req_to_token_pool.mamba_pool
    own = getattr(pool, _ATTRIBUTE)
    setattr(pool, _ATTRIBUTE, kept)
    try:
        yield
    finally:
        setattr(pool, _ATTRIBUTE, own)


# -- memory ------------------------------------------------------------------------------------------------------------


def capacity(server_args: Any, requests: int) -> int:
    """Requests that a verify may hold, padding included. Not the largest graph asked for, which is 48 and more where
    nobody says so: SGLang captures none beyond this.
    """
    from sglang.srt.utils import common

    return int(common.get_cuda_graph_max_batch_size(server_args, requests))


def around_mamba_cache(original: Any, configurator: Any, total_rest_memory: float) -> Any:
    """The sizing of the state pool: SGLang reserves snapshots for every speculative algorithm, here records are.

    total_rest_memory and the result are GiB. SGLang's sum without speculation is the one without snapshots.
    """
    resolved = states.recording(configurator.server_args)
    if resolved is None:
        return hooks.around_mamba_cache(original, configurator, total_rest_memory)
    from sglang.srt.runtime_context import get_schedule
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    sizes = states.Sizes.of(configurator.mambaish_config.mamba2_cache_params)
    requests = capacity(configurator.server_args, int(get_schedule().max_running_requests))
    states.refuse_oversized(resolved, sizes, requests, int(total_rest_memory * _GIBI))
    plain = copy.copy(configurator)
    plain.spec_algorithm = SpeculativeAlgorithm.NONE
    return original(plain, total_rest_memory - sizes.records(requests, resolved.rows) / _GIBI)


def around_pool(original: Any, pool: Any, **kwargs: Any) -> None:
    """MambaPool: without room for snapshots, with records beside it."""
    from sglang.srt.runtime_context import get_server_args

    server_args = get_server_args()
    resolved = states.recording(server_args)
    if resolved is None or kwargs.get("speculative_num_draft_tokens") is None:
        original(pool, **kwargs)
        return
    original(pool, **{**kwargs, "speculative_num_draft_tokens": None})
    requests = capacity(server_args, int(kwargs["spec_state_size"]))
    kept = allocate(pool.mamba_cache, resolved.rows, requests)
    setattr(pool, _ATTRIBUTE, kept)
    pool.mem_usage += kept.records.nbytes / _GIBI
    spared = states.Sizes.of(kwargs["cache_params"]).snapshots(int(kwargs["spec_state_size"]), resolved.rows)
    logger.info(
        "DDTREE: records of recurrent states for %d requests of %d rows take %.2f GiB; snapshots would take %.2f GiB.",
        requests,
        resolved.rows,
        kept.records.nbytes / _GIBI,
        spared / _GIBI,
    )


def allocate(cache: Any, rows: int, requests: int) -> HybridTree:
    """Trees and records for the states of MambaPool.mamba_cache."""
    conv, ssm = cache.conv[0], cache.temporal
    trees = TreeBuffers.allocate(requests, rows, ssm.device, conv_width=conv.shape[-1] + 1)
    return HybridTree.allocate(trees, conv, ssm, states.key_heads(tuple(ssm.shape[2:]), conv.shape[2]))


# -- a round -----------------------------------------------------------------------------------------------------------


def around_extend(
    original: Any, backend: Any, layer: Any, forward_batch: Any, mixed_qkv: torch.Tensor, a: Any, b: Any, **kwargs: Any
) -> Any:
    """One Gated DeltaNet layer: in a verify, convolution and recurrence over the tree, which leave records."""
    kept = of_pool(backend.req_to_token_pool)
    if kept is None or not forward_batch.forward_mode.is_target_verify():
        return original(backend, layer=layer, forward_batch=forward_batch, mixed_qkv=mixed_qkv, a=a, b=b, **kwargs)
    return verify_layer(kept, backend, layer, mixed_qkv, a, b)


def verify_layer(
    kept: HybridTree, backend: Any, layer: Any, mixed_qkv: torch.Tensor, a: torch.Tensor, b: torch.Tensor
) -> torch.Tensor:
    """mixed_qkv [bs * N, C], a and b [bs * N, HV]; returns [1, bs * N, HV, V].

    Slots come from this pass's metadata: a captured graph's are static, and padding rows have a negative one.
    """
    cells, rows = mixed_qkv.shape[0], kept.tree.width
    bs = cells // rows
    slots = backend.forward_metadata.mamba_cache_indices[:bs]
    cache = backend.req_to_token_pool.mamba2_layer_cache(layer.layer_id)
    mixed = kept.conv(
        mixed_qkv.view(bs, rows, -1).transpose(1, 2),
        cache.conv[0],
        layer.conv_weights,
        layer.bias,
        layer.activation,
        conv_state_indices=slots,
    )
    q, k, v = mixed.transpose(1, 2).reshape(cells, -1).split([layer.q_dim, layer.k_dim, layer.v_dim], dim=-1)
    return kept.verify(
        A_log=layer.A_log,
        dt_bias=layer.dt_bias,
        q=q.view(1, cells, layer.num_q_heads, layer.head_q_dim),
        k=k.view(1, cells, layer.num_k_heads, layer.head_k_dim),
        v=v.view(1, cells, layer.num_v_heads, layer.head_v_dim),
        a=a,
        b=b,
        ssm_states=cache.temporal,
        cache_indices=slots,
    )


def around_commit(
    original: Any,
    backend: Any,
    last_correct_step_indices: torch.Tensor,
    mamba_track_indices: Any,
    mamba_steps_to_track: Any,
    model: Any,
    req_pool_indices: Any = None,
) -> Any:
    """After acceptance: the accepted path's records into the states of all layers."""
    linear = backend.linear_attn_backend
    kept = of_pool(linear.req_to_token_pool)
    if kept is None:
        return original(
            backend, last_correct_step_indices, mamba_track_indices, mamba_steps_to_track, model, req_pool_indices
        )
    slots = linear.forward_metadata.mamba_cache_indices
    return kept.commit(last_correct_step_indices, slots, mamba_track_indices, mamba_steps_to_track)


# -- registration ------------------------------------------------------------------------------------------------------


def table() -> list[tuple[str, Any, str]]:
    """(target, hook, type) of every hook; the first stands in the place of the one of hooks.table()."""
    linear = "sglang.srt.layers.attention.linear.gdn_backend.GDNAttnBackend"
    hybrid = "sglang.srt.layers.attention.hybrid_linear_attn_backend.HybridLinearAttnBackend"
    return [
        (
            "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._handle_max_mamba_cache",
            around_mamba_cache,
            "around",
        ),
        ("sglang.srt.mem_cache.memory_pool.MambaPool.__init__", around_pool, "around"),
        (f"{linear}.forward_extend", around_extend, "around"),
        (f"{hybrid}.update_mamba_state_after_mtp_verify", around_commit, "around"),
    ]


def worker_class(server_args: Any) -> type:
    """Factory for SGLang's registry."""
    if states.recording(server_args) is None:
        return algo.worker_class(server_args)
    from sglang_ddtree.records_worker import RecordsWorker

    return RecordsWorker
