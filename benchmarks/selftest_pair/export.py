"""Write a trained model as SGLang 0.5.17 loads it: model.safetensors, config.json and the tokenizer files."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from benchmarks.selftest_pair.model_drafter import DrafterConfig
from benchmarks.selftest_pair.model_target import TargetConfig

EOS = 0
MAX_POSITIONS = 4096


def round_to_bf16(model: nn.Module) -> None:
    """Make the weights what the file holds, so that what follows is computed with the exported model."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(torch.bfloat16))


def target_config(config: TargetConfig) -> dict:
    layers = range(config.num_hidden_layers)
    kinds = ["full_attention" if config.is_attention(i) else "linear_attention" for i in layers]
    # Positions of text are equal on all three axes, so any split means plain rotary embeddings; this is the family's.
    section = [(config.rotary_dim // 2 + 2 - axis) // 3 for axis in range(3)]
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "bos_token_id": EOS,
        "eos_token_id": EOS,
        "pad_token_id": EOS,
        "dtype": "bfloat16",
        "full_attention_interval": config.full_attention_interval,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": config.intermediate_size,
        "layer_types": kinds,
        "linear_conv_kernel_dim": config.linear_conv_kernel_dim,
        "linear_key_head_dim": config.linear_key_head_dim,
        "linear_num_key_heads": config.linear_num_key_heads,
        "linear_num_value_heads": config.linear_num_value_heads,
        "linear_value_head_dim": config.linear_value_head_dim,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": MAX_POSITIONS,
        "num_attention_heads": config.num_attention_heads,
        "num_hidden_layers": config.num_hidden_layers,
        "num_key_value_heads": config.num_key_value_heads,
        "output_gate_type": "swish",
        "partial_rotary_factor": config.partial_rotary_factor,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": section,
            "partial_rotary_factor": config.partial_rotary_factor,
            "rope_theta": config.rope_theta,
            "rope_type": "default",
        },
        "tie_word_embeddings": False,
        "use_cache": True,
        "vocab_size": config.vocab_size,
    }


def drafter_config(config: DrafterConfig, vocab_size: int) -> dict:
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "attention_bias": False,
        "block_size": config.block_size,
        "bos_token_id": EOS,
        "eos_token_id": EOS,
        "dflash_config": {
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": list(config.target_layer_ids),
        },
        "dtype": "bfloat16",
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": MAX_POSITIONS,
        "num_attention_heads": config.num_attention_heads,
        "num_hidden_layers": config.num_hidden_layers,
        "num_key_value_heads": config.num_key_value_heads,
        "num_target_layers": config.num_target_layers,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": False,
        "vocab_size": vocab_size,
    }


def tokenizer_config() -> dict:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>",
        "mask_token": "<|MASK|>",
        "model_max_length": MAX_POSITIONS,
        "clean_up_tokenization_spaces": False,
    }


def save(folder: Path, model: nn.Module, config: dict) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, tensor in model.state_dict().items():
        # SGLang keeps A_log in float32; the value itself is a bfloat16 one.
        kind = torch.float32 if name.endswith("A_log") else torch.bfloat16
        tensors[name] = tensor.detach().to("cpu", kind).contiguous()
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
