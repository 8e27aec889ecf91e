"""Who is asked for the next round's width: the measured policy, or a fixed cycle that proves the change of widths."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from sglang_ddtree.auto.costs import CostTable
from sglang_ddtree.auto.policy import Policy
from sglang_ddtree.auto.report import Gauges, table_shown
from sglang_ddtree.auto.shapes import Shape

logger = logging.getLogger(__name__)


class Cycle:
    """Every shape in turn: each round has another width than the one before."""

    def __init__(self, shapes: Sequence[Shape]) -> None:
        self._shapes = tuple(shapes)
        self.rounds = [0] * len(self._shapes)

    def choose(self, _batch: int) -> int:
        place = sum(self.rounds) % len(self._shapes)
        self.rounds[place] += 1
        return place

    def observe(self, _summary: dict[str, Any]) -> None:
        """A cycle learns nothing."""

    def summary(self) -> dict[str, Any]:
        return {"rounds": _by_name(self._shapes, self.rounds)}


class Measured:
    """The policy, with its changes in the log and its state in the gauges."""

    def __init__(self, shapes: Sequence[Shape], table: CostTable, gauges: Gauges | None = None) -> None:
        self._shapes, self._table, self._gauges = tuple(shapes), table, gauges
        self._policy = Policy(shapes, table)
        self._last = len(self._shapes) - 1
        self.rounds = [0] * len(self._shapes)
        if gauges is not None:
            gauges.table(table)

    def choose(self, batch: int) -> int:
        before = self._policy.switches
        self._last = self._policy.choose(batch)
        self.rounds[self._last] += 1
        if self._policy.switches != before:
            logger.info("DDTREE auto: %s", self._policy.summary())
        return self._last

    def observe(self, summary: dict[str, Any]) -> None:
        self._policy.observe(summary["seen"])
        if self._gauges is not None:
            self._gauges.set(self._last, self.rounds)

    def summary(self) -> dict[str, Any]:
        return {
            **self._policy.summary(),
            "rounds": _by_name(self._shapes, self.rounds),
            "ms": table_shown(self._shapes, self._table),
        }


def _by_name(shapes: Sequence[Shape], counts: Sequence[int]) -> dict[str, int]:
    return {shape.name: count for shape, count in zip(shapes, counts, strict=True)}
