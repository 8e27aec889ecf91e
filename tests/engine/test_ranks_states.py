"""Gated DeltaNet under tensor parallelism: a rank with half the heads has half of what one rank with all of them has.

The trees are the same on all ranks (test_ranks.py), so what is left to show is that no kernel lets a head depend on
how many there are beside it, in the outputs, in what is kept for a row, and in what is committed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import ModuleType

import numpy as np
import pytest
import torch
from engine_trees import buffers_of, random_tree
from sglang_ddtree.kernels.buffers import TreeBuffers
from sglang_ddtree.kernels.hybrid import HybridTree

RANKS, LAYERS, SLOTS, HEADS, VALUE_HEADS, DIM, TAPS = 2, 2, 5, 2, 4, 16, 3
BS, ROWS = 2, 9
KEYS, VALUES = HEADS * DIM, VALUE_HEADS * DIM


@dataclasses.dataclass(frozen=True)
class Layers:
    """Inputs, weights and states of all layers for `heads` key heads; the rows are the same for all layers."""

    heads: int
    mixed: torch.Tensor  # [BS * ROWS, C] before the convolution, [q, k, v]
    a: torch.Tensor  # [BS * ROWS, HV]
    b: torch.Tensor
    weight: torch.Tensor  # [C, TAPS + 1]
    head: torch.Tensor  # [HV], both A_log and dt_bias
    conv_pool: torch.Tensor  # [L, S, C, TAPS]
    ssm_pool: torch.Tensor  # [L, S, HV, V, K]

    @classmethod
    def whole(cls) -> Layers:
        torch.manual_seed(4)
        channels, rows = 2 * KEYS + VALUES, BS * ROWS
        return cls(
            HEADS, torch.randn(rows, channels), torch.randn(rows, VALUE_HEADS), torch.randn(rows, VALUE_HEADS),
            torch.randn(channels, TAPS + 1), torch.randn(VALUE_HEADS), torch.randn(LAYERS, SLOTS, channels, TAPS),
            torch.randn(LAYERS, SLOTS, VALUE_HEADS, DIM, DIM),
        )  # fmt: skip

    def of(self, rank: int) -> Layers:
        """A rank's part: of the heads a contiguous share, of the channels one of q, k and v each."""

        def heads(x: torch.Tensor, axis: int) -> torch.Tensor:
            return x.chunk(RANKS, dim=axis)[rank].contiguous()

        def channels(x: torch.Tensor, axis: int) -> torch.Tensor:
            parts = x.split([KEYS, KEYS, VALUES], dim=axis)
            return torch.cat([heads(part, axis) for part in parts], dim=axis).contiguous()

        return Layers(
            self.heads // RANKS, channels(self.mixed, 1), heads(self.a, 1), heads(self.b, 1), channels(self.weight, 0),
            heads(self.head, 0), channels(self.conv_pool, 2), heads(self.ssm_pool, 2),
        )  # fmt: skip

    @property
    def sizes(self) -> list[int]:
        keys = self.heads * DIM
        return [keys, keys, self.mixed.shape[1] - 2 * keys]


def joined(parts: list[torch.Tensor], axis: int) -> torch.Tensor:
    return torch.cat(parts, dim=axis)


def joined_channels(parts: list[torch.Tensor], axis: int) -> torch.Tensor:
    """The ranks' [q, k, v] channels back in one rank's order."""
    keys = KEYS // RANKS
    split = [part.split([keys, keys, VALUES // RANKS], dim=axis) for part in parts]
    return torch.cat([torch.cat([one[which] for one in split], dim=axis) for which in range(3)], dim=axis)


@pytest.fixture
def trees() -> TreeBuffers:
    rng = np.random.default_rng(6)
    return buffers_of([random_tree(rng, ROWS, 6) for _ in range(BS)], [5] * BS)


SLOTS_OF = torch.tensor([3, 1], dtype=torch.int32)
LAST = torch.tensor([4, 8])


def recorded(layers: Layers, trees: TreeBuffers) -> dict[str, torch.Tensor]:
    """One verify over all layers and one commit, by the kernels that keep records."""
    conv_pool, ssm_pool = layers.conv_pool.clone(), layers.ssm_pool.clone()
    hybrid = HybridTree.allocate(trees, conv_pool, ssm_pool, layers.heads)
    rows, outs, convs = BS * ROWS, [], []
    for layer in range(LAYERS):
        after = hybrid.conv(
            layers.mixed.view(BS, ROWS, -1).transpose(1, 2), conv_pool[layer], layers.weight, None, "silu",
            conv_state_indices=SLOTS_OF,
        )  # fmt: skip
        convs.append(after.transpose(1, 2).reshape(rows, -1))
        q, k, v = (t.view(1, rows, -1, DIM) for t in convs[-1].split(layers.sizes, dim=-1))
        outs.append(
            hybrid.verify(
                A_log=layers.head, dt_bias=layers.head, q=q, k=k, v=v, a=layers.a, b=layers.b,
                ssm_states=ssm_pool[layer], cache_indices=SLOTS_OF,
            )
        )  # fmt: skip
    hybrid.commit(LAST, SLOTS_OF, None, None)
    return {"conv": torch.stack(convs), "out": torch.stack(outs), "conv_pool": conv_pool, "ssm_pool": ssm_pool}


def snapshots(layers: Layers, trees: TreeBuffers, stock: Callable[[str], ModuleType]) -> dict[str, torch.Tensor]:
    """One verify of layer 0 by SGLang's own kernels, and the state after the last accepted row of each request."""
    windows = torch.zeros(BS, ROWS, layers.mixed.shape[1], TAPS)
    after = stock("mamba/causal_conv1d_triton").causal_conv1d_update(
        layers.mixed.view(BS, ROWS, -1).transpose(1, 2).contiguous(), layers.conv_pool[0].clone(), layers.weight, None,
        "silu", conv_state_indices=SLOTS_OF, intermediate_conv_window=windows,
        intermediate_state_indices=torch.arange(BS, dtype=torch.int32), retrieve_next_token=trees.next_token.int(),
        retrieve_next_sibling=trees.next_sibling.int(), retrieve_parent_token=torch.zeros(BS, ROWS, dtype=torch.int32),
    )  # fmt: skip
    conv = after.transpose(1, 2).reshape(BS * ROWS, -1)
    q, k, v = (t.view(1, BS * ROWS, -1, DIM) for t in conv.split(layers.sizes, dim=-1))
    states = torch.zeros(BS, ROWS, *layers.ssm_pool.shape[2:])
    out = stock("attention/fla/fused_sigmoid_gating_recurrent").fused_sigmoid_gating_delta_rule_update(
        A_log=layers.head, a=layers.a, dt_bias=layers.head, softplus_beta=1.0, softplus_threshold=20.0, q=q, k=k, v=v,
        b=layers.b, initial_state_source=layers.ssm_pool[0], initial_state_indices=SLOTS_OF,
        cu_seqlens=torch.arange(BS + 1, dtype=torch.int32) * ROWS, use_qk_l2norm_in_kernel=True,
        disable_state_update=True, intermediate_states_buffer=states,
        intermediate_state_indices=torch.arange(BS, dtype=torch.int32), cache_steps=ROWS,
        retrieve_parent_token=trees.parent,
    )  # fmt: skip
    at = (torch.arange(BS), LAST)
    return {"conv": conv[None], "out": out[None], "conv_pool": windows[at][None], "ssm_pool": states[at][None]}


AXES = {"conv": 2, "out": 3, "conv_pool": 2, "ssm_pool": 2}


@pytest.mark.parametrize("kept", ["records", "snapshots"])
def test_ranks_have_the_parts_of_one_rank_bit_for_bit(
    kept: str, trees: TreeBuffers, stock_kernel: Callable[[str], ModuleType]
) -> None:
    def run(layers: Layers) -> dict[str, torch.Tensor]:
        return recorded(layers, trees) if kept == "records" else snapshots(layers, trees, stock_kernel)

    whole = Layers.whole()
    want, parts = run(whole), [run(whole.of(rank)) for rank in range(RANKS)]
    for name, axis in AXES.items():
        join = joined_channels if name.startswith("conv") else joined
        assert torch.equal(join([part[name] for part in parts], axis), want[name]), name
    assert not torch.equal(want["ssm_pool"][0], whole.ssm_pool[0][: len(want["ssm_pool"][0])])  # something was computed
    assert not torch.equal(parts[0]["ssm_pool"], parts[1]["ssm_pool"])
