"""Seeded random weights, written into a loaded model in place: arms of one suite get the same target without any file.

The scale is chosen so that activations neither vanish nor saturate, and vocabularies of the suite are small (32
tokens), so that a drafter that knows nothing still has the target's token among its likeliest eight one time in
four: trees get accepted off their spine, which is what a parity suite must see.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any

import torch


def _generator(name: str, seed: int) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


def values(name: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Float32 values of one parameter on the CPU, the same on every device and in every process."""
    draw = torch.randn(shape, generator=_generator(name, seed), dtype=torch.float32)
    if name.endswith("A_log"):
        return (draw.abs() + 0.5).log()
    if name.endswith("dt_bias"):
        return draw
    if len(shape) < 2:
        return 0.1 * draw  # gains and biases: see `reinitialise` for the unit gains
    if "embed_tokens" in name:
        return draw
    return draw / math.sqrt(math.prod(shape[1:]))


def reinitialise(model: Any, seed: int) -> None:
    """Overwrite every parameter in place; captured graphs keep pointing at them."""
    zero_centred = {id(m.weight) for m in model.modules() if "Gemma" in type(m).__name__ and hasattr(m, "weight")}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not parameter.is_floating_point():
                continue
            drawn = values(name, parameter.shape, seed)
            if parameter.dim() == 1 and name.endswith("weight") and id(parameter) not in zero_centred:
                drawn += 1.0
            parameter.copy_(drawn.to(parameter.dtype))
