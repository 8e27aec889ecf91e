"""The hybrid target: Gated-DeltaNet and gated full-attention layers, one pass over the rows of a tree.

A pass reads the committed caches and returns, with the logits, everything that a later commit of any path needs. It
changes nothing by itself: whatever is not committed has not happened.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from sglang_ddtree.cpu.delta import Rows, conv, delta_rule, sigmoid, silu, softplus, unit
from sglang_ddtree.cpu.weights import load_config, load_weights

Arrays = dict[str, np.ndarray]
SUPPORTED = "Qwen3_5ForCausalLM"
PIECE = 32  # rows of a prompt in one pass: bounds the memory of the per-row states


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * weight


def rotate(x: np.ndarray, positions: np.ndarray, inverse: np.ndarray) -> np.ndarray:
    """Neox-style rotation of the first 2 * len(inverse) features of x [N, H, D]."""
    half = len(inverse)
    angle = positions[:, None, None] * inverse
    cos, sin = np.cos(angle).astype(x.dtype), np.sin(angle).astype(x.dtype)
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)


def attend(q: np.ndarray, k: np.ndarray, v: np.ndarray, mask: np.ndarray | None) -> np.ndarray:
    """q [N, H, D], k and v [M, KV, D], mask [N, M] (True: may look) -> [N, H, D]."""
    group = q.shape[1] // k.shape[1]
    out = np.empty_like(q)
    for head in range(q.shape[1]):
        scores = q[:, head] @ k[:, head // group].T * q.shape[-1] ** -0.5
        if mask is not None:
            scores = np.where(mask, scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        out[:, head] = weights @ v[:, head // group] / weights.sum(axis=-1, keepdims=True)
    return out


class KV:
    """Keys and values of the committed tokens, growing in place."""

    def __init__(self, heads: int, dim: int, dtype: type[np.floating[Any]]) -> None:
        self._data = np.empty((2, 256, heads, dim), dtype=dtype)
        self.length = 0

    def append(self, k: np.ndarray, v: np.ndarray) -> None:
        end = self.length + len(k)
        if end > self._data.shape[1]:
            grown = np.empty((2, max(end, 2 * self._data.shape[1]), *self._data.shape[2:]), dtype=self._data.dtype)
            grown[:, : self.length] = self._data[:, : self.length]
            self._data = grown
        self._data[0, self.length : end] = k
        self._data[1, self.length : end] = v
        self.length = end

    def with_rows(self, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The committed keys and values with the rows' own behind them."""
        committed = self._data[:, : self.length]
        return np.concatenate([committed[0], k]), np.concatenate([committed[1], v])


@dataclass
class Caches:
    """What one request has committed: KV of each attention layer, state and window of each recurrent one."""

    kv: dict[int, KV] = field(default_factory=dict)
    state: dict[int, np.ndarray] = field(default_factory=dict)
    window: dict[int, np.ndarray] = field(default_factory=dict)
    length: int = 0


@dataclass
class Pass:
    """One pass over rows: logits [N, V], features [N, F * hidden], and per layer what a commit takes over."""

    logits: np.ndarray
    features: np.ndarray
    kv: dict[int, tuple[np.ndarray, np.ndarray]]
    states: dict[int, np.ndarray]
    windows: dict[int, np.ndarray]


class Target:
    def __init__(self, folder: Path, dtype: type[np.floating[Any]], capture: tuple[int, ...] = ()) -> None:
        self.config = c = load_config(folder)
        if c.get("architectures") != [SUPPORTED]:
            raise ValueError(f"the CPU engine runs {SUPPORTED}; {folder} holds {c.get('architectures')}")
        self.dtype, self.capture = dtype, capture
        self.weights = load_weights(folder, dtype)
        self.vocab = int(c["vocab_size"])
        self.eps = float(c["rms_norm_eps"])
        rotary = int(c["head_dim"] * c["partial_rotary_factor"])
        theta = float(c["rope_parameters"]["rope_theta"])
        self.inverse = 1.0 / theta ** (np.arange(0, rotary, 2) / rotary)
        self.attention = [kind == "full_attention" for kind in c["layer_types"]]
        for name, tensor in self.weights.items():
            if name.endswith("norm.weight") and "linear_attn" not in name:
                tensor += 1  # these norms store the offset from one

    @property
    def embedding(self) -> np.ndarray:
        return self.weights["model.embed_tokens.weight"]

    @property
    def head(self) -> np.ndarray:
        tied = self.config.get("tie_word_embeddings")
        return self.embedding if tied else self.weights["lm_head.weight"]

    def new_caches(self) -> Caches:
        c, caches = self.config, Caches()
        channels = 2 * c["linear_num_key_heads"] * c["linear_key_head_dim"]
        channels += c["linear_num_value_heads"] * c["linear_value_head_dim"]
        for layer, attention in enumerate(self.attention):
            if attention:
                caches.kv[layer] = KV(c["num_key_value_heads"], c["head_dim"], self.dtype)
            else:
                shape = (c["linear_num_value_heads"], c["linear_value_head_dim"], c["linear_key_head_dim"])
                caches.state[layer] = np.zeros(shape, dtype=self.dtype)
                caches.window[layer] = np.zeros((c["linear_conv_kernel_dim"] - 1, channels), dtype=self.dtype)
        return caches

    def forward(self, tokens: np.ndarray, rows: Rows, caches: Caches) -> Pass:
        """One pass over ``tokens`` [N] at the rows of a tree whose root follows what is committed."""
        x = self.embedding[tokens]
        done = Pass(np.empty(0), np.empty(0), {}, {}, {})
        positions, sees, captured = caches.length + rows.depth, rows.sees(), []
        for layer, attention in enumerate(self.attention):
            prefix = f"model.layers.{layer}."
            y = rms_norm(x, self.weights[prefix + "input_layernorm.weight"], self.eps)
            if attention:
                x = x + self._attend(layer, y, positions, sees, caches, done)
            else:
                x = x + self._recur(layer, y, rows, caches, done)
            y = rms_norm(x, self.weights[prefix + "post_attention_layernorm.weight"], self.eps)
            x = x + mlp(self.weights, prefix + "mlp.", y)
            if layer in self.capture:
                captured.append(x)
        done.logits = rms_norm(x, self.weights["model.norm.weight"], self.eps) @ self.head.T
        done.features = np.concatenate(captured, axis=-1) if captured else x[:, :0]
        return done

    def _attend(
        self, layer: int, x: np.ndarray, positions: np.ndarray, sees: np.ndarray, caches: Caches, done: Pass
    ) -> np.ndarray:
        c, w, name = self.config, self.weights, f"model.layers.{layer}.self_attn."
        count, heads, dim = len(x), c["num_attention_heads"], c["head_dim"]
        q, gate = np.split((x @ w[name + "q_proj.weight"].T).reshape(count, heads, 2 * dim), 2, axis=-1)
        k, v = ((x @ w[name + p].T).reshape(count, -1, dim) for p in ("k_proj.weight", "v_proj.weight"))
        q = rotate(rms_norm(q, w[name + "q_norm.weight"], self.eps), positions, self.inverse)
        k = rotate(rms_norm(k, w[name + "k_norm.weight"], self.eps), positions, self.inverse)
        done.kv[layer] = (k, v)
        all_k, all_v = caches.kv[layer].with_rows(k, v)
        mask = np.concatenate([np.ones((count, caches.kv[layer].length), dtype=bool), sees], axis=1)
        out = attend(q, all_k, all_v, mask) * sigmoid(gate)
        return out.reshape(count, -1) @ w[name + "o_proj.weight"].T

    def _recur(self, layer: int, x: np.ndarray, rows: Rows, caches: Caches, done: Pass) -> np.ndarray:
        c, w, name = self.config, self.weights, f"model.layers.{layer}.linear_attn."
        key_heads, value_heads = c["linear_num_key_heads"], c["linear_num_value_heads"]
        key_dim = key_heads * c["linear_key_head_dim"]
        mixed, windows = conv(
            x @ w[name + "in_proj_qkv.weight"].T, caches.window[layer], w[name + "conv1d.weight"][:, 0], rows
        )
        q, k, v = np.split(mixed, [key_dim, 2 * key_dim], axis=1)
        q, k = (np.repeat(unit(y.reshape(len(x), key_heads, -1)), value_heads // key_heads, axis=1) for y in (q, k))
        step = softplus(x @ w[name + "in_proj_a.weight"].T + w[name + "dt_bias"])
        out, states = delta_rule(
            q * self.dtype(c["linear_key_head_dim"] ** -0.5),
            k,
            v.reshape(len(x), value_heads, -1),
            np.exp(-np.exp(w[name + "A_log"]) * step),
            sigmoid(x @ w[name + "in_proj_b.weight"].T),
            caches.state[layer],
            rows,
        )
        done.states[layer], done.windows[layer] = states, windows
        z = (x @ w[name + "in_proj_z.weight"].T).reshape(out.shape)
        out = rms_norm(out, w[name + "norm.weight"], self.eps) * silu(z)
        return out.reshape(len(x), -1) @ w[name + "out_proj.weight"].T

    @staticmethod
    def commit(done: Pass, path: list[int], caches: Caches) -> None:
        """Take over the rows of a path from the root: they are the sequence's next tokens."""
        for layer, (k, v) in done.kv.items():
            caches.kv[layer].append(k[path], v[path])
        for layer, states in done.states.items():
            caches.state[layer] = states[path[-1]].copy()
            caches.window[layer] = done.windows[layer][path[-1], 1:].copy()
        caches.length += len(path)

    def prefill(self, tokens: np.ndarray, caches: Caches) -> tuple[np.ndarray, np.ndarray]:
        """Commit a prompt; the logits after its last token, and the features of all its tokens."""
        features, logits = [], np.empty(0)
        for start in range(0, len(tokens), PIECE):
            piece = tokens[start : start + PIECE]
            done = self.forward(piece, Rows.chain(len(piece)), caches)
            self.commit(done, list(range(len(piece))), caches)
            features.append(done.features)
            logits = done.logits[-1]
        return logits, np.concatenate(features)


def mlp(weights: Arrays, prefix: str, x: np.ndarray) -> np.ndarray:
    gate, up, down = (weights[f"{prefix}{name}_proj.weight"] for name in ("gate", "up", "down"))
    return (silu(x @ gate.T) * (x @ up.T)) @ down.T
