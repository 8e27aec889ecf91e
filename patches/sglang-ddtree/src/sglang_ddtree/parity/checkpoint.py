"""Seeded random weights as a checkpoint on disk: what ranks share must be drawn whole, and cut by SGLang's own loaders.

parity.weights fills a loaded model in place, which is quicker, but a rank would draw its shard as if it were a matrix
of that size. Here are the names and sizes of the suite's models as they stand in a checkpoint of theirs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sglang_ddtree.parity.weights import values

Shapes = dict[str, tuple[int, ...]]
FILE = "model.safetensors"


def shapes(config: dict[str, Any]) -> Shapes:
    """Name and shape of every tensor of a model of parity.models."""
    hidden, drafter = config["hidden_size"], "block_size" in config
    root = "" if drafter else "model."
    kinds = config.get("layer_types") or ["full_attention"] * config["num_hidden_layers"]
    found: Shapes = {f"{root}norm.weight": (hidden,)}
    if drafter:
        picked = len(config["dflash_config"]["target_layer_ids"])
        found |= {"fc.weight": (hidden, picked * hidden), "hidden_norm.weight": (hidden,)}
    else:
        found |= dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), (config["vocab_size"], hidden))
    for layer, kind in enumerate(kinds):
        parts = _linear_attention(config) if kind == "linear_attention" else _attention(config)
        found |= {f"{root}layers.{layer}.{name}": shape for name, shape in (parts | _rest(config)).items()}
    return found


def _rest(config: dict[str, Any]) -> Shapes:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    return {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }


def _attention(config: dict[str, Any]) -> Shapes:
    hidden, size = config["hidden_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    return {
        "self_attn.q_proj.weight": (queries * (2 if config.get("attn_output_gate") else 1), hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
        "self_attn.q_norm.weight": (size,),
        "self_attn.k_norm.weight": (size,),
    }


def _linear_attention(config: dict[str, Any]) -> Shapes:
    hidden, heads = config["hidden_size"], config["linear_num_value_heads"]
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    inner = heads * config["linear_value_head_dim"]
    return {
        "linear_attn.in_proj_qkv.weight": (2 * keys + inner, hidden),
        "linear_attn.in_proj_z.weight": (inner, hidden),
        "linear_attn.in_proj_a.weight": (heads, hidden),
        "linear_attn.in_proj_b.weight": (heads, hidden),
        "linear_attn.conv1d.weight": (2 * keys + inner, 1, config["linear_conv_kernel_dim"]),
        "linear_attn.A_log": (heads,),
        "linear_attn.dt_bias": (heads,),
        "linear_attn.norm.weight": (config["linear_value_head_dim"],),
        "linear_attn.out_proj.weight": (hidden, inner),
    }


def gain(config: dict[str, Any], name: str) -> float:
    """What is added to a norm's draw: Qwen3.5 keeps its gains about zero, except behind the recurrence."""
    if not name.endswith("norm.weight"):
        return 0.0
    return 0.0 if "layer_types" in config and "linear_attn" not in name else 1.0


def write(folder: Path, config: dict[str, Any], seed: int) -> None:
    """folder/model.safetensors in float32; one of the same tensors that is there stays."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    wanted, path = shapes(config), folder / FILE
    if path.exists():
        with safe_open(path, "pt") as there:
            if {name: tuple(there.get_slice(name).get_shape()) for name in there.keys()} == wanted:  # noqa: SIM118
                return
    tensors = {name: values(name, shape, seed) + gain(config, name) for name, shape in wanted.items()}
    save_file(tensors, folder / f".{FILE}")
    (folder / f".{FILE}").replace(path)
