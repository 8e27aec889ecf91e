"""The target of the self-test pair: a small Qwen3.5-style hybrid text model in plain PyTorch, made for training.

Six Gated-DeltaNet layers and two full-attention layers, every fourth layer full attention, as in the large models of
this family. Module names are the checkpoint's tensor names, so `state_dict()` is the checkpoint that SGLang loads as
`Qwen3_5ForCausalLM`.

Two ways to run it, which the tests hold equal:
* `forward`: whole sequences; the delta rule is computed in chunks and is differentiable;
* `step`: one token a sequence with explicit states, to generate text.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class TargetConfig:
    vocab_size: int = 2048
    hidden_size: int = 256
    intermediate_size: int = 448
    num_hidden_layers: int = 8
    full_attention_interval: int = 4
    num_attention_heads: int = 2
    num_key_value_heads: int = 1
    head_dim: int = 256
    partial_rotary_factor: float = 0.25
    rope_theta: float = 10000.0
    linear_num_key_heads: int = 2
    linear_num_value_heads: int = 4
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_conv_kernel_dim: int = 4
    rms_norm_eps: float = 1e-6
    chunk: int = 128

    @property
    def key_dim(self) -> int:
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def value_dim(self) -> int:
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def rotary_dim(self) -> int:
        return int(self.head_dim * self.partial_rotary_factor)

    def is_attention(self, layer: int) -> bool:
        return (layer + 1) % self.full_attention_interval == 0

    def as_dict(self) -> dict:
        return asdict(self)


class GemmaNorm(nn.Module):
    """RMSNorm whose stored weight is the offset from one."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        return y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps) * (1 + self.weight.float())


class GatedNorm(nn.Module):
    """RMSNorm of each value head, then the gate: norm(x) * w * silu(z)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps) * self.weight.float()
        return y * F.silu(z.float())


def l2norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def delta_rule_sequential(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """The recurrence itself, one token after the other: the oracle of `delta_rule_chunked`.

    q, k, v: [B, H, T, D]; g (log decay) and beta: [B, H, T].
    """
    batch, heads, length, _ = q.shape
    state = q.new_zeros(batch, heads, k.shape[-1], v.shape[-1])
    outputs = []
    for t in range(length):
        state = state * g[:, :, t, None, None].exp()
        delta = (v[:, :, t] - torch.einsum("bhkv,bhk->bhv", state, k[:, :, t])) * beta[:, :, t, None]
        state = state + k[:, :, t, :, None] * delta[:, :, None, :]
        outputs.append(torch.einsum("bhkv,bhk->bhv", state, q[:, :, t]))
    return torch.stack(outputs, dim=2)


def unit_lower_inverse(system: Tensor) -> Tensor:
    """Inverse of unit lower triangular matrices [..., n, n], n a power of two, by matrix products alone.

    Diagonal blocks of size s are inverted already; two of them and the block below join to one of size 2s:
    [[A, 0], [C, B]]^-1 = [[A^-1, 0], [-B^-1 C A^-1, B^-1]].
    """
    size = system.shape[-1]
    index = torch.arange(size, device=system.device)
    inverse = torch.eye(size, dtype=system.dtype, device=system.device).expand_as(system)
    span = 1
    while span < size:
        same = index[:, None] // (2 * span) == index[None, :] // (2 * span)
        below = same & (index[:, None] // span > index[None, :] // span)
        inverse = inverse - inverse @ (system * below) @ inverse
        span *= 2
    return inverse


def delta_rule_chunked(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, chunk: int) -> Tensor:
    """The same in chunks: inside a chunk one unit-triangular system, between chunks one state."""
    batch, heads, wanted, dim_k = q.shape
    short = -wanted % chunk
    if short:  # rows of zeros write nothing and decay nothing
        q, k, v = (F.pad(x, (0, 0, 0, short)) for x in (q, k, v))
        g, beta = (F.pad(x, (0, short)) for x in (g, beta))
    count = (wanted + short) // chunk
    q, k, v = (x.reshape(batch, heads, count, chunk, -1) for x in (q, k, v))
    beta = beta.reshape(batch, heads, count, chunk, 1)
    decay = g.reshape(batch, heads, count, chunk).cumsum(-1)
    lower = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).tril()
    ratio = (decay[..., :, None] - decay[..., None, :]).masked_fill(~lower, float("-inf")).exp()
    eye = torch.eye(chunk, dtype=q.dtype, device=q.device)
    system = eye + (beta * (k @ k.mT) * ratio).tril(-1)
    solved = unit_lower_inverse(system)
    value = solved @ (beta * v)
    key = solved @ (beta * decay.exp()[..., None] * k)
    inside = (q @ k.mT) * ratio
    q_decayed = q * decay.exp()[..., None]
    k_to_end = k * (decay[..., -1:] - decay).exp()[..., None]
    end = decay[..., -1].exp()[..., None, None]
    state = q.new_zeros(batch, heads, dim_k, v.shape[-1])
    outputs = []
    for c in range(count):
        new = value[:, :, c] - key[:, :, c] @ state
        outputs.append(q_decayed[:, :, c] @ state + inside[:, :, c] @ new)
        state = state * end[:, :, c] + k_to_end[:, :, c].mT @ new
    return torch.cat(outputs, dim=2)[:, :, :wanted]


class GatedDeltaNet(nn.Module):
    def __init__(self, config: TargetConfig) -> None:
        super().__init__()
        c = self.config = config
        conv_dim = 2 * c.key_dim + c.value_dim
        self.in_proj_qkv = nn.Linear(c.hidden_size, conv_dim, bias=False)
        self.in_proj_z = nn.Linear(c.hidden_size, c.value_dim, bias=False)
        self.in_proj_b = nn.Linear(c.hidden_size, c.linear_num_value_heads, bias=False)
        self.in_proj_a = nn.Linear(c.hidden_size, c.linear_num_value_heads, bias=False)
        self.conv1d = nn.Conv1d(conv_dim, conv_dim, c.linear_conv_kernel_dim, groups=conv_dim, bias=False)
        self.A_log = nn.Parameter(torch.empty(c.linear_num_value_heads).uniform_(1, 16).log())
        step = torch.empty(c.linear_num_value_heads).uniform_(-6.9, -2.3).exp()
        self.dt_bias = nn.Parameter(step + torch.log(-torch.expm1(-step)))
        self.norm = GatedNorm(c.linear_value_head_dim, c.rms_norm_eps)
        self.out_proj = nn.Linear(c.value_dim, c.hidden_size, bias=False)

    def gates(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Log decay and write strength, [..., value heads], in float32."""
        step = F.softplus(self.in_proj_a(x).float() + self.dt_bias.float())
        return -self.A_log.float().exp() * step, torch.sigmoid(self.in_proj_b(x).float())

    def heads(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split the convolved projection into normalised q, k and v with one entry for each value head."""
        c = self.config
        q, k, v = mixed.float().split([c.key_dim, c.key_dim, c.value_dim], dim=-1)
        q = l2norm(q.unflatten(-1, (c.linear_num_key_heads, -1))) * c.linear_key_head_dim**-0.5
        k = l2norm(k.unflatten(-1, (c.linear_num_key_heads, -1)))
        group = c.linear_num_value_heads // c.linear_num_key_heads
        q, k = (x.repeat_interleave(group, dim=-2) for x in (q, k))
        return q, k, v.unflatten(-1, (c.linear_num_value_heads, -1))

    def finish(self, out: Tensor, x: Tensor) -> Tensor:
        z = self.in_proj_z(x).unflatten(-1, (self.config.linear_num_value_heads, -1))
        return self.out_proj(self.norm(out, z).flatten(-2).to(x.dtype))

    def forward(self, x: Tensor) -> Tensor:
        width = self.config.linear_conv_kernel_dim
        mixed = F.pad(self.in_proj_qkv(x), (0, 0, width - 1, 0))
        length = x.shape[1]
        weight = self.conv1d.weight.to(mixed.dtype)
        mixed = F.silu(sum(mixed[:, j : j + length] * weight[:, 0, j] for j in range(width)))
        g, beta = self.gates(x)
        q, k, v = self.heads(mixed)
        with torch.autocast(x.device.type, enabled=False):
            out = delta_rule_chunked(*(y.transpose(1, 2) for y in (q, k, v, g, beta)), chunk=self.config.chunk)
        return self.finish(out.transpose(1, 2), x)

    def new_state(self, batch: int, device: torch.device) -> dict[str, Tensor]:
        c = self.config
        conv_dim = 2 * c.key_dim + c.value_dim
        heads, dim_k, dim_v = c.linear_num_value_heads, c.linear_key_head_dim, c.linear_value_head_dim
        return {
            "conv": torch.zeros(batch, c.linear_conv_kernel_dim, conv_dim, device=device),
            "state": torch.zeros(batch, heads, dim_k, dim_v, device=device),
        }

    def step(self, x: Tensor, cache: dict[str, Tensor]) -> Tensor:
        conv, state = cache["conv"], cache["state"]
        conv.copy_(conv.roll(-1, dims=1))
        conv[:, -1] = self.in_proj_qkv(x)
        mixed = F.silu((conv * self.conv1d.weight[:, 0].T.float()).sum(1))
        g, beta = self.gates(x)
        q, k, v = self.heads(mixed)
        with torch.autocast(x.device.type, enabled=False):
            state.mul_(g.exp()[..., None, None])
            delta = (v - torch.einsum("bhkv,bhk->bhv", state, k)) * beta[..., None]
            state.add_(k[..., :, None] * delta[..., None, :])
            out = torch.einsum("bhkv,bhk->bhv", state, q)
        return self.finish(out, x)


def rotary_table(length: int, dim: int, theta: float, device: torch.device) -> tuple[Tensor, Tensor]:
    inverse = 1.0 / theta ** (torch.arange(0, dim, 2, device=device).float() / dim)
    angle = torch.arange(length, device=device).float()[:, None] * inverse
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Neox-style rotation of the first 2 * cos.shape[-1] features of x [..., T, D]."""
    half = cos.shape[-1]
    x = x.float()
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)


class GatedAttention(nn.Module):
    def __init__(self, config: TargetConfig) -> None:
        super().__init__()
        c = self.config = config
        self.q_proj = nn.Linear(c.hidden_size, 2 * c.num_attention_heads * c.head_dim, bias=False)
        self.k_proj = nn.Linear(c.hidden_size, c.num_key_value_heads * c.head_dim, bias=False)
        self.v_proj = nn.Linear(c.hidden_size, c.num_key_value_heads * c.head_dim, bias=False)
        self.o_proj = nn.Linear(c.num_attention_heads * c.head_dim, c.hidden_size, bias=False)
        self.q_norm = GemmaNorm(c.head_dim, c.rms_norm_eps)
        self.k_norm = GemmaNorm(c.head_dim, c.rms_norm_eps)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """x [B, T, hidden] -> rotated q, k, v as [B, H, T, D] and the output gate [B, T, H * D]."""
        c = self.config
        q, gate = self.q_proj(x).unflatten(-1, (c.num_attention_heads, -1)).chunk(2, dim=-1)
        k, v = (p(x).unflatten(-1, (c.num_key_value_heads, -1)) for p in (self.k_proj, self.v_proj))
        q, k = (rotate(y.transpose(1, 2), cos, sin) for y in (self.q_norm(q), self.k_norm(k)))
        return q.to(v.dtype), k.to(v.dtype), v.transpose(1, 2), gate.flatten(-2)

    def finish(self, out: Tensor, gate: Tensor) -> Tensor:
        return self.o_proj(out.transpose(1, 2).flatten(-2) * torch.sigmoid(gate.float()).to(gate.dtype))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v, gate = self.project(x, cos, sin)
        group = self.config.num_attention_heads // self.config.num_key_value_heads
        k, v = (y.repeat_interleave(group, dim=1) for y in (k, v))
        return self.finish(F.scaled_dot_product_attention(q, k, v, is_causal=True), gate)

    def new_state(self, batch: int, length: int, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
        shape = (batch, self.config.num_key_value_heads, length, self.config.head_dim)
        return {name: torch.zeros(shape, device=device, dtype=dtype) for name in ("k", "v")}

    def step(self, x: Tensor, cache: dict[str, Tensor], position: int, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v, gate = self.project(x[:, None], cos[position : position + 1], sin[position : position + 1])
        cache["k"][:, :, position] = k[:, :, 0].to(cache["k"].dtype)
        cache["v"][:, :, position] = v[:, :, 0].to(cache["v"].dtype)
        keys, values = (cache[name][:, :, : position + 1].to(q.dtype) for name in ("k", "v"))
        group = self.config.num_attention_heads // self.config.num_key_value_heads
        keys, values = (y.repeat_interleave(group, dim=1) for y in (keys, values))
        return self.finish(F.scaled_dot_product_attention(q, keys, values), gate)[:, 0]


class MLP(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    def __init__(self, config: TargetConfig, index: int) -> None:
        super().__init__()
        self.attention = config.is_attention(index)
        if self.attention:
            self.self_attn = GatedAttention(config)
        else:
            self.linear_attn = GatedDeltaNet(config)
        self.mlp = MLP(config.hidden_size, config.intermediate_size)
        self.input_layernorm = GemmaNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = GemmaNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        y = self.input_layernorm(x)
        x = x + (self.self_attn(y, cos, sin) if self.attention else self.linear_attn(y))
        return x + self.mlp(self.post_attention_layernorm(x))

    def step(self, x: Tensor, cache: dict[str, Tensor], position: int, cos: Tensor, sin: Tensor) -> Tensor:
        y = self.input_layernorm(x)
        if self.attention:
            x = x + self.self_attn.step(y, cache, position, cos, sin)
        else:
            x = x + self.linear_attn.step(y, cache)
        return x + self.mlp(self.post_attention_layernorm(x))


class Body(nn.Module):
    def __init__(self, config: TargetConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = GemmaNorm(config.hidden_size, config.rms_norm_eps)


class Target(nn.Module):
    def __init__(self, config: TargetConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Body(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self._initialise()

    def _initialise(self) -> None:
        for name, parameter in self.named_parameters():
            if name.endswith("conv1d.weight"):
                nn.init.uniform_(parameter, -0.5, 0.5)
            elif parameter.ndim == 2:
                residual = name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight"))
                scale = 0.02 / (2 * self.config.num_hidden_layers) ** 0.5 if residual else 0.02
                nn.init.normal_(parameter, std=scale)

    def rotary(self, length: int) -> tuple[Tensor, Tensor]:
        device = self.lm_head.weight.device
        return rotary_table(length, self.config.rotary_dim, self.config.rope_theta, device)

    def forward(self, tokens: Tensor, capture: tuple[int, ...] = ()) -> tuple[Tensor, list[Tensor]]:
        """Final hidden states [B, T, hidden] and, for each layer of `capture`, the residual stream after it."""
        x = self.model.embed_tokens(tokens)
        cos, sin = self.rotary(tokens.shape[1])
        captured = []
        for index, layer in enumerate(self.model.layers):
            x = layer(x, cos, sin)
            if index in capture:
                captured.append(x)
        return self.model.norm(x), captured

    @torch.no_grad()
    def generate(self, prompt: Tensor, length: int, temperature: Tensor) -> Tensor:
        """Extend prompt [B, P] to [B, length], one token at a time; a row with temperature 0 takes the argmax."""
        batch, prompt_length = prompt.shape
        device, c = prompt.device, self.config
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        caches = [
            layer.self_attn.new_state(batch, length, device, dtype)
            if layer.attention
            else layer.linear_attn.new_state(batch, device)
            for layer in self.model.layers
        ]
        cos, sin = self.rotary(length)
        tokens = torch.zeros(batch, length, dtype=torch.long, device=device)
        tokens[:, :prompt_length] = prompt
        warm = temperature[:, None].clamp_min(1e-3)
        for position in range(length - 1):
            x = self.model.embed_tokens(tokens[:, position])
            for layer, cache in zip(self.model.layers, caches, strict=True):
                x = layer.step(x, cache, position, cos, sin)
            if position + 1 < prompt_length:
                continue
            logits = self.lm_head(self.model.norm(x)).float()[:, : c.vocab_size]
            noise = -torch.empty_like(logits).exponential_().log() * (temperature[:, None] > 0)
            tokens[:, position + 1] = (logits / warm.where(temperature[:, None] > 0, 1.0) + noise).argmax(-1)
        return tokens
