"""The suite's float32 prefill against the reference recurrence."""

from __future__ import annotations

import numpy as np
import torch
from sglang_ddtree.parity.float32 import CHUNK, gated_delta_rule


def naive(q, k, v, g, beta, state):  # type: ignore[no-untyped-def]
    """One sequence in float64: q, k [T, HV, K] normalised; state [HV, V, K]."""
    out = []
    for t in range(len(v)):
        state = state * np.exp(g[t])[:, None, None]
        delta = (v[t] - np.einsum("hvk,hk->hv", state, k[t])) * beta[t][:, None]
        state = state + delta[:, :, None] * k[t][:, None, :]
        out.append(np.einsum("hvk,hk->hv", state, q[t]) / np.sqrt(k.shape[-1]))
    return np.stack(out), state


def test_two_sequences_with_grouped_heads_and_kept_states() -> None:
    generator = torch.Generator().manual_seed(3)
    heads, value_heads, width, lengths = 2, 4, 8, [3, CHUNK + 5]
    total = sum(lengths)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    q, k, v = draw(1, total, heads, width), draw(1, total, heads, width), draw(1, total, value_heads, width)
    g, beta = -draw(1, total, value_heads).abs(), draw(1, total, value_heads).sigmoid()
    pool = draw(4, value_heads, width, width)
    before = pool.clone()
    out, none, starts = gated_delta_rule(
        q,
        k,
        v,
        g,
        beta,
        initial_state=pool,
        initial_state_indices=torch.tensor([2, 0]),
        cu_seqlens=torch.tensor([0, 3, total]),
    )
    assert none is None
    assert starts.shape == (1, 3, value_heads, width, width)
    assert torch.equal(starts[0, 0], before[2])
    assert torch.equal(starts[0, 1], before[0])
    assert torch.equal(pool[1], before[1])
    unit = lambda x: (x[0] / x[0].norm(dim=-1, keepdim=True)).repeat_interleave(2, dim=1).double().numpy()  # noqa: E731
    for slot, (begin, end) in ((2, (0, 3)), (0, (3, total))):
        mine = [x[0, begin:end].double().numpy() for x in (v, g, beta)]
        want, state = naive(unit(q)[begin:end], unit(k)[begin:end], *mine, before[slot].double().numpy())
        np.testing.assert_allclose(out[0, begin:end].numpy(), want, atol=2e-5)
        np.testing.assert_allclose(pool[slot].numpy(), state, atol=2e-5)
