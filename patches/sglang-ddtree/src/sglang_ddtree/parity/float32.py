"""Let SGLang's layers run in float32: its fused CUDA norms and activations take 16-bit tensors only.

In float32 two orders of summation differ by far less than the gap between a target's two best tokens, so a
tree's tokens must be plain decoding's, one by one. Triton's products would default to TF32; the environment
variable keeps them exact.
"""

from __future__ import annotations

import itertools

import torch

CHUNK = 64  # tokens between two states that the prefix cache may keep

ENVIRONMENT = {"TRITON_F32_DEFAULT": "ieee", "NVIDIA_TF32_OVERRIDE": "0", "SGLANG_MAMBA_CONV_DTYPE": "float32"}


def use_native_layers() -> None:
    from sglang.srt.layers.activation import SiluAndMul
    from sglang.srt.layers.attention.linear.kernels import gdn_triton
    from sglang.srt.layers.layernorm import GemmaRMSNorm, RMSNorm
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding

    for layer in (SiluAndMul, GemmaRMSNorm, RMSNorm, RotaryEmbedding):
        layer.forward_cuda = layer.forward_native
    torch.Tensor.bfloat16 = lambda self: self  # the eager runner casts a draft's input embeddings
    gdn_triton.chunk_gated_delta_rule = gated_delta_rule


def gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    initial_state: torch.Tensor,
    initial_state_indices: torch.Tensor,
    cu_seqlens: torch.Tensor,
    **_options: object,
) -> tuple[torch.Tensor, None, torch.Tensor]:
    """The prompt's recurrence token by token, in place of the chunked kernel, which takes no float32.

    q, k [1, T, H, K]; v [1, T, HV, V]; g (log decay), beta [1, T, HV]; initial_state [slots, HV, V, K] is updated in
    place at initial_state_indices; returns outputs, None and the states at the start of every 64 tokens, as it does.
    """
    repeat = v.shape[2] // q.shape[2]
    scale = k.shape[-1] ** -0.5
    q, k = (torch.nn.functional.normalize(x[0].float(), dim=-1, eps=1e-6) for x in (q, k))
    q, k = (x.repeat_interleave(repeat, dim=1) for x in (q, k))
    out, starts = torch.empty_like(v[0], dtype=torch.float32), []
    ends = cu_seqlens.tolist()
    for row, (begin, end) in enumerate(itertools.pairwise(ends)):
        slot = initial_state_indices[row]
        state = initial_state[slot].float().clone()
        for at in range(begin, end):
            if (at - begin) % CHUNK == 0:
                starts.append(state)
            state = state * g[0, at].float().exp()[:, None, None]
            seen = torch.einsum("hvk,hk->hv", state, k[at])
            delta = (v[0, at].float() - seen) * beta[0, at].float()[:, None]
            state = state + delta[:, :, None] * k[at][:, None, :]
            out[at] = torch.einsum("hvk,hk->hv", state, q[at]) * scale
        initial_state[slot] = state.to(initial_state.dtype)
    return out.to(v.dtype)[None], None, torch.stack(starts)[None] if starts else initial_state[:0][None]
