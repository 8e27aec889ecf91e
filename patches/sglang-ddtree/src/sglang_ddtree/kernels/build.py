"""Best-first tree construction, one program per request.

Equals :func:`sglang_ddtree.reference.tree.build_tree` row for row: path weights are float64 sums of the
same terms in the same order, ties go to the smaller rank path.

The frontier holds at most one candidate per emitted node (its next sibling, in the slot it came from)
and one per node for its first child (in a new slot), so T + 1 slots suffice and each of the T
iterations is five reductions over registers. A candidate's rank path is one integer, its digits
rank + 1 in base K + 1 and 0 past its end: comparing integers compares paths, prefixes first. That
needs (K + 1)^D < 2^63, which holds for K = 16 at D = 15.
"""

import torch
import triton
import triton.language as tl

from sglang_ddtree.kernels.buffers import TreeBuffers, check, require

MAX_ROWS = 512


@triton.jit
def _build_tree_kernel(
    logp_ptr, ids_ptr, bonus_ptr, seq_lens_ptr,
    tokens_ptr, positions_ptr, parent_ptr, depth_ptr, rank_ptr,
    next_token_ptr, next_sibling_ptr, ancestors_ptr, conv_ptr, num_nodes_ptr,
    rows,
    base_power,  # (K + 1)^(D - 1), the weight of a path's first digit
    D: tl.constexpr, K: tl.constexpr, NP: tl.constexpr, WORDS: tl.constexpr, CONV: tl.constexpr,
    KEEP_SPINE: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    logp_ptr += request * (D * K)
    ids_ptr += request * (D * K)
    base = request * rows
    lane = tl.arange(0, NP)
    in_row = lane < rows
    root_position = tl.load(seq_lens_ptr + request).to(tl.int64)

    parent = tl.zeros([NP], tl.int32)
    depth = tl.zeros([NP], tl.int32)
    rank = tl.zeros([NP], tl.int32)
    next_token = tl.full([NP], -1, tl.int64)
    next_sibling = tl.full([NP], -1, tl.int64)
    tokens = tl.where(lane == 0, tl.load(bonus_ptr + request), tl.zeros([NP], tl.int64))

    # Candidates: weight, the parent's weight, rank path, digit weight of the last rank, and
    # parent | previous sibling | depth | rank packed into 10 + 10 + 6 + 5 bits.
    weight = tl.full([NP], float("-inf"), tl.float64)
    above = tl.zeros([NP], tl.float64)
    path = tl.zeros([NP], tl.int64)
    digit = tl.zeros([NP], tl.int64)
    meta = tl.zeros([NP], tl.int64)
    first = tl.load(logp_ptr).to(tl.float64)
    first = tl.where(first > float("-inf"), first, float("-inf"))  # NaN -> -inf
    weight = tl.where(lane == 0, first, weight)
    path = tl.where(lane == 0, base_power, path)
    digit = tl.where(lane == 0, base_power, digit)
    meta = tl.where(lane == 0, 1, meta)

    used = 1
    spine = 1
    for row in range(1, rows):
        best = tl.max(weight, 0)
        candidates = weight == best
        if KEEP_SPINE:
            # The spine's next node is the first child of the node emitted last: slot row - 1.
            forced_weight = tl.max(tl.where(lane == row - 1, weight, float("-inf")), 0)
            spine = tl.where((row <= D) & (forced_weight > float("-inf")), spine, 0)
            candidates = tl.where(spine != 0, lane == row - 1, candidates)
            best = tl.where(spine != 0, forced_weight, best)
        c_path = tl.min(tl.where(candidates, path, 0x7FFFFFFFFFFFFFFF), 0)
        # Without a candidate nothing is chosen, and the packed fields read depth 1, rank 0, parent -1.
        live = best > float("-inf")
        chosen = candidates & (path == c_path) & (weight > float("-inf"))
        c_meta = tl.sum(tl.where(chosen, meta, 0), 0)
        c_digit = tl.sum(tl.where(chosen, digit, 0), 0)
        c_above = tl.sum(tl.where(chosen, above, 0.0), 0)
        c_rank = ((c_meta >> 26) & 31).to(tl.int32)
        c_depth = ((c_meta >> 20) & 63).to(tl.int32) + 1
        c_previous = ((c_meta >> 10) & 1023).to(tl.int32)
        c_parent = (c_meta & 1023).to(tl.int32) - 1

        # Emit the row.
        here = lane == tl.where(live, row, -1)
        token = tl.load(ids_ptr + (c_depth - 1) * K + c_rank, mask=live, other=0)
        tokens = tl.where(here, token, tokens)
        parent = tl.where(here, c_parent, parent)
        depth = tl.where(here, c_depth, depth)
        rank = tl.where(here, c_rank, rank)
        row64 = tl.zeros([NP], tl.int64) + row
        next_token = tl.where(lane == tl.where(c_rank == 0, c_parent, -1), row64, next_token)
        next_sibling = tl.where(lane == tl.where(c_rank > 0, c_previous, -1), row64, next_sibling)
        used += live.to(tl.int32)

        # Its next sibling takes its slot.
        has_next = live & (c_rank + 1 < K)
        step = tl.load(logp_ptr + (c_depth - 1) * K + c_rank + 1, mask=has_next, other=float("-inf"))
        next_weight = c_above + step.to(tl.float64)
        next_weight = tl.where(next_weight > float("-inf"), next_weight, float("-inf"))
        weight = tl.where(chosen, next_weight, weight)
        path = tl.where(chosen, c_path + c_digit, path)
        next_meta = (c_parent + 1).to(tl.int64) | (row64 << 10) | ((c_depth - 1).to(tl.int64) << 20)
        meta = tl.where(chosen, next_meta | ((c_rank + 1).to(tl.int64) << 26), meta)

        # Its first child takes a new one.
        has_child = live & (c_depth < D)
        step = tl.load(logp_ptr + c_depth * K, mask=has_child, other=float("-inf"))
        child_weight = best + step.to(tl.float64)
        child_weight = tl.where(child_weight > float("-inf"), child_weight, float("-inf"))
        slot = lane == row
        child_digit = c_digit // (K + 1)
        weight = tl.where(slot, child_weight, weight)
        above = tl.where(slot, best, above)
        path = tl.where(slot, c_path + child_digit, path)
        digit = tl.where(slot, child_digit, digit)
        meta = tl.where(slot, (row64 + 1) | (c_depth.to(tl.int64) << 20), meta)

    tl.store(tokens_ptr + base + lane, tokens, mask=in_row)
    tl.store(positions_ptr + base + lane, root_position + depth, mask=in_row)
    tl.store(parent_ptr + base + lane, parent, mask=in_row)
    tl.store(depth_ptr + base + lane, depth, mask=in_row)
    tl.store(rank_ptr + base + lane, rank, mask=in_row)
    tl.store(next_token_ptr + base + lane, next_token, mask=in_row)
    tl.store(next_sibling_ptr + base + lane, next_sibling, mask=in_row)
    tl.store(num_nodes_ptr + request, used)

    # Every row walks to the root through the parents just written.
    tl.debug_barrier()
    one = tl.full([NP], 1, tl.int64)
    for word in tl.static_range(WORDS):
        bits = tl.where(lane // 64 == word, one << (lane % 64).to(tl.int64), 0)
        at = lane
        for _ in range(D):
            at = tl.load(parent_ptr + base + at, mask=in_row & (at > 0), other=0)
            # An unused row sees only itself; row 0 is reached by used rows alone.
            inside = (lane < used) & (at // 64 == word)
            bits = tl.where(inside, bits | (one << (at % 64).to(tl.int64)), bits)
        tl.store(ancestors_ptr + (base + lane) * WORDS + word, bits, mask=in_row)
    at = lane
    for step in tl.static_range(CONV):
        up = tl.load(parent_ptr + base + at, mask=in_row & (at > 0), other=0)
        at = tl.where(at > 0, up, at - 1)
        tl.store(conv_ptr + (base + lane) * CONV + step, at, mask=in_row)


def build_tree(
    logp: torch.Tensor,
    ids: torch.Tensor,
    bonus: torch.Tensor,
    seq_lens: torch.Tensor,
    out: TreeBuffers,
    *,
    keep_spine: bool = False,
) -> None:
    """Trees of the ``out.width - 1`` most probable paths of each request.

    logp float32 [bs, D, K]: log-probabilities, descending in K; -inf and NaN are never emitted.
    ids int64 [bs, D, K]: their tokens. bonus int64 [bs]: the roots. seq_lens int32 or int64 [bs]:
    committed length L before the round, so that the root's position is L. ``keep_spine`` emits the
    top-1 path first and whole, then the rest best-first.
    """
    bs, depths, width = logp.shape
    rows = out.width
    check("logp", logp, torch.float32, -1, -1, -1)
    check("ids", ids, torch.int64, bs, depths, width)
    check("bonus", bonus, torch.int64, bs)
    check("seq_lens", seq_lens, seq_lens.dtype, bs)
    check("out.tokens", out.tokens, torch.int64, -1, rows)
    require(out.tokens.shape[0] >= bs, f"{bs} requests but buffers for {out.tokens.shape[0]}")
    require(depths >= 1, "the drafter must give at least one depth")
    require(width <= 31 and depths <= 62, f"top-k cap {width} or depth {depths} too large to encode")
    require(
        (width + 1) ** depths < 2**63,
        f"top-k cap {width} at {depths} depths has more rank paths than 63 bits can order: lower the cap",
    )
    require(rows <= MAX_ROWS, f"{rows} rows, but the builder is written for at most {MAX_ROWS}")
    if bs == 0:
        return
    padded = triton.next_power_of_2(rows)
    _build_tree_kernel[(bs,)](
        logp, ids, bonus, seq_lens,
        out.tokens, out.positions, out.parent, out.depth, out.rank,
        out.next_token, out.next_sibling, out.ancestors, out.conv_ancestors, out.num_nodes,
        rows,
        (width + 1) ** (depths - 1),
        D=depths, K=width, NP=padded, WORDS=out.ancestors.shape[2], CONV=out.conv_ancestors.shape[2],
        KEEP_SPINE=keep_spine,
        num_warps=1,
    )  # fmt: skip
