"""The two statistics that gates rest on. Standard library only, deterministic."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

RESAMPLES = 2000


def speedup(base_s: Sequence[float], new_s: Sequence[float]) -> float:
    """How many times as fast the new one does the same work: sum of times over sum of times."""
    return math.fsum(base_s) / math.fsum(new_s)


def speedup_bounds(base_s: Sequence[float], new_s: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """One-sided lower and upper confidence bounds of the speedup, by paired bootstrap over prompts.

    ``base_s[i]`` and ``new_s[i]`` are the times of prompt i in both arms: resampling prompts together keeps what a
    prompt's difficulty does to both out of the spread.
    """
    if len(base_s) != len(new_s) or not base_s:
        raise ValueError("both arms need a time for the same prompts")
    dice = random.Random(0)
    count = len(base_s)
    ratios = []
    for _ in range(RESAMPLES):
        picked = dice.choices(range(count), k=count)
        ratios.append(math.fsum(base_s[i] for i in picked) / math.fsum(new_s[i] for i in picked))
    ratios.sort()
    return ratios[int((1 - confidence) * RESAMPLES)], ratios[min(int(confidence * RESAMPLES), RESAMPLES - 1)]


def more_often(hits: int, of: int, base_hits: int, base_of: int) -> float:
    """p value that ``hits`` of ``of`` have no higher rate than ``base_hits`` of ``base_of`` (Fisher, one-sided)."""
    total, both = of + base_of, hits + base_hits
    ways = math.comb(total, both)
    tail = sum(math.comb(of, k) * math.comb(base_of, both - k) for k in range(hits, min(of, both) + 1))
    return tail / ways
