"""The code that trained the self-test pair, and the weights that it left."""

from __future__ import annotations

import json

import numpy as np
import torch
from cpu_pair import FOLDER, pair, prompts
from safetensors.torch import load_file

from benchmarks.selftest_pair.export import drafter_config, target_config
from benchmarks.selftest_pair.model_drafter import Drafter, DrafterConfig, block_mask
from benchmarks.selftest_pair.model_target import Target, TargetConfig, delta_rule_chunked, delta_rule_sequential

SMALL = TargetConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=4,
    head_dim=16,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    chunk=8,
)


def test_chunked_delta_rule_equals_the_recurrence() -> None:
    torch.manual_seed(0)
    shape = (2, 3, 29)
    q, k, v = (torch.randn(*shape, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    k_unit = k / k.norm(dim=-1, keepdim=True)
    g = -torch.rand(shape, dtype=torch.float64)
    beta = torch.rand(shape, dtype=torch.float64)
    chunked = delta_rule_chunked(q, k_unit, v, g, beta, chunk=8)
    sequential = delta_rule_sequential(q, k_unit, v, g, beta)
    torch.testing.assert_close(chunked, sequential)
    weights = torch.randn_like(chunked)
    left = torch.autograd.grad((chunked * weights).sum(), (q, k, v), retain_graph=True)
    right = torch.autograd.grad((sequential * weights).sum(), (q, k, v))
    for a, b in zip(left, right, strict=True):
        torch.testing.assert_close(a, b)


def test_generation_follows_the_parallel_forward() -> None:
    torch.manual_seed(1)
    target = Target(SMALL).eval()
    prompt = torch.randint(0, 64, (2, 5))
    tokens = target.generate(prompt, 24, torch.zeros(2))
    hidden, _ = target(tokens)
    greedy = target.lm_head(hidden).argmax(-1)
    assert torch.equal(tokens[:, 5:], greedy[:, 4:-1])


def test_a_draft_block_sees_only_its_past_and_itself() -> None:
    torch.manual_seed(2)
    target = Target(SMALL).eval()
    config = DrafterConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, head_dim=8, block_size=4,
        target_layer_ids=(0, 2), num_target_layers=4,
    )  # fmt: skip
    drafter = Drafter(config).eval()
    tokens = torch.randint(4, 64, (1, 16))
    anchors = torch.tensor([5, 9])
    embed = target.model.embed_tokens

    def draft(ids: torch.Tensor) -> torch.Tensor:
        _, features = target(ids, capture=config.target_layer_ids)
        return drafter(embed, ids, features, anchors)

    before = draft(tokens)
    changed = tokens.clone()
    changed[0, 6:] = (changed[0, 6:] + 7) % 60 + 4
    after = draft(changed)
    torch.testing.assert_close(before[:, 0], after[:, 0])
    assert not torch.allclose(before[:, 1], after[:, 1])


def test_block_mask_shape() -> None:
    mask = block_mask(torch.tensor([0, 3]), length=6, block=2)
    assert mask.shape == (4, 10)
    assert mask[0].tolist() == [False] * 6 + [True, True, False, False]
    assert mask[3].tolist() == [True] * 3 + [False] * 3 + [False, False, True, True]


def test_the_committed_weights_are_the_models_of_the_training_code() -> None:
    """Names and shapes fit, and the NumPy engine computes what PyTorch does."""
    target, drafter = Target(TargetConfig()), Drafter(DrafterConfig())
    for model, folder in ((target, "target"), (drafter, "drafter")):
        state = load_file(FOLDER / folder / "model.safetensors")
        model.load_state_dict({name: tensor.float() for name, tensor in state.items()})
        model.eval().requires_grad_(False)
    ids = prompts()[0]
    hidden, features = target(torch.tensor([ids]), capture=drafter.config.target_layer_ids)
    engine = pair(np.float32)
    caches = engine.target.new_caches()
    logits, seen = engine.target.prefill(np.array(ids[:-1]), caches)
    np.testing.assert_allclose(logits, target.lm_head(hidden)[0, -2].numpy(), atol=1e-3)
    assert engine.drafter is not None
    context = engine.drafter.new_cache()
    engine.drafter.extend(seen, context)
    drafted = engine.drafter.draft(ids[-1], engine.target.embedding, context)
    anchors = torch.tensor([len(ids) - 1])
    want = drafter(target.model.embed_tokens, torch.tensor([ids]), features, anchors)[0, 0]
    np.testing.assert_allclose(drafted, want.numpy(), atol=1e-3)


def test_the_committed_configurations_are_the_exported_ones() -> None:
    for folder, config in (
        ("target", target_config(TargetConfig())),
        ("drafter", drafter_config(DrafterConfig(), 2048)),
    ):
        assert json.loads((FOLDER / folder / "config.json").read_text()) == config
