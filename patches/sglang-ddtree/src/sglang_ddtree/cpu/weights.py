"""A checkpoint folder as NumPy arrays."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import safetensors

_KINDS = {"F64": np.float64, "F32": np.float32, "F16": np.float16}


def load_config(folder: Path) -> dict[str, Any]:
    config = json.loads((folder / "config.json").read_text())
    if not isinstance(config, dict):
        raise ValueError(f"{folder / 'config.json'} holds no JSON object")
    return config


def load_weights(folder: Path, dtype: type[np.floating[Any]]) -> dict[str, np.ndarray]:
    """All tensors of model.safetensors in ``dtype``; bfloat16, which NumPy lacks, widens exactly."""
    tensors: dict[str, np.ndarray] = {}
    for name, entry in safetensors.deserialize((folder / "model.safetensors").read_bytes()):
        tensors[name] = _array(entry["dtype"], entry["data"]).reshape(entry["shape"]).astype(dtype)
    return tensors


def _array(kind: str, data: bytes | bytearray) -> np.ndarray:
    if kind == "BF16":
        return (np.frombuffer(data, dtype="<u2").astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(data, dtype=_KINDS[kind])
