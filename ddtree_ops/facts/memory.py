"""What a server's log says about its memory, and how far the plan was off. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from ddtree_ops.planner import GIB, MemoryPlan, plan_memory

WEIGHTS = re.compile(r"Load weight end\..*?mem usage=([\d.]+) GB")
STATES = re.compile(
    r"Mamba Cache is allocated\. max_mamba_cache_size: (\d+), conv_state size: ([\d.]+)GB, ssm_state size: ([\d.]+)GB"
    r"(?:\s+intermediate_ssm_state_cache size: ([\d.]+)GB\s+intermediate_conv_window_cache size: ([\d.]+)GB)?"
)
RECORDS = re.compile(r"DDTREE: records of recurrent states for \d+ requests of \d+ rows take ([\d.]+) GiB")
TOTAL = re.compile(r"max_total_num_tokens=(\d+)")
TOKENS = "KV cache tokens"
TOLERANCE = 0.05
ROUNDING = 0.0051 * GIB  # the log has two decimals


@dataclass(frozen=True)
class Reported:
    """Bytes by the plan's names for them, and the tokens of the KV cache; what the log does not say is absent."""

    sizes: dict[str, int]
    slots: int | None
    tokens: int | None


@dataclass(frozen=True)
class Compared:
    """One prediction beside what was reported."""

    name: str
    predicted: int
    reported: int

    @property
    def off(self) -> float:
        return (self.predicted - self.reported) / self.reported if self.reported else 0.0

    @property
    def close(self) -> bool:
        return abs(self.predicted - self.reported) <= max(TOLERANCE * self.reported, ROUNDING)


def parse_memory_log(text: str) -> Reported:
    """The lines that SGLang 0.5.17 and the plugin log at start, in whatever else the log holds."""
    sizes: dict[str, int] = {}
    for name, found in zip(("target weights", "drafter weights"), WEIGHTS.finditer(text), strict=False):
        sizes[name] = _bytes(found[1])
    states = STATES.search(text)
    if states:
        names = ("convolution states", "recurrent states", "state snapshots", "convolution snapshots")
        sizes |= {n: _bytes(v) for n, v in zip(names, states.groups()[1:], strict=True) if v is not None}
    if records := RECORDS.search(text):
        sizes["state records"] = _bytes(records[1])
    tokens = TOTAL.search(text)
    return Reported(sizes, int(states[1]) if states else None, int(tokens[1]) if tokens else None)


def compare(plan: MemoryPlan, reported: Reported) -> tuple[Compared, ...]:
    """Every item that both sides name, then the KV cache's tokens. Slots not given are the server's choice."""
    plan = plan_memory(replace(plan.ask, slots_given=reported.slots)) if reported.slots else plan
    rows = [Compared(i.name, i.bytes, reported.sizes[i.name]) for i in plan.items if i.name in reported.sizes]
    if reported.tokens is not None:
        rows.append(Compared(TOKENS, plan.tokens, reported.tokens))
    return tuple(rows)


def _bytes(gigabytes: str) -> int:
    try:
        return round(float(gigabytes) * GIB)
    except ValueError:
        return 0
