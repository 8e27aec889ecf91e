"""What a model is, as far as memory and compatibility go: its config.json read into frozen shapes. Pure.

Vision wrappers keep the text model under ``text_config``; a text-only checkpoint has the same keys at the top.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ddtree_ops.errors import RefusedError

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}


@dataclass(frozen=True)
class Attention:
    """The full-attention layers: what a token costs in the KV cache."""

    layers: int
    kv_heads: int
    head_dim: int

    def bytes_per_token(self, dtype_bytes: int, tp: int = 1) -> int:
        """Keys and values of one token on one GPU. Heads are split, but never below one."""
        return self.layers * max(1, self.kv_heads // tp) * self.head_dim * 2 * dtype_bytes


@dataclass(frozen=True)
class Recurrence:
    """The Gated-DeltaNet layers: a state of fixed size for each request, and for each node of a tree."""

    layers: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int

    def state_bytes(self, dtype_bytes: int, tp: int = 1) -> int:
        """The recurrent state of one request (or the snapshot of one node) on one GPU."""
        return self.layers * (self.value_heads // tp) * self.key_dim * self.value_dim * dtype_bytes

    def record_bytes(self, dtype_bytes: int, tp: int = 1) -> int:
        """What one row of a tree leaves on one GPU where no snapshot is kept: delta, key and decay in fp32, and the
        convolution's input.
        """
        floats = self.value_heads * self.value_dim + self.key_heads * self.key_dim + self.value_heads
        return self.layers * (4 * floats // tp + self.conv_channels(tp) * dtype_bytes)

    def conv_channels(self, tp: int = 1) -> int:
        return (2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim) // tp

    def conv_bytes(self, dtype_bytes: int, tp: int = 1, columns: int | None = None) -> int:
        """The convolution's window of one request on one GPU, or of ``columns`` columns."""
        width = self.conv_width - 1 if columns is None else columns
        return self.layers * self.conv_channels(tp) * width * dtype_bytes


@dataclass(frozen=True)
class ModelShape:
    """A target: layers, attention, recurrence.

    ``activation`` is behind the recurrent layers' convolution. ``auto_dtype`` is what SGLang computes in unless told
    otherwise: float16 where the configuration names float32 or nothing.
    """

    architecture: str
    hidden: int
    vocab: int
    layers: int
    dtype: str
    attention: Attention
    recurrence: Recurrence | None
    state_dtype: str
    context: int
    tied: bool
    rope_theta: float | None
    quantized: str | None
    activation: str
    auto_dtype: str

    @property
    def sees(self) -> bool:
        """Whether it takes images and video, and has weights for them."""
        return "ConditionalGeneration" in self.architecture

    @property
    def hybrid(self) -> bool:
        return self.recurrence is not None

    @property
    def dtype_bytes(self) -> int:
        return DTYPE_BYTES.get(self.dtype, 2)


@dataclass(frozen=True)
class DrafterShape:
    """A DFlash drafter: the block it drafts, and the layers of the target that it listens to."""

    architecture: str
    hidden: int
    vocab: int
    dtype: str
    attention: Attention
    block_size: int | None
    mask_token_id: int | None
    target_layer_ids: tuple[int, ...]
    target_layers: int | None
    rope_theta: float | None

    @property
    def dtype_bytes(self) -> int:
        return DTYPE_BYTES.get(self.dtype, 2)


def parse_model(text: str, where: str) -> ModelShape:
    """A target's config.json. Raises RefusedError that names the file and the key."""
    top, config = _configs(text, where)
    kinds = config.get("layer_types")
    layers = _int(config, "num_hidden_layers", where)
    if not isinstance(kinds, list) or len(kinds) != layers:
        kinds = _kinds(config, layers)
    linear = sum(1 for kind in kinds if kind == "linear_attention")
    heads = _int(config, "num_attention_heads", where)
    hidden = _int(config, "hidden_size", where)
    quantization = _dict(top.get("quantization_config")) or _dict(config.get("quantization_config"))
    return ModelShape(
        architecture=_architecture(top),
        hidden=hidden,
        vocab=_int(config, "vocab_size", where),
        layers=layers,
        dtype=_dtype(top, config),
        attention=Attention(
            layers - linear,
            _positive(config.get("num_key_value_heads")) or heads,
            _positive(config.get("head_dim")) or hidden // heads,
        ),
        recurrence=_recurrence(config, linear, where) if linear else None,
        state_dtype=str(config.get("mamba_ssm_dtype") or "float32"),
        context=_positive(config.get("max_position_embeddings")) or 0,
        tied=bool(config.get("tie_word_embeddings", top.get("tie_word_embeddings", False))),
        rope_theta=_rope_theta(config),
        quantized=str(quantization.get("quant_method") or "unknown") if quantization else None,
        activation=str(config.get("hidden_act") or "silu"),
        auto_dtype=_auto_dtype(top, config),
    )


def parse_drafter(text: str, where: str) -> DrafterShape:
    """A DFlash drafter's config.json."""
    top, config = _configs(text, where)
    dflash = _dict(top.get("dflash_config")) or _dict(config.get("dflash_config"))
    heads = _int(config, "num_attention_heads", where)
    hidden = _int(config, "hidden_size", where)

    def own(name: str) -> Any:
        return dflash.get(name, top.get(name, config.get(name)))

    return DrafterShape(
        architecture=_architecture(top),
        hidden=hidden,
        vocab=_int(config, "vocab_size", where),
        dtype=_dtype(top, config),
        attention=Attention(
            _int(config, "num_hidden_layers", where),
            _positive(config.get("num_key_value_heads")) or heads,
            _positive(config.get("head_dim")) or hidden // heads,
        ),
        block_size=_maybe_int(own("block_size")),
        mask_token_id=_maybe_int(own("mask_token_id")),
        target_layer_ids=tuple(i for i in _list(own("target_layer_ids")) if isinstance(i, int)),
        target_layers=_maybe_int(own("num_target_layers")),
        rope_theta=_rope_theta(config),
    )


def _configs(text: str, where: str) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    try:
        top = json.loads(text)
    except ValueError:
        top = None
    if not isinstance(top, dict):
        raise RefusedError(
            f"{where} is not a model configuration", why="the model's shapes are read from it", next=f"cat {where}"
        )
    inner = top.get("text_config")
    return top, inner if isinstance(inner, dict) else top


def _kinds(config: Mapping[str, Any], layers: int) -> list[str]:
    """Every n-th layer is full attention when the configuration gives only the interval."""
    every = config.get("full_attention_interval")
    if not isinstance(every, int) or every < 1:
        return ["full_attention"] * layers
    return ["full_attention" if (i + 1) % every == 0 else "linear_attention" for i in range(layers)]


def _recurrence(config: Mapping[str, Any], layers: int, where: str) -> Recurrence:
    return Recurrence(
        layers=layers,
        key_heads=_int(config, "linear_num_key_heads", where),
        value_heads=_int(config, "linear_num_value_heads", where),
        key_dim=_int(config, "linear_key_head_dim", where),
        value_dim=_int(config, "linear_value_head_dim", where),
        conv_width=_int(config, "linear_conv_kernel_dim", where),
    )


def _architecture(config: Mapping[str, Any]) -> str:
    names = config.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else "unknown"


def _dtype(top: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    return _named_dtype(top, config) or "bfloat16"


def _auto_dtype(top: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    found = _named_dtype(top, config)
    return found if found in ("bfloat16", "float16") else "float16"


def _named_dtype(top: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    found = config.get("dtype") or config.get("torch_dtype") or top.get("dtype") or top.get("torch_dtype")
    return str(found or "")


def _rope_theta(config: Mapping[str, Any]) -> float | None:
    for place in (config, config.get("rope_parameters"), config.get("rope_scaling")):
        if isinstance(place, dict) and isinstance(place.get("rope_theta"), int | float):
            return float(place["rope_theta"])
    return None


def _int(config: Mapping[str, Any], key: str, where: str) -> int:
    value = _positive(config.get(key))
    if value is None:
        raise RefusedError(
            f"{where} has no usable {key}",
            why="the memory plan and the check of the pair need it",
            next=f"grep {key} {where}",
        )
    return value


def _maybe_int(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _positive(value: Any) -> int | None:
    number = _maybe_int(value)
    return number if number is not None and number > 0 else None


def _dict(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
