"""Configurations of the suite's models. Weights are drawn at start (parity.weights), so a configuration is all
there is.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

VOCAB = 32  # small on purpose: see parity.weights
BLOCK = 16


def _layers(count: int) -> list[str]:
    return ["full_attention" if (i + 1) % 4 == 0 else "linear_attention" for i in range(count)]


def hybrid(layers: int = 8, **overrides: Any) -> dict[str, Any]:
    """A Qwen3.5-style text target: three Gated DeltaNet layers to one attention layer."""
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "dtype": "bfloat16",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_act": "silu",
        "hidden_size": 512,
        "initializer_range": 0.02,
        "intermediate_size": 1024,
        "layer_types": _layers(layers),
        "num_hidden_layers": layers,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_value_head_dim": 128,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 32768,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "output_gate_type": "swish",
        "partial_rotary_factor": 0.25,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "use_cache": True,
        "vocab_size": VOCAB,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000,
            "rope_type": "default",
        },
        **overrides,
    }


def dense() -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "attention_bias": False,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 512,
        "intermediate_size": 1024,
        "max_position_embeddings": 32768,
        "num_attention_heads": 8,
        "num_hidden_layers": 8,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000,
        "tie_word_embeddings": False,
        "vocab_size": VOCAB,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }


def drafter(layers: int = 2, targets: tuple[int, ...] = (1, 3, 5), of: int = 8, **overrides: Any) -> dict[str, Any]:
    base = {
        **dense(),
        "architectures": ["DFlashDraftModel"],
        "num_hidden_layers": layers,
        "block_size": BLOCK,
        "num_target_layers": of,
        "dflash_config": {"mask_token_id": VOCAB - 1, "target_layer_ids": list(targets)},
    }
    return {**base, **overrides}


_BIG_VOCAB = 248320
_BIG = {"hidden_size": 5120, "intermediate_size": 17408, "vocab_size": _BIG_VOCAB, "max_position_embeddings": 262144}


def shape_27b(layers: int = 64) -> dict[str, Any]:
    """The shapes of a 27B hybrid (48 Gated DeltaNet and 16 attention layers), or a slice of its layers."""
    return hybrid(
        layers,
        **_BIG,
        num_attention_heads=24,
        num_key_value_heads=4,
        linear_num_key_heads=16,
        linear_num_value_heads=48,
        bos_token_id=248044,
        eos_token_id=248044,
    )


def shape_27b_drafter(layers: int = 64) -> dict[str, Any]:
    picked = tuple(1 + i * (layers - 4) // 4 for i in range(5))
    return drafter(
        5,
        picked,
        layers,
        **_BIG,
        num_attention_heads=32,
        num_key_value_heads=8,
        rope_theta=10000000,
        dflash_config={"mask_token_id": 248070, "target_layer_ids": list(picked)},
    )


MODELS = {
    "hybrid": hybrid(),
    "dense": dense(),
    "drafter": drafter(),
    "shape-27b": shape_27b(),
    "shape-27b-drafter": shape_27b_drafter(),
    "shape-27b-12": shape_27b(12),
    "shape-27b-12-drafter": shape_27b_drafter(12),
}


SAVED = ("hybrid", "dense", "drafter")


def write(directory: Path, names: tuple[str, ...] = tuple(MODELS), ranks: int = 1) -> None:
    """directory/NAME/config.json for each model. For several ranks the small ones have weights as well, and a
    vocabulary of which every rank gets tokens: SGLang pads it to 64 a rank at least.
    """
    for name in names:
        folder, config = directory / name, MODELS[name]
        folder.mkdir(parents=True, exist_ok=True)
        if ranks > 1 and name in SAVED:
            from sglang_ddtree.parity import checkpoint

            config = {**config, "vocab_size": 64 * (ranks - 1) + 16}
            checkpoint.write(folder, config, seed=1)
        (folder / "config.json").write_text(json.dumps(config, indent=1))
