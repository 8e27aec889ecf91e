"""No kernel depends on the order in which its programs run, which a GPU does not promise."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import program_order
import pytest
import torch
import triton
import triton.language as tl
from sglang_ddtree.kernels import checks, gdn

KERNELS = Path(__file__).parents[2] / "patches" / "sglang-ddtree" / "src" / "sglang_ddtree" / "kernels"
# Several programs along every axis of every grid: requests, blocks of rows, tiles of columns, blocks of channels.
SIZES = checks.Sizes("cpu", vocab=5000, requests=2, rows=(18,), k_dim=32, heads=1, value_heads=2, channels=520)
COMMIT = {"commit_state_kernel", "commit_conv_kernel"}
LAUNCHED = {
    "topk": {"_topk_chunks_kernel", "_topk_merge_chunks_kernel", "_merge_shards_kernel"},
    "build": {"_build_tree_kernel"},
    "slots_and_mask": {"_prepare_round_kernel", "_tree_mask_kernel"},
    "accept": {"_accept_kernel"},
    "sample": {
        "_gumbel_chunks_kernel", "_gumbel_merge_kernel", "_topk_chunks_kernel", "_topk_merge_chunks_kernel",
        "_draw_sorted_kernel",
    },
    "shadow": {"_shadow_kernel"},
    "nested": {"_count_nested_kernel"},
    "hybrid": {"gdn_tables_kernel", "gdn_tree_kernel", "conv_tree_kernel", *COMMIT},
}  # fmt: skip


@triton.jit
def _running_sum(cell_ptr):
    at = tl.program_id(0)
    before = tl.load(cell_ptr + at - 1, mask=at > 0, other=0)
    tl.store(cell_ptr + at, before + 1)


@triton.jit
def _last_wins(cell_ptr):
    tl.store(cell_ptr, tl.program_id(0) * 2 + tl.program_id(1))


@pytest.mark.parametrize(("kernel", "grid"), [(_running_sum, (4,)), (_last_wins, (1, 3)), (_last_wins, (2, 1))])
def test_an_order_that_matters_is_noticed(kernel: Any, grid: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    cells = torch.zeros(4, dtype=torch.int32)
    with program_order.in_every_order(monkeypatch), pytest.raises(program_order.OrderError, match=r"_sum|_wins"):
        kernel[grid](cells)


@pytest.mark.parametrize("name", sorted(checks.CHECKS))
def test_the_checks_hold_in_any_order(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with program_order.in_every_order(monkeypatch) as most:
        checks.CHECKS[name](SIZES)
    assert set(most) == LAUNCHED[name]
    assert min(most.values()) > 1, most


def test_the_commit_of_all_layers_with_a_tracked_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots and tracked slots lie side by side in one pool; one request is padding, one has nothing to track."""
    sizes = dataclasses.replace(SIZES, requests=3)
    layers, rows, dim, channels = 2, sizes.rows[0], sizes.k_dim, sizes.channels
    trees = checks.buffers_of(
        checks.HybridCase.random(sizes, rows, torch.float32, torch.float32, seed=4).trees, [5] * 3
    )
    generator = torch.Generator().manual_seed(0)
    records = gdn.GdnRecords.allocate(layers, 3, rows, 1, 2, dim, dim, channels, torch.float32, "cpu")
    for tensor in vars(records).values():
        tensor.normal_(generator=generator)
    states = torch.randn(layers, 7, 2, dim, dim, generator=generator)
    windows = torch.randn(layers, 7, channels, 3, generator=generator)
    last = trees.num_nodes - 1
    slots, tracked = torch.tensor([3, -1, 5]), torch.tensor([4, 1, 6])
    wanted = torch.stack([last[0], last[1], torch.tensor(-1, dtype=last.dtype)])
    before = states.clone()
    with program_order.in_every_order(monkeypatch) as most:
        gdn.commit_tree(records, trees.ancestors, trees.conv_ancestors, last, states, windows, slots, tracked, wanted)
    assert set(most) == COMMIT
    changed = {slot for slot in range(7) if not torch.equal(states[:, slot], before[:, slot])}
    assert changed == {3, 4, 5}


def test_no_kernel_is_left_out() -> None:
    named = {k for f in KERNELS.glob("*.py") for k in re.findall(r"def (\w+_kernel)\(", f.read_text())}
    assert set.union(*LAUNCHED.values()) == named
