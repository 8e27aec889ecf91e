"""Top-k and log-sum-exp of logit rows in two launches, and their merge over vocabulary shards.

The first launch reads the logits once, in chunks: each program keeps its chunk's k best keys and its
part of the log-sum-exp. The second merges the chunks of a row.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from sglang_ddtree.kernels.buffers import check, require
from sglang_ddtree.kernels.keys import key_column, key_value, ordered_key

CHUNK = 4096
MAX_K = 64


@dataclass(frozen=True)
class TopKWorkspace:
    """Per-chunk results of the first launch."""

    keys: torch.Tensor  # int64 [R, C, k]
    maxima: torch.Tensor  # float32 [R, C]
    sums: torch.Tensor  # float32 [R, C], sum of exp(logit - maximum)

    @classmethod
    def allocate(cls, rows: int, vocab: int, k: int, device: torch.device | str) -> "TopKWorkspace":
        """For up to ``rows`` rows of up to ``vocab`` valid columns."""
        chunks = triton.cdiv(vocab, CHUNK)
        return cls(
            keys=torch.empty((rows, chunks, k), dtype=torch.int64, device=device),
            maxima=torch.empty((rows, chunks), dtype=torch.float32, device=device),
            sums=torch.empty((rows, chunks), dtype=torch.float32, device=device),
        )


@triton.jit
def _topk_chunks_kernel(
    logits_ptr, scale_ptr, keys_ptr, maxima_ptr, sums_ptr,
    row_stride, num_valid, chunks, rows_per_scale,
    K: tl.constexpr, CHUNK: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    col = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = col < num_valid
    x = tl.load(logits_ptr + row * row_stride + col, mask=inside, other=float("-inf")).to(tl.float32)
    if SCALE:
        x = x / tl.load(scale_ptr + row // rows_per_scale).to(tl.float32)
    x = tl.where(x == x, x, float("-inf"))
    top = tl.max(x, 0)
    safe = tl.where(top > float("-inf"), top, 0.0)
    cell = row * chunks + chunk
    tl.store(maxima_ptr + cell, top)
    tl.store(sums_ptr + cell, tl.sum(tl.exp(x - safe), 0))
    lowest = tl.full([CHUNK], -0x8000000000000000, tl.int64)
    keys = tl.where(inside, ordered_key(x, col), lowest)
    for i in range(K):
        best = tl.max(keys, 0)
        tl.store(keys_ptr + cell * K + i, best)
        keys = tl.where(keys == best, lowest, keys)


@triton.jit
def _topk_merge_chunks_kernel(
    keys_ptr, maxima_ptr, sums_ptr, ids_ptr, values_ptr, lse_ptr,
    vocab_start, chunks,
    K: tl.constexpr, NP: tl.constexpr, CP: tl.constexpr, NORMALISE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, CP)
    maxima = tl.load(maxima_ptr + row * chunks + part, mask=part < chunks, other=float("-inf"))
    sums = tl.load(sums_ptr + row * chunks + part, mask=part < chunks, other=0.0)
    top = tl.max(maxima, 0)
    safe = tl.where(top > float("-inf"), top, 0.0)
    total = tl.sum(sums * tl.exp(maxima - safe), 0)
    lse = tl.log(tl.where(top > float("-inf"), total, 1.0)) + top
    tl.store(lse_ptr + row, lse)
    shift = 0.0
    if NORMALISE:
        shift = tl.where(lse > float("-inf"), lse, 0.0)
    entry = tl.arange(0, NP)
    lowest = tl.full([NP], -0x8000000000000000, tl.int64)
    keys = tl.load(keys_ptr + row * chunks * K + entry, mask=entry < chunks * K, other=-0x8000000000000000)
    for i in range(K):
        best = tl.max(keys, 0)
        real = best > -0x8000000000000000
        tl.store(ids_ptr + row * K + i, tl.where(real, key_column(best) + vocab_start, 0))
        tl.store(values_ptr + row * K + i, tl.where(real, key_value(best) - shift, float("-inf")))
        keys = tl.where(keys == best, lowest, keys)


@triton.jit
def _merge_shards_kernel(
    ids_ptr, values_ptr, lse_ptr, out_ids_ptr, out_logp_ptr,
    rows,
    TP: tl.constexpr, TPP: tl.constexpr, K: tl.constexpr, NP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    shard = tl.arange(0, TPP)
    parts = tl.load(lse_ptr + shard.to(tl.int64) * rows + row, mask=shard < TP, other=float("-inf"))
    top = tl.max(parts, 0)
    safe = tl.where(top > float("-inf"), top, 0.0)
    total = tl.sum(tl.exp(parts - safe), 0)
    lse = tl.log(tl.where(top > float("-inf"), total, 1.0)) + top
    shift = tl.where(lse > float("-inf"), lse, 0.0)
    entry = tl.arange(0, NP)
    at = (entry // K).to(tl.int64) * rows * K + row * K + entry % K
    inside = entry < TP * K
    values = tl.load(values_ptr + at, mask=inside, other=float("-inf"))
    ids = tl.load(ids_ptr + at, mask=inside, other=0)
    # Shards hold ascending id ranges, so the entry's place breaks ties by id.
    lowest = tl.full([NP], -0x8000000000000000, tl.int64)
    keys = tl.where(inside, ordered_key(values, entry), lowest)
    for i in range(K):
        best = tl.max(keys, 0)
        tl.store(out_ids_ptr + row * K + i, tl.sum(tl.where(keys == best, ids, 0), 0))
        tl.store(out_logp_ptr + row * K + i, key_value(best) - shift)
        keys = tl.where(keys == best, lowest, keys)


def draft_topk(
    logits: torch.Tensor,
    ids: torch.Tensor,
    values: torch.Tensor,
    lse: torch.Tensor,
    *,
    vocab_start: int = 0,
    num_valid: int | None = None,
    normalise: bool = True,
    temperatures: torch.Tensor | None = None,
    workspace: TopKWorkspace | None = None,
) -> None:
    """The k best columns of each row, largest first, equal logits by the lower id.

    logits float32, bfloat16 or float16 [R, V'], unit column stride; only the first ``num_valid``
    columns count (a shard's padding rows must not). Outputs: ids int64 [R, k], global, column +
    ``vocab_start``; values float32 [R, k], log-probabilities, or plain logits with
    ``normalise=False`` (what :func:`merge_topk` takes from each rank); lse float32 [R], natural
    log-sum-exp over the valid columns, accumulated in float32. NaN counts as -inf; entries beyond
    the valid columns are id 0 and -inf. ``temperatures`` float32 [R / n] divide the logits first, one
    for n consecutive rows. Without ``workspace`` one is allocated (fine under capture).
    """
    rows, width = logits.shape
    k = ids.shape[1]
    valid = width if num_valid is None else num_valid
    require(logits.stride(1) == 1, "logits need a unit column stride")
    require(1 <= k <= MAX_K, f"k must be 1..{MAX_K}, got {k}")
    require(0 < valid <= width, f"{valid} valid columns of {width}")
    check("ids", ids, torch.int64, rows, k)
    check("values", values, torch.float32, rows, k)
    check("lse", lse, torch.float32, rows)
    if rows == 0:
        return
    chunks = triton.cdiv(valid, CHUNK)
    if workspace is None:
        workspace = TopKWorkspace.allocate(rows, valid, k, logits.device)
    require(workspace.keys.numel() >= rows * chunks * k, "the workspace is too small")
    _topk_chunks_kernel[(rows, chunks)](
        logits, temperatures if temperatures is not None else logits,
        workspace.keys, workspace.maxima, workspace.sums,
        logits.stride(0), valid, chunks, 1 if temperatures is None else rows // temperatures.numel(),
        K=k, CHUNK=CHUNK, SCALE=temperatures is not None,
        num_warps=8,
    )  # fmt: skip
    _topk_merge_chunks_kernel[(rows,)](
        workspace.keys, workspace.maxima, workspace.sums, ids, values, lse,
        vocab_start, chunks,
        K=k, NP=triton.next_power_of_2(chunks * k), CP=triton.next_power_of_2(chunks),
        NORMALISE=normalise,
        num_warps=4,
    )  # fmt: skip


def merge_topk(
    ids: torch.Tensor, values: torch.Tensor, lse: torch.Tensor, out_ids: torch.Tensor, out_logp: torch.Tensor
) -> None:
    """Global top-k from the ranks' results, the same on every rank.

    ids int64 [tp, R, k], values float32 [tp, R, k] (plain logits), lse float32 [tp, R], in rank
    order, where rank r's ids all lie below rank r + 1's; out_ids int64 [R, k], out_logp float32
    [R, k]: log-probabilities over the whole vocabulary.
    """
    ranks, rows, k = ids.shape
    check("ids", ids, torch.int64, ranks, rows, k)
    check("values", values, torch.float32, ranks, rows, k)
    check("lse", lse, torch.float32, ranks, rows)
    check("out_ids", out_ids, torch.int64, rows, k)
    check("out_logp", out_logp, torch.float32, rows, k)
    if rows == 0:
        return
    _merge_shards_kernel[(rows,)](
        ids, values, lse, out_ids, out_logp,
        rows,
        TP=ranks, TPP=triton.next_power_of_2(ranks), K=k, NP=triton.next_power_of_2(ranks * k),
        num_warps=1,
    )  # fmt: skip
