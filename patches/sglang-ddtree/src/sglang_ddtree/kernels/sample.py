"""One seeded draw from the target's law per row, for the walk of :mod:`~sglang_ddtree.kernels.accept`.

The law and the random numbers are those of SGLang's PyTorch sampler (see
:mod:`sglang_ddtree.reference.sampling`): a hash of the request's seed, the node's position and the
column. Siblings' children at one depth share their noise, which is sound: the walk visits one row a
depth, and which one depends on earlier positions only. So what is drawn at a position does not depend
on the tree, the budget or the batch, and equals what plain decoding with the same seed would draw.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from sglang_ddtree.kernels.buffers import check, require
from sglang_ddtree.kernels.keys import gumbel
from sglang_ddtree.kernels.topk import MAX_K, draft_topk

CHUNK = 1024


@dataclass(frozen=True)
class SamplingParams:
    """Per-request parameters (SGLang's ``SamplingBatchInfo``) and what the host knows of them.

    A greedy request is top_k = 1. ``max_top_k`` is the largest top_k of the batch, as the host knows it
    from the requests; None stands for "the whole vocabulary".
    """

    temperatures: torch.Tensor  # float32 [bs] or [bs, 1]
    top_ks: torch.Tensor  # int32 [bs]
    top_ps: torch.Tensor  # float32 [bs]
    min_ps: torch.Tensor  # float32 [bs]
    seeds: torch.Tensor  # int64 [bs]; draw one at random for a request without a seed
    max_top_k: int | None = None
    filtered: bool = True  # False only if no request of the batch has top_k, top_p or min_p


@triton.jit
def _gumbel_chunks_kernel(
    logits_ptr, scale_ptr, seeds_ptr, positions_ptr, best_ptr, column_ptr,
    row_stride, width, chunks, rows_per_request,
    CHUNK: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    request = row // rows_per_request
    col = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = col < width
    x = tl.load(logits_ptr + row * row_stride + col, mask=inside, other=float("-inf")).to(tl.float32)
    if SCALE:
        x = x / tl.load(scale_ptr + request).to(tl.float32)
    x = tl.where(x == x, x, float("-inf"))
    score = x.to(tl.float64) + gumbel(tl.load(seeds_ptr + request), tl.load(positions_ptr + row), col)
    best = tl.max(score, 0)
    tl.store(best_ptr + row * chunks + chunk, best)
    tl.store(column_ptr + row * chunks + chunk, tl.min(tl.where(score == best, col, 0x7FFFFFFF), 0))


@triton.jit
def _gumbel_merge_kernel(best_ptr, column_ptr, out_ptr, chunks, CP: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, CP)
    inside = part < chunks
    score = tl.load(best_ptr + row * chunks + part, mask=inside, other=float("-inf"))
    col = tl.load(column_ptr + row * chunks + part, mask=inside, other=0x7FFFFFFF)
    best = tl.max(score, 0)
    tl.store(out_ptr + row, tl.min(tl.where(inside & (score == best), col, 0x7FFFFFFF), 0).to(tl.int64))


@triton.jit
def _draw_sorted_kernel(
    ids_ptr, values_ptr, lse_ptr, top_ks_ptr, top_ps_ptr, min_ps_ptr, seeds_ptr, positions_ptr, out_ptr,
    rows_per_request,
    K: tl.constexpr, KP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    request = row // rows_per_request
    rank = tl.arange(0, KP)
    inside = rank < K
    value = tl.load(values_ptr + row * K + rank, mask=inside, other=float("-inf")).to(tl.float64)
    prob = tl.exp(value - tl.load(lse_ptr + row).to(tl.float64))
    before = tl.cumsum(prob, 0) - prob
    largest = tl.max(prob, 0)
    keep = inside & (rank < tl.load(top_ks_ptr + request))
    keep = keep & (before <= tl.load(top_ps_ptr + request).to(tl.float64))
    keep = keep & (prob >= largest * tl.load(min_ps_ptr + request).to(tl.float64))
    noise = gumbel(tl.load(seeds_ptr + request), tl.load(positions_ptr + row), rank)
    score = tl.where(keep, value + noise, float("-inf"))
    best = tl.max(score, 0)
    winner = tl.min(tl.where(score == best, rank, KP - 1), 0)
    tl.store(out_ptr + row, tl.load(ids_ptr + row * K + winner))


def _gumbel_argmax(
    logits: torch.Tensor,
    scale: torch.Tensor | None,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    out: torch.Tensor,
    rows_per_request: int,
) -> None:
    rows, width = logits.shape
    chunks = triton.cdiv(width, CHUNK)
    best = torch.empty((rows, chunks), dtype=torch.float64, device=logits.device)
    column = torch.empty((rows, chunks), dtype=torch.int32, device=logits.device)
    _gumbel_chunks_kernel[(rows, chunks)](
        logits, logits if scale is None else scale, seeds, positions, best, column,
        logits.stride(0), width, chunks, rows_per_request,
        CHUNK=CHUNK, SCALE=scale is not None,
    )  # fmt: skip
    _gumbel_merge_kernel[(rows,)](best, column, out, chunks, CP=triton.next_power_of_2(chunks))


def _draw_sorted_full(
    logits: torch.Tensor,
    positions: torch.Tensor,
    params: SamplingParams,
    temperatures: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """The filters over the whole sorted row, for requests whose nucleus may exceed MAX_K tokens."""
    each = logits.shape[0] // params.seeds.numel()
    scaled = logits.float() / temperatures.repeat_interleave(each, output_size=logits.shape[0])[:, None]
    values, ids = torch.sort(scaled, dim=-1, descending=True, stable=True)
    probs = torch.softmax(values, dim=-1)
    before = probs.cumsum(-1) - probs

    def per_row(t: torch.Tensor) -> torch.Tensor:
        return t.repeat_interleave(each, output_size=logits.shape[0])[:, None]

    keep = torch.arange(logits.shape[1], device=logits.device) < per_row(params.top_ks)
    keep &= (before <= per_row(params.top_ps)) & (probs >= probs[:, :1] * per_row(params.min_ps))
    values.masked_fill_(~keep, float("-inf"))
    rank = torch.empty_like(out)
    _gumbel_argmax(values, None, params.seeds, positions, rank, each)
    out.copy_(ids.gather(1, rank[:, None])[:, 0])


def sample_targets(logits: torch.Tensor, positions: torch.Tensor, params: SamplingParams, out: torch.Tensor) -> None:
    """One draw per row from the target's law after temperature, top-k, top-p and min-p.

    logits [R, V], R = bs * N rows of the verify, request by request, already adjusted (penalties, bias,
    grammar); positions int64 [R], each row's own position (``TreeBuffers.positions``); out int64 [R].
    Joint filters, as in plain decoding. Three paths, chosen by what the host knows: no filter (two
    launches over the vocabulary), every top_k <= 64 (three launches), or a sort of the rows.
    """
    rows = logits.shape[0]
    bs = params.seeds.numel()
    require(bs > 0 and rows % bs == 0, f"{rows} rows do not split over {bs} requests")
    check("positions", positions.view(-1), torch.int64, rows)
    check("out", out, torch.int64, rows)
    check("seeds", params.seeds, torch.int64, bs)
    temperatures = params.temperatures.reshape(-1)
    check("temperatures", temperatures, torch.float32, bs)
    if rows == 0:
        return
    positions, each = positions.view(-1), rows // bs
    if not params.filtered:
        _gumbel_argmax(logits, temperatures, params.seeds, positions, out, each)
        return
    if params.max_top_k is None or params.max_top_k > MAX_K:
        _draw_sorted_full(logits, positions, params, temperatures, out)
        return
    k = max(1, min(params.max_top_k, logits.shape[1]))
    ids = torch.empty((rows, k), dtype=torch.int64, device=logits.device)
    values = torch.empty((rows, k), dtype=torch.float32, device=logits.device)
    lse = torch.empty(rows, dtype=torch.float32, device=logits.device)
    draft_topk(logits, ids, values, lse, normalise=False, temperatures=temperatures)
    _draw_sorted_kernel[(rows,)](
        ids, values, lse, params.top_ks, params.top_ps, params.min_ps, params.seeds, positions, out,
        each,
        K=k, KP=triton.next_power_of_2(k),
        num_warps=1,
    )  # fmt: skip
