"""What a server's log says about its memory, and how far the plan was off. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from ddtree_ops.planner import GIB, POOLS, MemoryPlan, plan_memory

WEIGHTS = re.compile(r"Load weight end\..*?type=(\w+),.*?mem usage=(-?[\d.]+) GB")
POOL = re.compile(r"KV Cache is allocated\..*?#tokens: (\d+), K size: ([\d.]+) GB, V size: ([\d.]+) GB")
STATES = re.compile(
    r"Mamba Cache is allocated\. max_mamba_cache_size: (\d+), conv_state size: ([\d.]+)GB, ssm_state size: ([\d.]+)GB"
    r"(?:\s+intermediate_ssm_state_cache size: ([\d.]+)GB\s+intermediate_conv_window_cache size: ([\d.]+)GB)?"
)
RECORDS = re.compile(r"DDTREE: records of recurrent states for \d+ requests of \d+ rows take ([\d.]+) GiB")
TOTAL = re.compile(r"max_total_num_tokens=(\d+)")
OTHER_RANK = re.compile(r"\[[^\]]*\b(?:DP|PP|TP)[1-9]")
TOKENS = "KV cache tokens"
TOLERANCE = 0.05
ROUNDING = 0.0051 * GIB  # the log has two decimals


@dataclass(frozen=True)
class Reported:
    """Bytes by the plan's names for them, and the tokens of the KV cache; what the log does not say is absent.

    ``cached`` are the tokens that the pools were made for.
    """

    sizes: dict[str, int]
    slots: int | None
    tokens: int | None
    cached: int | None = None


@dataclass(frozen=True)
class Compared:
    """One prediction beside what was reported, as the sum of ``figures`` rounded ones."""

    name: str
    predicted: int
    reported: int
    figures: int = 1

    @property
    def off(self) -> float:
        return (self.predicted - self.reported) / self.reported if self.reported else 0.0

    @property
    def close(self) -> bool:
        return abs(self.predicted - self.reported) <= max(TOLERANCE * self.reported, self.figures * ROUNDING)


def parse_memory_log(text: str) -> Reported:
    """The lines that SGLang 0.5.17 and the plugin log at start, in whatever else the log holds; of several ranks those
    of the first.
    """
    text = "\n".join(line for line in text.splitlines() if not OTHER_RANK.match(line))
    sizes = _weights(text)
    states = STATES.search(text)
    if states:
        names = ("convolution states", "recurrent states", "state snapshots", "convolution snapshots")
        sizes |= {n: _bytes(v) for n, v in zip(names, states.groups()[1:], strict=True) if v is not None}
    if records := RECORDS.search(text):
        sizes["state records"] = _bytes(records[1])
    pools = list(POOL.finditer(text))[: len(POOLS)]
    sizes |= {name: _bytes(found[2]) + _bytes(found[3]) for name, found in zip(POOLS, pools, strict=False)}
    tokens = TOTAL.search(text)
    return Reported(
        sizes,
        int(states[1]) if states else None,
        int(tokens[1]) if tokens else None,
        int(pools[0][1]) if pools else None,
    )


def _weights(text: str) -> dict[str, int]:
    """Each model's own line, by its class. SGLang logs how much less memory is free: less than nothing where another
    process gave some back meanwhile, and that says nothing about a model.
    """
    sizes: dict[str, int] = {}
    for found in WEIGHTS.finditer(text):
        name = "drafter weights" if found[1].endswith("DraftModel") else "target weights"
        if not found[2].startswith("-"):
            sizes.setdefault(name, _bytes(found[2]))
    return sizes


def compare(plan: MemoryPlan, reported: Reported) -> tuple[Compared, ...]:
    """Every item that both sides name, then the caches of the tokens that the server made them for, then how many
    tokens it has. Slots not given are the server's choice.
    """
    plan = plan_memory(replace(plan.ask, slots_given=reported.slots)) if reported.slots else plan
    rows = [Compared(i.name, i.bytes, reported.sizes[i.name]) for i in plan.items if i.name in reported.sizes]
    if reported.cached is not None:
        pools = [item for item in plan.pools(reported.cached) if item.name in reported.sizes]
        rows += [Compared(item.name, item.bytes, reported.sizes[item.name], figures=2) for item in pools]
    if reported.tokens is not None:
        rows.append(Compared(TOKENS, plan.tokens, reported.tokens))
    return tuple(rows)


def _bytes(gigabytes: str) -> int:
    try:
        return round(float(gigabytes) * GIB)
    except ValueError:
        return 0
