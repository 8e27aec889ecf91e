"""What a verified tree tells about narrower ones: accepted nodes by interval of rows, counted on the device.

Rows are emitted best-first, so the tree of m nodes is rows 1..m of any wider one, and its accepted path is the part
of the accepted path in those rows. Counted are the nodes beyond each next narrower width, and their squares.
"""

import torch
import triton
import triton.language as tl

from sglang_ddtree.kernels.buffers import check, require


@triton.jit
def _count_nested_kernel(
    accept_index_ptr, bounds_ptr, totals_ptr,
    rows, shapes, first, last, shape,
    W: tl.constexpr, WP: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, WP)
    index = tl.load(accept_index_ptr + request * W + lane, mask=lane < W, other=-1)
    row = tl.where(index >= 0, index - request.to(tl.int32) * rows, 0)
    tl.atomic_add(totals_ptr + shape, 1, sem="relaxed")
    for i in range(first, last):
        low = tl.load(bounds_ptr + 2 * i)
        high = tl.load(bounds_ptr + 2 * i + 1)
        nodes = tl.sum(((row > low) & (row <= high)).to(tl.int64), 0)
        tl.atomic_add(totals_ptr + shapes + i, nodes, sem="relaxed")
        tl.atomic_add(totals_ptr + 2 * shapes + i, nodes * nodes, sem="relaxed")


def count_nested(
    accept_index: torch.Tensor, rows: int, shape: int, intervals: range, bounds: torch.Tensor, totals: torch.Tensor
) -> None:
    """Add a round's accepted paths to the totals.

    accept_index int32 [bs, W], global rows (request * rows + row) of the paths, then -1, as accept_tree leaves it.
    shape: what was verified, counted once a request in totals[0]. intervals: which of the bounds int32 [S, 2] the tree
    covers; interval i is rows low < row <= high, its nodes go to totals[1, i], their squares to totals[2, i].
    totals int64 [3, S].
    """
    requests, width = accept_index.shape
    shapes = bounds.shape[0]
    check("accept_index", accept_index, torch.int32, requests, width)
    check("bounds", bounds, torch.int32, shapes, 2)
    check("totals", totals, torch.int64, 3, shapes)
    require(0 <= shape < shapes, f"shape {shape} of {shapes}")
    require(0 <= intervals.start <= intervals.stop <= shapes and intervals.step == 1, f"{intervals} of {shapes}")
    if requests == 0:
        return
    _count_nested_kernel[(requests,)](
        accept_index, bounds, totals,
        rows, shapes, intervals.start, intervals.stop, shape,
        W=width, WP=triton.next_power_of_2(width),
        num_warps=1,
    )  # fmt: skip
