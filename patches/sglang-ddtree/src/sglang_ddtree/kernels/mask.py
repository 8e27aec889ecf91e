"""The tree's visibility in the mask SGLang's triton attention backend reads.

FULL_MASK: per request N rows of L_r + N cells, flat, one request after the other. The backend's kernel
reads only the last N cells of each row (``skip_prefix_custom_mask``), so only those are written.
"""

import torch
import triton
import triton.language as tl

from sglang_ddtree.kernels.buffers import TreeBuffers, check, require

_ROWS_PER_PROGRAM = 8


@triton.jit
def _tree_mask_kernel(
    ancestors_ptr, seq_lens_ptr, mask_ptr,
    rows,
    WORDS: tl.constexpr, NP: tl.constexpr, BP: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0)
    n = rows.to(tl.int64)
    other = tl.arange(0, BP)
    lens = tl.load(seq_lens_ptr + other, mask=other < request, other=0).to(tl.int64)
    base = tl.sum(tl.where(other < request, n * (lens + n), 0), 0)
    length = tl.load(seq_lens_ptr + request).to(tl.int64)
    col = tl.arange(0, NP)
    for i in range(ROWS):
        row = tl.program_id(1) * ROWS + i
        inside = (col < rows) & (row < rows)
        at = (request.to(tl.int64) * n + row) * WORDS + col // 64
        word = tl.load(ancestors_ptr + at, mask=inside, other=0)
        seen = (word >> (col % 64).to(tl.int64)) & 1
        tl.store(mask_ptr + base + row * (length + n) + length + col, seen.to(tl.int8), mask=inside)


def write_tree_mask(tree: TreeBuffers, seq_lens: torch.Tensor, mask: torch.Tensor) -> None:
    """Write the tail cells (request r, row i, column L_r + j) = "row i sees row j".

    tree: views of exactly the bs requests (``TreeBuffers.rows``); seq_lens int32 or int64 [bs], the
    lengths L_r before the round; mask uint8 or bool, flat, at least sum_r N (L_r + N) cells.
    """
    bs, rows = tree.tokens.shape
    check("ancestors", tree.ancestors, torch.int64, bs, rows, -1)
    check("seq_lens", seq_lens, seq_lens.dtype, bs)
    require(mask.dim() == 1 and mask.element_size() == 1, "the mask must be flat, one byte a cell")
    if bs == 0:
        return
    _tree_mask_kernel[(bs, triton.cdiv(rows, _ROWS_PER_PROGRAM))](
        tree.ancestors, seq_lens, mask.view(torch.int8),
        rows,
        WORDS=tree.ancestors.shape[2], NP=triton.next_power_of_2(rows), BP=triton.next_power_of_2(bs),
        ROWS=_ROWS_PER_PROGRAM,
        num_warps=1,
    )  # fmt: skip
