"""Fixed requests of the suite, free of SGLang and torch."""

from __future__ import annotations

from typing import Any

from sglang_ddtree.parity.models import VOCAB


def prompts(count: int, length: int, vocab: int, seed: int = 0) -> list[list[int]]:
    """Pseudo-random prompts over ids 3 .. vocab - 3, of growing length; the same on every machine."""
    state, out = 12345 + seed, []
    for row in range(count):
        ids = []
        for _ in range(length + 3 * row):
            state = (1103515245 * state + 12345) & 0x7FFFFFFF
            ids.append(3 + (state >> 8) % (vocab - 5))
        out.append(ids)
    return out


def fixed_asks(count: int, new: int, **params: Any) -> list[dict[str, Any]]:
    return [{"ids": ids, "params": {"max_new_tokens": new, **params}} for ids in prompts(count, 20, VOCAB)]
