"""The draft block and the KV slots of a round: its only read of ``req_to_token``.

The scheduler may hand a finished request's row to another one once the read-done event fired, before
the target's forward. Whatever needs slots later (verify, compaction, the drafter's KV) takes them
from here.
"""

import torch
import triton
import triton.language as tl

from sglang_ddtree.kernels.buffers import check, require


@triton.jit
def _prepare_round_kernel(
    bonus_ptr, seq_lens_ptr, req_pool_ptr, req_to_token_ptr,
    block_ids_ptr, block_positions_ptr, slots_ptr,
    row_stride, row_width, mask_token,
    B: tl.constexpr, M: tl.constexpr, MP: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, MP)
    start = tl.load(seq_lens_ptr + request).to(tl.int64)
    pool_row = tl.load(req_pool_ptr + request).to(tl.int64)
    at = start + col
    inside = (col < M) & (at < row_width)
    slot = tl.load(req_to_token_ptr + pool_row * row_stride + at, mask=inside, other=0)
    tl.store(slots_ptr + request * M + col, slot.to(tl.int64), mask=col < M)
    token = tl.where(col == 0, tl.load(bonus_ptr + request), tl.full([MP], mask_token, tl.int64))
    tl.store(block_ids_ptr + request * B + col, token, mask=col < B)
    tl.store(block_positions_ptr + request * B + col, at, mask=col < B)


def prepare_round(
    bonus: torch.Tensor,
    seq_lens: torch.Tensor,
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    mask_token: int,
    block_ids: torch.Tensor,
    block_positions: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Fill the draft block [bonus, mask, ..], its positions L.. and the slots of positions L...

    bonus int64 [bs]; seq_lens, req_pool_indices int32 or int64 [bs]; req_to_token int32 [P, C] with
    unit column stride. block_ids, block_positions int64 [bs, B]; slots int64 [bs, M], M >= max(N, B):
    the draft uses ``slots[:, :B]``, the verify ``slots[:, :N]``. Positions past the row get slot 0,
    SGLang's padding slot.
    """
    bs, block = block_ids.shape
    check("bonus", bonus, torch.int64, bs)
    check("block_ids", block_ids, torch.int64, bs, block)
    check("block_positions", block_positions, torch.int64, bs, block)
    check("slots", slots, torch.int64, bs, -1)
    require(req_to_token.dim() == 2 and req_to_token.stride(1) == 1, "req_to_token must be row-major")
    require(slots.shape[1] >= block, f"{slots.shape[1]} slots cannot hold a block of {block}")
    if bs == 0:
        return
    _prepare_round_kernel[(bs,)](
        bonus, seq_lens, req_pool_indices, req_to_token,
        block_ids, block_positions, slots,
        req_to_token.stride(0), req_to_token.shape[1], mask_token,
        B=block, M=slots.shape[1], MP=triton.next_power_of_2(slots.shape[1]),
        num_warps=1,
    )  # fmt: skip
