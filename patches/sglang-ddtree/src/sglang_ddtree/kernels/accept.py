"""The walk over the target's tokens, one program per request.

Lane j of the program stands for row j of the tree. At each depth the matching child is the one row
whose parent is the current one and whose token is the wanted one, so a depth costs one reduction and
no pointer is chased through the sibling links.
"""

import torch
import triton
import triton.language as tl

from sglang_ddtree.kernels.buffers import AcceptBuffers, TreeBuffers, TreeCounters, check, require


@triton.jit
def _accept_kernel(
    target_ptr, tokens_ptr, parent_ptr, rank_ptr, num_nodes_ptr, seq_lens_ptr, slots_ptr,
    accept_index_ptr, commit_lens_ptr, bonus_ptr, out_tokens_ptr, new_seq_lens_ptr, last_row_ptr,
    src_ptr, tgt_ptr,
    total_ptr, offered_ptr, accepted_ptr,
    rows,
    W: tl.constexpr, WP: tl.constexpr, M: tl.constexpr, NP: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, NP)
    base = request * rows
    used = tl.load(num_nodes_ptr + request)
    node = (lane > 0) & (lane < used)
    tokens = tl.load(tokens_ptr + base + lane, mask=node, other=-1)
    parent = tl.load(parent_ptr + base + lane, mask=node, other=-1)
    rank = tl.load(rank_ptr + base + lane, mask=node, other=0)
    target = tl.load(target_ptr + base + lane, mask=lane < rows, other=0)
    out = request * W
    slots = slots_ptr + request * M

    row = 0
    length = 1
    walking = 1
    on_spine = 1
    off_spine = 0
    step = tl.arange(0, WP)
    offered = tl.zeros([WP], tl.int32)
    accepted = tl.zeros([WP], tl.int32)
    bonus = tl.sum(tl.where(lane == 0, target, 0), 0)
    slot = tl.load(slots)
    tl.store(accept_index_ptr + out, base.to(tl.int32))
    tl.store(src_ptr + out, slot)
    tl.store(tgt_ptr + out, slot)
    for depth in range(1, W):
        child = parent == tl.where(walking != 0, row, -2)
        match = child & (tokens == bonus)
        found = tl.max(tl.where(match, lane, -1), 0)
        go = found >= 0
        if COUNT:
            offers = tl.max(child.to(tl.int32), 0)
            offered = tl.where(step == depth, offers, offered)
            accepted = tl.where(step == depth, go.to(tl.int32), accepted)
            on_spine = on_spine & (tl.sum(tl.where(match, rank, 0), 0) == 0)
            off_spine += tl.where(go & (on_spine == 0), 1, 0)
        # The token matched at this depth is the one wanted at the row above.
        tl.store(out_tokens_ptr + out + depth - 1, tl.where(walking != 0, bonus, 0))
        tl.store(accept_index_ptr + out + depth, tl.where(go, (base + found).to(tl.int32), -1))
        tl.store(src_ptr + out + depth, tl.load(slots + found, mask=go, other=0))
        tl.store(tgt_ptr + out + depth, tl.load(slots + depth, mask=go, other=0))
        row = tl.where(go, found, row)
        length += go.to(tl.int32)
        bonus = tl.where(go, tl.sum(tl.where(lane == found, target, 0), 0), bonus)
        walking = go.to(tl.int32)
    # A path of full length leaves its bonus to the last cell.
    tl.store(out_tokens_ptr + out + W - 1, tl.where(walking != 0, bonus, 0))
    tl.store(commit_lens_ptr + request, length)
    tl.store(bonus_ptr + request, bonus)
    tl.store(last_row_ptr + request, row)
    tl.store(new_seq_lens_ptr + request, tl.load(seq_lens_ptr + request).to(tl.int64) + length)
    if COUNT:
        # Relaxed: nothing is ordered by these counts, and ordered adds cost two fences each.
        tl.atomic_add(offered_ptr + step, offered.to(tl.int64), mask=offered > 0, sem="relaxed")
        tl.atomic_add(accepted_ptr + step, accepted.to(tl.int64), mask=accepted > 0, sem="relaxed")
        what = tl.arange(0, 4)
        count = tl.where(what == 0, 1, tl.where(what == 1, used - 1, tl.where(what == 2, length - 1, off_spine)))
        tl.atomic_add(total_ptr + what, count.to(tl.int64), sem="relaxed")


def accept_tree(
    target_tokens: torch.Tensor,
    tree: TreeBuffers,
    slots: torch.Tensor,
    seq_lens: torch.Tensor,
    out: AcceptBuffers,
    counters: TreeCounters | None = None,
) -> None:
    """Accept the longest root path whose tokens the target gives.

    target_tokens int64 [bs, N]: per row its argmax or one draw. tree, out: views of exactly the bs
    requests. slots int64 [bs, M >= N], as :func:`~sglang_ddtree.kernels.slots.prepare_round` gave
    them; seq_lens int32 or int64 [bs], lengths before the round. ``out.src_slots -> out.tgt_slots``
    moves the path's keys and values to the first slots: SGLang's ``move_kv_cache`` reads all before
    it writes, and in any case no write precedes the read of its slot, since path[j] >= j. The pads move
    slot 0 onto itself. ``counters`` are added to, never reset.
    """
    bs, rows = tree.tokens.shape
    check("target_tokens", target_tokens, torch.int64, bs, rows)
    check("slots", slots, torch.int64, bs, -1)
    check("seq_lens", seq_lens, seq_lens.dtype, bs)
    check("out.accept_index", out.accept_index, torch.int32, bs, -1)
    require(slots.shape[1] >= max(rows, out.width), f"{slots.shape[1]} slots for {rows} rows")
    if bs == 0:
        return
    count = counters is not None
    dummy = out.out_tokens
    _accept_kernel[(bs,)](
        target_tokens, tree.tokens, tree.parent, tree.rank, tree.num_nodes, seq_lens, slots,
        out.accept_index, out.commit_lens, out.bonus, out.out_tokens, out.new_seq_lens, out.last_row,
        out.src_slots, out.tgt_slots,
        counters.total if counters else dummy,
        counters.offered if counters else dummy,
        counters.accepted if counters else dummy,
        rows,
        W=out.width, WP=triton.next_power_of_2(out.width), M=slots.shape[1], NP=triton.next_power_of_2(rows),
        COUNT=count,
        num_warps=1,
    )  # fmt: skip
