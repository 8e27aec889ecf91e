"""From blocks to figures: medians, paired ratios with bootstrap intervals, accept lengths. Pure functions."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

RESAMPLES = 2000
Block = Mapping[str, Any]


@dataclass(frozen=True)
class Interval:
    value: float
    low: float
    high: float

    @property
    def certain(self) -> bool:
        """Does the interval leave out 1, that is, no difference?"""
        return self.low > 1 or self.high < 1


@dataclass(frozen=True)
class Cell:
    """One arm at one temperature and concurrency."""

    arm: str
    temperature: float
    concurrency: int
    user_tok_s: float  # median over answers, prefill excluded
    total_tok_s: float  # mean over blocks, prefill included
    ttft_ms: float
    ttft_p99_ms: float
    round_ms: float | None
    accept_length: float | None
    histogram: tuple[int, ...]
    by_category: Mapping[str, float]
    speedup: Interval | None  # of user_tok_s over the baseline, paired by prompt
    speedup_by_category: Mapping[str, Interval]  # the same over the prompts of one kind


def rate(sample: Mapping[str, Any]) -> float:
    """Decode tokens a second of one answer: tokens after the first event, time after it."""
    after = sample["tokens"] - sample["first_tokens"]
    return after / sample["decode_s"] if after > 0 and sample["decode_s"] > 0 else math.nan


def by_prompt(blocks: Iterable[Block], value: Callable[[Mapping[str, Any]], float]) -> dict[int, float]:
    """Mean of a figure of each prompt over its repeats."""
    found: dict[int, list[float]] = {}
    for block in blocks:
        for sample in block["samples"]:
            if not math.isnan(number := value(sample)):
                found.setdefault(sample["prompt"], []).append(number)
    return {prompt: fmean(values) for prompt, values in found.items()}


def ratio(ours: Mapping[int, float], baseline: Mapping[int, float], seed: int = 7) -> Interval | None:
    """Geometric mean of the paired ratios and its 95% bootstrap interval over prompts."""
    logs = [math.log(ours[p] / baseline[p]) for p in sorted(ours.keys() & baseline.keys())]
    if not logs:
        return None
    numbers = random.Random(seed)
    means = sorted(fmean(numbers.choices(logs, k=len(logs))) for _ in range(RESAMPLES))
    low, high = means[int(0.025 * RESAMPLES)], means[int(0.975 * RESAMPLES) - 1]
    return Interval(math.exp(fmean(logs)), math.exp(low), math.exp(high))


def merge(histograms: Iterable[Sequence[int]]) -> tuple[int, ...]:
    """Sum of histograms of different lengths."""
    total: list[int] = []
    for histogram in histograms:
        total += [0] * (len(histogram) - len(total))
        for place, count in enumerate(histogram):
            total[place] += count
    return tuple(total)


def accept_length(samples: Sequence[Mapping[str, Any]]) -> float | None:
    """Tokens a round over all samples; the first token of an answer comes from its prompt's pass."""
    rounds = sum(sample["rounds"] or 0 for sample in samples)
    histogram = merge(sample["histogram"] for sample in samples)
    if not rounds:
        return None
    if histogram:
        return sum((drafted + 1) * count for drafted, count in enumerate(histogram)) / sum(histogram)
    return sum(sample["tokens"] - 1 for sample in samples) / rounds


def quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def cell(blocks: Sequence[Block], baseline: Sequence[Block], categories: Sequence[str]) -> Cell:
    """The figures of one arm's blocks at one temperature and concurrency."""
    first = blocks[0]
    samples = [sample for block in blocks for sample in block["samples"]]
    rates = [r for r in map(rate, samples) if not math.isnan(r)]
    rounds = sum(sample["rounds"] or 0 for sample in samples)
    decode_s = sum(sample["decode_s"] for sample in samples)
    decoded = sum(sample["tokens"] - sample["first_tokens"] for sample in samples)
    ttft = [sample["ttft_s"] * 1000 for sample in samples]
    kinds = sorted(set(categories))
    per_category = {
        name: value
        for name in kinds
        if (value := accept_length([s for s in samples if categories[s["prompt"]] == name])) is not None
    }
    ours, theirs = by_prompt(blocks, rate), by_prompt(baseline, rate)
    compared = first["arm"] != baseline[0]["arm"]
    of_kind = {kind: {p: speed for p, speed in ours.items() if categories[p] == kind} for kind in kinds if compared}
    return Cell(
        arm=first["arm"],
        temperature=first["temperature"],
        concurrency=first["concurrency"],
        user_tok_s=median(rates) if rates else math.nan,
        total_tok_s=fmean(block["tokens"] / block["wall_s"] for block in blocks),
        ttft_ms=median(ttft),
        ttft_p99_ms=quantile(ttft, 0.99),
        round_ms=1000 * decode_s / (rounds or decoded) if decoded else None,
        accept_length=accept_length(samples),
        histogram=merge(sample["histogram"] for sample in samples),
        by_category=per_category,
        speedup=ratio(ours, theirs) if compared else None,
        speedup_by_category={kind: found for kind, own in of_kind.items() if (found := ratio(own, theirs))},
    )


def cells(result: Mapping[str, Any]) -> list[Cell]:
    """All cells of a result, baseline: its named arm at the same temperature and concurrency."""
    groups: dict[tuple[str, float, int], list[Block]] = {}
    for block in result["blocks"]:
        groups.setdefault((block["arm"], block["temperature"], block["concurrency"]), []).append(block)
    categories = [prompt["category"] for prompt in result["prompts"]]
    return [
        cell(blocks, groups[(result["baseline"], temperature, concurrency)], categories)
        for (_, temperature, concurrency), blocks in groups.items()
    ]
