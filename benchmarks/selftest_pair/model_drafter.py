"""The drafter of the self-test pair: DFlash (block diffusion) in plain PyTorch, made for training.

It fills a block of 16 positions in one pass. Slot 0 holds the last accepted token, slots 1..15 the mask token. Each
layer's attention sees the whole block in both directions and, as extra keys and values, the target's hidden features of
every earlier position. The drafter has no embedding and no head: it uses the target's. Module names are the tensor
names of the checkpoint, so `state_dict()` is what SGLang loads as `DFlashDraftModel`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.selftest_pair.model_target import MLP, rotary_table, rotate


@dataclass(frozen=True)
class DrafterConfig:
    hidden_size: int = 256
    intermediate_size: int = 768
    num_hidden_layers: int = 5
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 128
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    block_size: int = 16
    mask_token_id: int = 3
    target_layer_ids: tuple[int, ...] = (1, 3, 5, 6)
    num_target_layers: int = 8

    def as_dict(self) -> dict:
        return asdict(self)


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        return y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps) * self.weight.float()


class BlockAttention(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        c = self.config = config
        self.q_proj = nn.Linear(c.hidden_size, c.num_attention_heads * c.head_dim, bias=False)
        self.k_proj = nn.Linear(c.hidden_size, c.num_key_value_heads * c.head_dim, bias=False)
        self.v_proj = nn.Linear(c.hidden_size, c.num_key_value_heads * c.head_dim, bias=False)
        self.o_proj = nn.Linear(c.num_attention_heads * c.head_dim, c.hidden_size, bias=False)
        self.q_norm = RMSNorm(c.head_dim, c.rms_norm_eps)
        self.k_norm = RMSNorm(c.head_dim, c.rms_norm_eps)

    def keys_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        c = self.config
        k, v = (p(x).unflatten(-1, (c.num_key_value_heads, -1)) for p in (self.k_proj, self.v_proj))
        k = rotate(self.k_norm(k).transpose(1, 2), cos, sin).to(v.dtype)
        return k, v.transpose(1, 2)

    def forward(self, x: Tensor, context: Tensor, mask: Tensor, block_rope: tuple, context_rope: tuple) -> Tensor:
        c = self.config
        q = self.q_norm(self.q_proj(x).unflatten(-1, (c.num_attention_heads, -1))).transpose(1, 2)
        q = rotate(q, *block_rope)
        k, v = self.keys_values(x, *block_rope)
        context_k, context_v = self.keys_values(context, *context_rope)
        k, v = torch.cat([context_k, k], dim=2), torch.cat([context_v, v], dim=2)
        group = c.num_attention_heads // c.num_key_value_heads
        k, v = (y.repeat_interleave(group, dim=1) for y in (k, v))
        out = F.scaled_dot_product_attention(q.to(v.dtype), k, v, attn_mask=mask)
        return self.o_proj(out.transpose(1, 2).flatten(-2))


class DrafterLayer(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = BlockAttention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config.hidden_size, config.intermediate_size)

    def forward(self, x: Tensor, context: Tensor, mask: Tensor, block_rope: tuple, context_rope: tuple) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), context, mask, block_rope, context_rope)
        return x + self.mlp(self.post_attention_layernorm(x))


class Drafter(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(DrafterLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.fc = nn.Linear(len(config.target_layer_ids) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * config.num_hidden_layers) ** 0.5 if residual else 0.02)

    def forward(self, embed: nn.Embedding, tokens: Tensor, features: list[Tensor], anchors: Tensor) -> Tensor:
        """Hidden states [B, A, block - 1, hidden] of the masked slots for blocks that start at `anchors` [A].

        tokens [B, T] give the anchor tokens; features are the target's captured layers, each [B, T, hidden]. A block at
        position p sees the features of positions < p alone. All sequences of a batch share the anchors.
        """
        c = self.config
        batch, length = tokens.shape
        block, count = c.block_size, anchors.numel()
        context = self.hidden_norm(self.fc(torch.cat(features, dim=-1)))
        ids = torch.full((batch, count, block), c.mask_token_id, device=tokens.device)
        ids[:, :, 0] = tokens[:, anchors]
        positions = (anchors[:, None] + torch.arange(block, device=tokens.device)).flatten()
        cos, sin = rotary_table(length + block, c.head_dim, c.rope_theta, tokens.device)
        mask = block_mask(anchors, length, block)
        x = embed(ids.flatten(1))
        for layer in self.layers:
            x = layer(x, context, mask, (cos[positions], sin[positions]), (cos[:length], sin[:length]))
        return self.norm(x).unflatten(1, (count, block))[:, :, 1:]


def block_mask(anchors: Tensor, length: int, block: int) -> Tensor:
    """[A * block, length + A * block]: earlier context, and the own block in both directions."""
    owner = torch.arange(anchors.numel(), device=anchors.device).repeat_interleave(block)
    past = torch.arange(length, device=anchors.device)[None, :] < anchors[owner][:, None]
    return torch.cat([past, owner[:, None] == owner[None, :]], dim=1)
