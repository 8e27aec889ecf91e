"""What the trees did: counters kept on the device, read off the hot path, shown in the log, in SGLang's metrics
and on /server_info.

After rounds 1, 2, 4 and so on, and then every `interval` rounds, a copy of the counters starts on a stream of its own;
the round that finds it finished reports it, so /metrics has figures from the second round on. No round waits. Accept
length itself is SGLang's own metric (sglang:spec_accept_length), fed by the result of each round.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

logger = logging.getLogger(__name__)


def tree_summary(total: list[int], offered: list[int], accepted: list[int]) -> dict[str, Any]:
    """Readable figures from the device's counts (kernels.buffers.TreeCounters)."""
    trees, nodes, taken, off_spine = total
    per_tree = max(trees, 1)
    return {
        "trees": trees,
        "nodes_per_tree": round(nodes / per_tree, 3),
        "accepted_per_tree": round(taken / per_tree, 3),
        "accepted_off_spine": off_spine,
        "off_spine_share": round(off_spine / max(taken, 1), 4),
        "acceptance_by_depth": [round(a / o, 3) if o else None for o, a in zip(offered[1:], accepted[1:], strict=True)],
    }


def shadow_summary(total: list[int], histogram: list[int]) -> dict[str, Any]:
    """What the watched trees would have accepted, given linear's own round starts."""
    scored, nodes, score, dropped = total
    return {
        "trees": scored,
        "nodes_per_tree": round(nodes / max(scored, 1), 3),
        "would_accept_per_tree": round(score / max(scored, 1), 3),
        "dropped": dropped,
        "histogram": histogram,
    }


class Gauges:
    """The summary as Prometheus gauges beside SGLang's own, in the same process and registry."""

    def __init__(self, labels: dict[str, str]) -> None:
        from prometheus_client import Gauge

        self._gauges = {
            name: Gauge(f"sglang:ddtree_{name}", text, list(labels), multiprocess_mode="mostrecent").labels(**labels)
            for name, text in (
                ("trees", "Draft trees verified (tree) or scored (shadow-linear) since the start."),
                ("nodes_per_tree", "Nodes offered by a tree, its root not counted."),
                ("accepted_per_tree", "Nodes accepted of a tree; with the bonus token this is the accept length."),
                ("accepted_off_spine", "Accepted nodes that the drafter's top-1 chain did not contain."),
                ("would_accept_per_tree", "shadow-linear: nodes a tree would have had accepted."),
            )
        }

    def set(self, summary: dict[str, Any]) -> None:
        for name, gauge in self._gauges.items():
            if name in summary:
                gauge.set(summary[name])


class Reporter:
    """Copies counters to the host every `interval` rounds, sooner at the start, and hands the summary on when it has
    arrived.
    """

    def __init__(
        self,
        counters: tuple[torch.Tensor, ...],
        summarise: Callable[..., dict[str, Any]],
        interval: int,
        sinks: list[Callable[[dict[str, Any]], None]],
    ) -> None:
        self._counters = counters
        self._summarise = summarise
        self._interval = interval
        self._sinks = sinks
        self._rounds, self._due = 0, 1
        self._cuda = counters[0].is_cuda
        self._host = [
            torch.zeros_like(c, device="cpu").pin_memory() if self._cuda else torch.zeros_like(c) for c in counters
        ]
        self._stream = torch.cuda.Stream(counters[0].device) if self._cuda else None
        self._arrival: Any = None

    def round_done(self) -> None:
        """Called after each round's launches; never waits."""
        self._rounds += 1
        if self._arrival is not None and (not self._cuda or self._arrival.query()):
            self._arrival = None
            summary = self._summarise(*(h.tolist() for h in self._host))
            for sink in self._sinks:
                sink(summary)
        if self._rounds >= self._due and self._arrival is None:
            self._due = self._rounds + min(self._rounds, self._interval)
            self._start_copy()

    def _start_copy(self) -> None:
        if not self._cuda:
            for host, counter in zip(self._host, self._counters, strict=True):
                host.copy_(counter)
            self._arrival = True
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for host, counter in zip(self._host, self._counters, strict=True):
                host.copy_(counter, non_blocking=True)
            self._arrival = torch.cuda.Event()
            self._arrival.record()

    def now(self) -> dict[str, Any]:
        """The summary of this moment; waits for the device, so for /server_info only."""
        return self._summarise(*(c.tolist() for c in self._counters))
