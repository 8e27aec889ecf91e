"""Top-k and log-sum-exp of logit rows in two launches, and their merge over vocabulary shards.

The first launch reads the logits once and keeps two floats of each sub-chunk of columns: its maximum and its
part of the log-sum-exp. The second, one program per row, picks the k sub-chunks with the best maxima and looks
for the row's k best columns in those alone. That is exact, ties included: sub-chunks are ordered as their best
columns are, by value and then by the lower column, so each of the k sub-chunks holds a column that comes before
every column of a sub-chunk left out.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from sglang_ddtree.kernels.buffers import check, require
from sglang_ddtree.kernels.keys import key_column, key_value, ordered_key

CHUNK = 4096  # columns of a program of the first launch
MAX_K = 64


def columns_of_a_maximum(k: int) -> int:
    """Columns of a sub-chunk.

    The second launch goes k times through both the sub-chunks of a row and the columns of k of them, so a larger
    k takes smaller ones.
    """
    return 256 if k <= 8 else 128 if k <= 16 else 64


@dataclass(frozen=True)
class TopKWorkspace:
    """Per-sub-chunk results of the first launch."""

    maxima: torch.Tensor  # float32 [R, S]
    sums: torch.Tensor  # float32 [R, S], sum of exp(logit - maximum)

    @classmethod
    def allocate(cls, rows: int, vocab: int, k: int, device: torch.device | str) -> "TopKWorkspace":
        """For up to ``rows`` rows of up to ``vocab`` valid columns, and for k or fewer."""
        shape = (rows, triton.cdiv(vocab, columns_of_a_maximum(k)))
        return cls(
            maxima=torch.empty(shape, dtype=torch.float32, device=device),
            sums=torch.empty(shape, dtype=torch.float32, device=device),
        )


@triton.jit
def _columns(logits_ptr, scale_ptr, row, row_stride, rows_per_scale, col, inside, SCALE: tl.constexpr):
    """Float32 logits of a row, -inf where NaN or not inside. Both launches must see the same bits."""
    x = tl.load(logits_ptr + row * row_stride + col, mask=inside, other=float("-inf")).to(tl.float32)
    if SCALE:
        x = x / tl.load(scale_ptr + row // rows_per_scale).to(tl.float32)
    return tl.where(x == x, x, float("-inf"))


@triton.jit
def _topk_chunks_kernel(
    logits_ptr, scale_ptr, maxima_ptr, sums_ptr,
    row_stride, num_valid, subs, rows_per_scale,
    CHUNK: tl.constexpr, SUB: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    sub = tl.program_id(1) * (CHUNK // SUB) + tl.arange(0, CHUNK // SUB)
    col = sub[:, None] * SUB + tl.arange(0, SUB)[None, :]
    x = _columns(logits_ptr, scale_ptr, row, row_stride, rows_per_scale, col, col < num_valid, SCALE)
    top = tl.max(x, 1)
    safe = tl.where(top > float("-inf"), top, 0.0)
    cell = row * subs + sub
    tl.store(maxima_ptr + cell, top, mask=sub < subs)
    tl.store(sums_ptr + cell, tl.sum(tl.exp(x - safe[:, None]), 1), mask=sub < subs)


@triton.jit
def _topk_merge_chunks_kernel(
    logits_ptr, scale_ptr, maxima_ptr, sums_ptr, ids_ptr, values_ptr, lse_ptr,
    row_stride, num_valid, subs, rows_per_scale, vocab_start,
    K: tl.constexpr, KP: tl.constexpr, SUB: tl.constexpr, SP: tl.constexpr,
    SCALE: tl.constexpr, NORMALISE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    sub = tl.arange(0, SP)
    maxima = tl.load(maxima_ptr + row * subs + sub, mask=sub < subs, other=float("-inf"))
    sums = tl.load(sums_ptr + row * subs + sub, mask=sub < subs, other=0.0)

    lowest = tl.full([SP], -0x8000000000000000, tl.int64)
    keys = tl.where(sub < subs, ordered_key(maxima, sub), lowest)
    lane = tl.arange(0, KP)
    chosen = tl.full([KP], -1, tl.int32)
    for i in range(K):
        best = tl.max(keys, 0)
        real = best > -0x8000000000000000
        chosen = tl.where(lane == tl.where(real, i, -1), key_column(best).to(tl.int32), chosen)
        keys = tl.where(keys == best, lowest, keys)
    col = chosen[:, None] * SUB + tl.arange(0, SUB)[None, :]
    inside = (chosen >= 0)[:, None] & (col < num_valid)
    x = _columns(logits_ptr, scale_ptr, row, row_stride, rows_per_scale, col, inside, SCALE)

    # The log-sum-exp is worked out while those columns are on their way.
    top = tl.max(maxima, 0)
    safe = tl.where(top > float("-inf"), top, 0.0)
    total = tl.sum(sums * tl.exp(maxima - safe), 0)
    lse = tl.log(tl.where(top > float("-inf"), total, 1.0)) + top
    tl.store(lse_ptr + row, lse)
    shift = 0.0
    if NORMALISE:
        shift = tl.where(lse > float("-inf"), lse, 0.0)

    lowest = tl.full([KP * SUB], -0x8000000000000000, tl.int64)
    found = tl.where(inside, ordered_key(x, col), -0x8000000000000000)
    keys = tl.reshape(found, [KP * SUB], can_reorder=True)  # a key holds its column
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
    log-sum-exp over the valid columns, accumulated in float32: first within sub-chunks, then over
    them, so its last bits depend on k through :func:`columns_of_a_maximum`. NaN counts as -inf;
    entries beyond the valid columns are id 0 and -inf. ``temperatures`` float32 [R / n] divide the
    logits first, one for n consecutive rows. Without ``workspace`` one is allocated (fine under
    capture).
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
    if workspace is None:
        workspace = TopKWorkspace.allocate(rows, valid, k, logits.device)
    _launch(logits, ids, values, lse, workspace, vocab_start, valid, normalise, temperatures)


def _launch(
    logits: torch.Tensor,
    ids: torch.Tensor,
    values: torch.Tensor,
    lse: torch.Tensor,
    workspace: TopKWorkspace,
    vocab_start: int,
    valid: int,
    normalise: bool,
    temperatures: torch.Tensor | None,
    *,
    chunk: int = CHUNK,
    sub: int | None = None,
    warps: tuple[int, int] | None = None,
) -> None:
    """Both launches. The keywords change their speed and the order of sums, so the log-sum-exp's last bits."""
    rows, k = ids.shape
    sub = columns_of_a_maximum(k) if sub is None else sub
    warps = (4, 4) if warps is None else warps
    subs = triton.cdiv(valid, sub)
    require(workspace.maxima.numel() >= rows * subs, "the workspace is too small")
    scaled = temperatures is not None
    scales = temperatures if temperatures is not None else logits
    rows_per_scale = 1 if temperatures is None else rows // temperatures.numel()
    _topk_chunks_kernel[(rows, triton.cdiv(valid, chunk))](
        logits, scales, workspace.maxima, workspace.sums,
        logits.stride(0), valid, subs, rows_per_scale,
        CHUNK=chunk, SUB=sub, SCALE=scaled,
        num_warps=warps[0],
    )  # fmt: skip
    _topk_merge_chunks_kernel[(rows,)](
        logits, scales, workspace.maxima, workspace.sums, ids, values, lse,
        logits.stride(0), valid, subs, rows_per_scale, vocab_start,
        K=k, KP=triton.next_power_of_2(k), SUB=sub, SP=triton.next_power_of_2(subs),
        SCALE=scaled, NORMALISE=normalise,
        num_warps=warps[1],
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
