"""How a tree's recurrent states are kept between the verify and the commit, and what that costs in memory.

snapshots: SGLang's own kernels, a whole state after every row. records: the kernels of this package, what one step of
the recurrence changes after every row, replayed along the accepted path (see :mod:`sglang_ddtree.kernels.gdn`).

The choice has a flag and an environment variable of its own beside the other settings, and travels with the resolved
ones. Nothing here needs torch.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from sglang_ddtree import config

SNAPSHOTS, RECORDS = "snapshots", "records"
CHOICES = (SNAPSHOTS, RECORDS)
ENV = "SGLANG_DDTREE_STATES"
MAX_BUDGET = 64  # nodes the record kernels are written for; kernels.gdn_verify.MAX_NODES, which a test compares
_MEBI = 1 << 20


def from_environment() -> str | None:
    """The choice in the environment, None if none was made. Raises ValueError on any other word."""
    word = os.environ.get(ENV) or None
    if word is not None and word not in CHOICES:
        raise ValueError(f"{ENV} is {word!r}; states of trees are kept as {' or '.join(CHOICES)}.")
    return word


@dataclasses.dataclass(frozen=True)
class Resolved(config.Resolved):
    """What the server runs with, and how it keeps states; snapshots wherever no tree is verified."""

    states: str = SNAPSHOTS

    def public(self) -> dict[str, Any]:
        return {**super().public(), "states": self.states}


def recording(server_args: Any) -> Resolved | None:
    """The settings of a server that keeps records; None for every other one."""
    resolved = config.of(server_args)
    return resolved if isinstance(resolved, Resolved) and resolved.tree and resolved.states == RECORDS else None


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Bytes over all Gated DeltaNet layers of a rank: one request's state and window, and one row's record."""

    state: int
    record: int

    @classmethod
    def of(cls, cache_params: Any) -> Sizes:
        """From SGLang's Mamba2CacheParams. Key heads are what is left of the convolution's channels."""
        value_heads, v_dim, k_dim = cache_params.shape.temporal
        channels = cache_params.shape.conv[0][0]
        floats = value_heads * v_dim + key_heads(cache_params.shape.temporal, channels) * k_dim + value_heads
        row = 4 * floats + channels * cache_params.dtype.conv.itemsize
        return cls(int(cache_params.mamba_cache_per_req), row * len(cache_params.layers))

    def records(self, requests: int, rows: int) -> int:
        return requests * rows * self.record

    def snapshots(self, requests: int, rows: int) -> int:
        """What SGLang allocates: one more request, for padding."""
        return (requests + 1) * rows * self.state

    def largest_budget(self, requests: int, free: int) -> int:
        """Largest T whose records, and the states themselves, leave a tenth of the memory for keys and values."""
        usable = free * 9 // 10 - (requests + 1) * self.state
        return min(MAX_BUDGET, usable // (requests * self.record) - 1)


def key_heads(temporal: tuple[int, int, int], channels: int) -> int:
    """Key heads H of a layer whose convolution runs over [q, k, v]: channels = 2 H K + HV V."""
    value_heads, v_dim, k_dim = temporal
    return (channels - value_heads * v_dim) // (2 * k_dim)


def refuse_oversized(resolved: config.Resolved, sizes: Sizes, requests: int, free: int) -> None:
    """Raise ValueError, naming the largest budget that fits, where records and states leave no room."""
    budget, fits = resolved.config.budget, sizes.largest_budget(requests, free)
    if budget <= fits:
        return
    need = sizes.records(requests, resolved.rows) // _MEBI
    advice = f"the largest budget that fits is {fits}" if fits >= 1 else "no budget fits; lower --max-running-requests"
    raise ValueError(
        f"--speculative-ddtree-budget {budget} needs {need} MiB of state records for {requests} requests of "
        f"{resolved.rows} rows beside {(requests + 1) * sizes.state // _MEBI} MiB of states, and {free // _MEBI} MiB "
        f"are free for states and KV cache: {advice}, or lower --max-running-requests."
    )
