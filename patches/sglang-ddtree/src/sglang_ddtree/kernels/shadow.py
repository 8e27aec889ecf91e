"""What a tree would have accepted while the linear verifier decided.

A tree's greedy score needs tokens that are emitted later, so every request keeps a ring of the trees
whose score is still open, with a cursor in each. A round adds its tree and moves all cursors along the
tokens it committed; a cursor that finds no child, or a leaf, is scored. A round commits at least one
token and a tree is at most D deep, so a ring of D trees never overwrites an open one.

Open trees of a request that ends are dropped, not scored: the estimate is conditioned on round starts
at least a tree's score away from the end.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from sglang_ddtree.kernels.buffers import TreeBuffers, check, require


@dataclass(frozen=True)
class ShadowRing:
    """Open trees by request slot, and the counts.

    ``total`` int64 [4]: trees scored, nodes in them (roots excluded), sum of their scores, trees
    dropped. ``histogram`` int64 [D + 1]: trees by score.
    """

    tokens: torch.Tensor  # int32 [P, D, N]
    next_token: torch.Tensor  # int32 [P, D, N]
    next_sibling: torch.Tensor  # int32 [P, D, N]
    nodes: torch.Tensor  # int32 [P, D]
    cursor: torch.Tensor  # int32 [P, D], -1 = closed
    score: torch.Tensor  # int32 [P, D]
    head: torch.Tensor  # int32 [P]
    expected: torch.Tensor  # int64 [P], sequence length at the next round
    generation: torch.Tensor  # int64 [P]
    total: torch.Tensor
    histogram: torch.Tensor

    @classmethod
    def allocate(cls, slots: int, depths: int, width: int, device: torch.device | str) -> "ShadowRing":
        """For request slots 0..slots-1 and trees of ``width`` rows, at most ``depths`` deep."""

        def new(dtype: torch.dtype, *shape: int, fill: int = 0) -> torch.Tensor:
            return torch.full(shape, fill, dtype=dtype, device=device)

        i32, i64 = torch.int32, torch.int64
        ring = (slots, depths)
        return cls(
            tokens=new(i32, *ring, width), next_token=new(i32, *ring, width),
            next_sibling=new(i32, *ring, width), nodes=new(i32, *ring),
            cursor=new(i32, *ring, fill=-1), score=new(i32, *ring), head=new(i32, slots),
            expected=new(i64, slots, fill=-1), generation=new(i64, slots, fill=-1),
            total=new(i64, 4), histogram=new(i64, depths + 1),
        )  # fmt: skip


@triton.jit
def _shadow_kernel(
    tokens_ptr, next_token_ptr, next_sibling_ptr, nodes_ptr, cursor_ptr, score_ptr,
    head_ptr, expected_ptr, generation_ptr, total_ptr, histogram_ptr,
    t_tokens_ptr, t_next_token_ptr, t_next_sibling_ptr, t_num_nodes_ptr,
    req_pool_ptr, generations_ptr, seq_lens_ptr, out_tokens_ptr, commit_lens_ptr,
    rows, out_stride,
    D: tl.constexpr, DP: tl.constexpr, NP: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    slot = tl.load(req_pool_ptr + request).to(tl.int64)
    length = tl.load(seq_lens_ptr + request).to(tl.int64)
    commit = tl.load(commit_lens_ptr + request).to(tl.int32)
    generation = tl.load(generations_ptr + request)
    entry = tl.arange(0, DP)
    inside = entry < D
    ring = slot * D + entry

    # Another request's trees, or a gap in this one's rounds: drop what is open.
    same = (tl.load(generation_ptr + slot) == generation) & (tl.load(expected_ptr + slot) == length)
    cursor = tl.load(cursor_ptr + ring, mask=inside, other=-1)
    score = tl.load(score_ptr + ring, mask=inside, other=0)
    nodes = tl.load(nodes_ptr + ring, mask=inside, other=0)
    kept = tl.where(same, cursor, -1)
    dropped = tl.sum((cursor >= 0).to(tl.int32) - (kept >= 0).to(tl.int32), 0)
    cursor = kept

    # This round's tree takes the oldest place.
    head = tl.load(head_ptr + slot)
    lane = tl.arange(0, NP)
    fits = lane < rows
    to = (slot * D + head) * rows + lane
    tree = request * rows + lane
    tl.store(tokens_ptr + to, tl.load(t_tokens_ptr + tree, mask=fits, other=0).to(tl.int32), mask=fits)
    tl.store(next_token_ptr + to, tl.load(t_next_token_ptr + tree, mask=fits, other=-1).to(tl.int32), mask=fits)
    tl.store(next_sibling_ptr + to, tl.load(t_next_sibling_ptr + tree, mask=fits, other=-1).to(tl.int32), mask=fits)
    is_new = entry == head
    cursor = tl.where(is_new, 0, cursor)
    score = tl.where(is_new, 0, score)
    nodes = tl.where(is_new, tl.load(t_num_nodes_ptr + request) - 1, nodes)
    tl.debug_barrier()

    scored = 0
    offered = 0
    depth_sum = 0
    for j in range(commit):
        token = tl.load(out_tokens_ptr + request * out_stride + j).to(tl.int32)
        open_ = cursor >= 0
        child = tl.load(next_token_ptr + ring * rows + cursor, mask=open_, other=-1)
        seen = tl.load(tokens_ptr + ring * rows + child, mask=child >= 0, other=0)
        searching = (child >= 0) & (seen != token)
        while tl.max(searching.to(tl.int32), 0) > 0:
            after = tl.load(next_sibling_ptr + ring * rows + child, mask=searching, other=-1)
            child = tl.where(searching, after, child)
            seen = tl.load(tokens_ptr + ring * rows + child, mask=child >= 0, other=0)
            searching = (child >= 0) & (seen != token)
        found = open_ & (child >= 0)
        score = tl.where(found, score + 1, score)
        below = tl.load(next_token_ptr + ring * rows + child, mask=found, other=-1)
        done = open_ & ((child < 0) | (below < 0))
        scored += tl.sum(done.to(tl.int32), 0)
        offered += tl.sum(tl.where(done, nodes, 0), 0)
        depth_sum += tl.sum(tl.where(done, score, 0), 0)
        tl.atomic_add(histogram_ptr + score, tl.full([DP], 1, tl.int64), mask=done, sem="relaxed")
        cursor = tl.where(done, -1, tl.where(found, child, cursor))

    tl.store(cursor_ptr + ring, cursor, mask=inside)
    tl.store(score_ptr + ring, score, mask=inside)
    tl.store(nodes_ptr + ring, nodes, mask=inside)
    tl.store(head_ptr + slot, (head + 1) % D)
    tl.store(expected_ptr + slot, length + commit)
    tl.store(generation_ptr + slot, generation)
    what = tl.arange(0, 4)
    count = tl.where(what == 0, scored, tl.where(what == 1, offered, tl.where(what == 2, depth_sum, dropped)))
    tl.atomic_add(total_ptr + what, count.to(tl.int64), sem="relaxed")


def shadow_step(
    ring: ShadowRing,
    tree: TreeBuffers,
    req_pool_indices: torch.Tensor,
    generations: torch.Tensor,
    seq_lens: torch.Tensor,
    out_tokens: torch.Tensor,
    commit_lens: torch.Tensor,
) -> None:
    """Add the round's trees to the ring and score what its committed tokens decide.

    tree: views of exactly the bs requests; req_pool_indices, seq_lens (before the round) int32 or
    int64 [bs]; generations int64 [bs], a number no two requests of a slot share; out_tokens int64
    [bs, W], what the linear verifier emitted; commit_lens int32 [bs], how many of them.
    """
    bs, rows = tree.tokens.shape
    slots, depths, width = ring.tokens.shape
    require(rows == width, f"trees of {rows} rows but a ring for {width}")
    check("generations", generations, torch.int64, bs)
    check("out_tokens", out_tokens, torch.int64, bs, -1)
    check("commit_lens", commit_lens, torch.int32, bs)
    require(slots > 0, "the ring has no slots")
    if bs == 0:
        return
    _shadow_kernel[(bs,)](
        ring.tokens, ring.next_token, ring.next_sibling, ring.nodes, ring.cursor, ring.score,
        ring.head, ring.expected, ring.generation, ring.total, ring.histogram,
        tree.tokens, tree.next_token, tree.next_sibling, tree.num_nodes,
        req_pool_indices, generations, seq_lens, out_tokens, commit_lens,
        rows, out_tokens.stride(0),
        D=depths, DP=triton.next_power_of_2(depths), NP=triton.next_power_of_2(rows),
        num_warps=1,
    )  # fmt: skip
