"""The hybrid kernels behind SGLang's calls, in the shapes its backend passes."""

from __future__ import annotations

import ast
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_trees import buffers_of, random_tree
from sglang_ddtree.kernels import gdn
from sglang_ddtree.kernels.buffers import TreeBuffers
from sglang_ddtree.kernels.hybrid import HybridTree

LAYERS, SLOTS, HEADS, VALUE_HEADS, DIM = 3, 4, 1, 2, 16
CHANNELS = 2 * HEADS * DIM + VALUE_HEADS * DIM
BS, ROWS, BATCH = 2, 9, 4


@pytest.fixture
def hybrid() -> HybridTree:
    rng = np.random.default_rng(1)
    torch.manual_seed(1)
    tree = TreeBuffers.allocate(BATCH, ROWS, "cpu")
    filled = buffers_of([random_tree(rng, ROWS, 6) for _ in range(BS)], [5] * BS)
    for name, tensor in vars(filled).items():
        getattr(tree, name)[:BS] = tensor
    conv_pool = torch.randn(LAYERS, SLOTS, CHANNELS, 3)
    return HybridTree.allocate(tree, conv_pool, torch.randn(LAYERS, SLOTS, VALUE_HEADS, DIM, DIM), HEADS)


def test_a_layer_and_the_commit_equal_the_plain_calls(hybrid: HybridTree) -> None:
    mixed, weight = torch.randn(BS * ROWS, CHANNELS), torch.randn(CHANNELS, 4)
    slots = torch.tensor([2, 1], dtype=torch.int32)
    gates, head = torch.randn(2, BS * ROWS, VALUE_HEADS), torch.randn(VALUE_HEADS)
    plain = gdn.GdnRecords.allocate(LAYERS, BATCH, ROWS, HEADS, VALUE_HEADS, DIM, DIM, CHANNELS, torch.float32, "cpu")
    tree = hybrid.tree.rows(BS)
    for layer in range(LAYERS):
        # As GDNAttnBackend.forward_extend does it.
        processed = hybrid.conv(
            mixed.view(BS, ROWS, -1).transpose(1, 2), hybrid.conv_pool[layer], weight, None, "silu",
            conv_state_indices=slots, intermediate_conv_window=None, retrieve_next_token=tree.next_token,
        )  # fmt: skip
        after = processed.transpose(1, 2).view(BS * ROWS, -1)
        want = gdn.conv_tree(mixed, hybrid.conv_pool[layer], weight, None, slots, tree.conv_ancestors, plain.x[layer])
        assert torch.equal(after, want)
        q, k, v = after.split([HEADS * DIM, HEADS * DIM, VALUE_HEADS * DIM], dim=-1)
        q, k, v = (t.view(1, BS * ROWS, -1, DIM) for t in (q, k, v))
        args = {"q": q, "k": k, "v": v, "a": gates[0], "b": gates[1], "ssm_states": hybrid.ssm_pool[layer]}
        out = hybrid.verify(A_log=head, dt_bias=head, cache_indices=slots, intermediate_states_buffer=None, **args)
        want = gdn.gdn_tree(a_log=head, dt_bias=head, state_indices=slots, ancestors=tree.ancestors,
                            record=plain.layer(layer), **args)  # fmt: skip
        assert torch.equal(out, want)
    for mine, other in zip(vars(hybrid.records).values(), vars(plain).values(), strict=True):
        assert torch.equal(mine, other)
    states, windows = hybrid.ssm_pool.clone(), hybrid.conv_pool.clone()
    last = torch.tensor([3, 8])
    hybrid.commit(last, slots, None, None)
    gdn.commit_tree(plain, tree.ancestors, tree.conv_ancestors, last, states, windows, slots)
    assert torch.equal(hybrid.ssm_pool, states)
    assert torch.equal(hybrid.conv_pool, windows)


def test_a_state_of_no_layer_is_refused(hybrid: HybridTree) -> None:
    x = torch.randn(BS, CHANNELS, ROWS)
    with pytest.raises(ValueError, match="no layer"):
        hybrid.conv(x, torch.randn(SLOTS, CHANNELS, 3), torch.randn(CHANNELS, 4), None, "silu",
                    conv_state_indices=torch.zeros(BS, dtype=torch.int32))  # fmt: skip
    with pytest.raises(ValueError, match="SiLU"):
        hybrid.conv(x, hybrid.conv_pool[0], torch.randn(CHANNELS, 4), None, None,
                    conv_state_indices=torch.zeros(BS, dtype=torch.int32))  # fmt: skip


def test_sglang_passes_what_the_methods_take(sglang_src: Path) -> None:
    """The calls in the pinned backend's source, keyword by keyword."""
    source = (sglang_src / "sglang/srt/layers/attention/linear/gdn_backend.py").read_text()
    calls = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Call)]

    def keywords(name: str) -> list[set[str | None]]:
        return [{k.arg for k in c.keywords} for c in calls if ast.unparse(c.func).endswith(name)]

    verify = [k for k in keywords("kernel_dispatcher.target_verify") if "retrieve_parent_token" in k]
    assert len(verify) == 1
    assert {"A_log", "dt_bias", "q", "k", "v", "a", "b", "ssm_states", "cache_indices"} <= verify[0]
    conv = [k for k in keywords("causal_conv1d_update") if "retrieve_next_token" in k]
    assert len(conv) == 1
    assert "conv_state_indices" in conv[0]
