"""The DFlash drafter: one pass fills a block, attending to itself in both directions and to the target's features.

Its cache holds, for each layer, keys and values of the target's hidden features at every committed position; the
block's own are never kept.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from sglang_ddtree.cpu.target import KV, attend, mlp, rms_norm, rotate
from sglang_ddtree.cpu.weights import load_config, load_weights

SUPPORTED = "DFlashDraftModel"


def target_layers(folder: Path) -> tuple[int, ...]:
    """The target's layers whose residual stream this drafter reads."""
    return tuple(load_config(folder)["dflash_config"]["target_layer_ids"])


class Drafter:
    def __init__(self, folder: Path, dtype: type[np.floating[Any]]) -> None:
        self.config = c = load_config(folder)
        if c.get("architectures") != [SUPPORTED]:
            raise ValueError(f"the CPU engine drafts with {SUPPORTED}; {folder} holds {c.get('architectures')}")
        self.dtype = dtype
        self.weights = load_weights(folder, dtype)
        self.block = int(c["block_size"])
        self.mask_token = int(c["dflash_config"]["mask_token_id"])
        self.layers = int(c["num_hidden_layers"])
        self.eps = float(c["rms_norm_eps"])
        dim = int(c["head_dim"])
        self.inverse = 1.0 / float(c["rope_theta"]) ** (np.arange(0, dim, 2) / dim)

    def new_cache(self) -> list[KV]:
        c = self.config
        return [KV(c["num_key_value_heads"], c["head_dim"], self.dtype) for _ in range(self.layers)]

    def _keys_values(self, layer: int, x: np.ndarray, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        w, name, dim = self.weights, f"layers.{layer}.self_attn.", self.config["head_dim"]
        k, v = ((x @ w[name + p].T).reshape(len(x), -1, dim) for p in ("k_proj.weight", "v_proj.weight"))
        return rotate(rms_norm(k, w[name + "k_norm.weight"], self.eps), positions, self.inverse), v

    def extend(self, features: np.ndarray, cache: list[KV]) -> None:
        """Take in the target's features of newly committed tokens."""
        context = rms_norm(features @ self.weights["fc.weight"].T, self.weights["hidden_norm.weight"], self.eps)
        positions = cache[0].length + np.arange(len(features))
        for layer in range(self.layers):
            cache[layer].append(*self._keys_values(layer, context, positions))

    def draft(self, anchor: int, embedding: np.ndarray, cache: list[KV]) -> np.ndarray:
        """Hidden states [block - 1, hidden] of the slots after ``anchor``, the last token, still uncommitted."""
        w, c = self.weights, self.config
        ids = np.full(self.block, self.mask_token)
        ids[0] = anchor
        x = embedding[ids]
        positions = cache[0].length + np.arange(self.block)
        for layer in range(self.layers):
            prefix = f"layers.{layer}."
            y = rms_norm(x, w[prefix + "input_layernorm.weight"], self.eps)
            q = (y @ w[prefix + "self_attn.q_proj.weight"].T).reshape(self.block, -1, c["head_dim"])
            q = rotate(rms_norm(q, w[prefix + "self_attn.q_norm.weight"], self.eps), positions, self.inverse)
            k, v = cache[layer].with_rows(*self._keys_values(layer, y, positions))
            out = attend(q, k, v, None).reshape(self.block, -1)
            x = x + out @ w[prefix + "self_attn.o_proj.weight"].T
            x = x + mlp(w, prefix + "mlp.", rms_norm(x, w[prefix + "post_attention_layernorm.weight"], self.eps))
        return rms_norm(x, w["norm.weight"], self.eps)[1:]
