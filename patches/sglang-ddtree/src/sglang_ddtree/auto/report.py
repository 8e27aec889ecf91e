"""What mode auto shows of itself: in the log, on /server_info and as Prometheus gauges."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglang_ddtree.auto.costs import CostTable
from sglang_ddtree.auto.policy import Seen
from sglang_ddtree.auto.shapes import Shape


def seen(totals: list[list[int]]) -> dict[str, Any]:
    """What metrics.Reporter hands on of the device's counts (kernels.nested)."""
    requests, sums, squares = (tuple(line) for line in totals)
    return {"seen": Seen(requests, sums, squares)}


def table_shown(shapes: Sequence[Shape], table: CostTable) -> dict[str, dict[str, float]]:
    """{batch: {shape: milliseconds}}."""
    names = [shape.name for shape in shapes]
    return {
        str(batch): {name: round(ms, 4) for name, ms in zip(names, line, strict=True)}
        for batch, line in zip(table.batches, table.ms, strict=True)
    }


class Gauges:
    """Beside the tree's gauges (metrics.Gauges), in the same process and registry."""

    def __init__(self, labels: dict[str, str], shapes: Sequence[Shape]) -> None:
        self._labels, self._shapes = labels, tuple(shapes)
        width = self._gauge("width", "Nodes of the shape that the last rounds were verified in.", [])
        self._width = width.labels(**labels)
        rounds = self._gauge("width_rounds", "Rounds verified in this shape since the start.", ["width"])
        self._rounds = [rounds.labels(**labels, width=shape.name) for shape in shapes]
        self._ms = self._gauge(
            "width_ms", "Milliseconds of a round of this shape and batch, measured at start.", ["width", "batch"]
        )

    def _gauge(self, name: str, text: str, more: list[str]) -> Any:
        from prometheus_client import Gauge

        return Gauge(f"sglang:ddtree_{name}", text, [*self._labels, *more], multiprocess_mode="mostrecent")

    def table(self, table: CostTable) -> None:
        for batch, line in zip(table.batches, table.ms, strict=True):
            for shape, ms in zip(self._shapes, line, strict=True):
                self._ms.labels(**self._labels, width=shape.name, batch=str(batch)).set(ms)

    def set(self, last: int, rounds: Sequence[int]) -> None:
        """Every few rounds, between their launches: so the gauges were looked up by their labels before."""
        self._width.set(self._shapes[last].nodes)
        for gauge, count in zip(self._rounds, rounds, strict=True):
            gauge.set(count)
