"""Which width a round gets: expected tokens a millisecond, from a cost table and from what was accepted so far.

Pure: no torch, no clock, no randomness; the same observations give the same choices. Shapes are the tree widths and
the chain. Trees are nested: rows are emitted best-first, so the first m nodes of a tree are the tree of m nodes, and a
verified tree tells what every narrower one would have had accepted. So the estimates are increments: how many
accepted nodes lie beyond the next narrower width, each from all trees that were wide enough. The chain reaches deeper
than a narrow tree and has no siblings: it is estimated from chains alone.

What the running shape cannot tell is found by probes, rounds of another shape. A probe costs what it is expected to
lose, and is paid from an advance of START rounds or from savings, a share EXPLORE of the time. The advance is for open
questions alone: shapes that may be faster, as far as is known. Where a few trees show that none is worth its round,
most of it stays in hand for the next change. What is bought is the probe that tells most for its price, waited for if
need be: the widest tree where it costs little more than a narrow one, a narrow one where rows are dear.

A shape hardly seen is imagined to accept a part of what the chain does (Estimates.imagined). Without that, the first
look at a tree would be priced as a round that gives one token, and be saved for while a better width waits.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from sglang_ddtree.auto.costs import CostTable
from sglang_ddtree.auto.shapes import Shape, intervals, told_by

EXPLORE = 0.004  # share of the time that probes may cost; prices are estimates, and what they miss is kept in hand
START = 32.0  # rounds' worth of probes in advance, once, so that the first comparison need not be saved for
GAP = 2  # rounds from one probe to the next
FREE = 0.02  # rounds that a probe costs where it is expected to lose less: it may lose after all
HALF_LIFE = 16384.0  # trees verified after which an observation weighs half
BLOCK = 768.0  # newest trees that are compared with those before: if they lie further apart than
SURPRISE = 5.0  # standard errors, the workload has changed,
KEPT = 8.0  # what was seen before the block keeps the weight of this many trees,
APART = 16000  # and the advance is given again if the last was so many rounds ago, of whose time it is 0.2 %
KNOWN = 16.0  # weighted trees before an estimate takes part in choices; nor are more probed from one look to the next
SHRINK = 4.0  # imagined trees beside those seen: they accept
PRIOR = 0.5  # this part of what the chain makes likely
MARGIN = 0.01  # a step to a wider tree, or off the chain, must promise this gain
DEVIATIONS = 1.0  # and this many standard errors more: a step in error is soon seen, as what runs is seen most
HOPE = 2.0  # standard errors above what is expected of it at which a shape is still worth the advance


@dataclasses.dataclass(frozen=True)
class Seen:
    """Totals since the start, by shape.

    requests: trees verified in this shape. sums, squares: of a tree, over all trees at least as wide, the accepted
    nodes beyond the next narrower tree, and their squares; of the chain, its accepted nodes.
    """

    requests: tuple[int, ...]
    sums: tuple[int, ...]
    squares: tuple[int, ...]


class Estimates:
    """Accepted nodes of each shape, from exponentially weighted counts."""

    def __init__(self, shapes: Sequence[Shape], half_life: float = HALF_LIFE) -> None:
        self.shapes = tuple(shapes)
        self.half_life = half_life
        size = len(self.shapes)
        self.chain = size - 1
        self._parts = [told_by(self.shapes, place) for place in range(size)]
        self._tellers = [[j for j in range(size) if i in self._parts[j]] for i in range(size)]
        self._shares = _shares(self.shapes)
        self.weight, self.sum, self.square = [0.0] * size, [0.0] * size, [0.0] * size
        self._block, self._block_sum = [0.0] * size, [0.0] * size
        self._before = Seen((0,) * size, (0,) * size, (0,) * size)
        self.changes = 0

    def observe(self, now: Seen) -> bool:
        """Take in the growth of the totals; False if there was none."""
        new = [a - b for a, b in zip(now.requests, self._before.requests, strict=True)]
        if not any(new):
            return False
        fade = 0.5 ** (sum(new) / self.half_life)
        for i in range(len(self.shapes)):
            told = sum(new[j] for j in self._tellers[i])
            accepted = now.sums[i] - self._before.sums[i]
            self.weight[i] = self.weight[i] * fade + told
            self.sum[i] = self.sum[i] * fade + accepted
            self.square[i] = self.square[i] * fade + now.squares[i] - self._before.squares[i]
            self._block[i] += told
            self._block_sum[i] += accepted
        self._before = now
        self._forget_if_changed()
        return True

    def _forget_if_changed(self) -> None:
        """Look at a block when the running shape's part of it is full; all parts of a block are of the same time."""
        full = [i for i, size in enumerate(self._block) if size >= BLOCK]
        if not full:
            return
        if any(self._surprising(i) for i in full):
            self.changes += 1
            for i in range(len(self.shapes)):
                self._forget(i)
        self._block, self._block_sum = [0.0] * len(self.shapes), [0.0] * len(self.shapes)

    def _forget(self, i: int) -> None:
        """Leave the newest block and little of what was before, with the spread that all of it had."""
        earlier = self.weight[i] - self._block[i]
        if earlier <= KEPT:
            return
        spread = self._variance(i)
        mean_before = (self.sum[i] - self._block_sum[i]) / earlier
        self.weight[i] = self._block[i] + KEPT
        self.sum[i] = self._block_sum[i] + KEPT * mean_before
        self.square[i] = self.weight[i] * (spread + (self.sum[i] / self.weight[i]) ** 2)

    def _surprising(self, i: int) -> bool:
        """Whether the newest trees are not like those before, of which there must be as many."""
        earlier = self.weight[i] - self._block[i]
        if earlier < self._block[i]:
            return False
        difference = self._block_sum[i] / self._block[i] - (self.sum[i] - self._block_sum[i]) / earlier
        error = math.sqrt(self._variance(i) * (1 / self._block[i] + 1 / earlier))
        return abs(difference) > SURPRISE * error

    def parts(self, shape: int) -> range:
        """The estimates whose sum is the shape's accepted nodes."""
        return self._parts[shape]

    def known(self, shape: int) -> bool:
        return all(self.weight[i] >= KNOWN for i in self.parts(shape))

    def tokens(self, shape: int) -> float:
        """Tokens of a request and round as seen, the bonus included."""
        return 1.0 + sum(self.sum[i] / self.weight[i] for i in self.parts(shape) if self.weight[i] > 0)

    def expected(self, shape: int) -> float:
        """Tokens of a request and round, SHRINK imagined trees counted beside those seen."""
        parts = self.parts(shape)
        return 1.0 + sum((self.sum[i] + SHRINK * self.imagined(i)) / (self.weight[i] + SHRINK) for i in parts)

    def imagined(self, i: int) -> float:
        """Accepted nodes before any were seen: PRIOR of what the chain tells.

        By the drafter's own law the best-first tree of m nodes accepts as much as any of m nodes, so as much as the
        chain's first m; and these at least m nodes' share of the chain's, since no node is accepted more often than
        the one before it. Half of that is believed, as a drafter can be wrong about its second choices.
        """
        return self._mean(i) if i == self.chain else PRIOR * self._shares[i] * self._mean(self.chain)

    def error(self, a: int, b: int) -> float:
        """Standard error of the difference of two shapes' tokens; of two trees, of what lies between them only.

        The SHRINK imagined trees vary as the chain does.
        """
        return math.sqrt(sum(self._error(i) for i in set(self.parts(a)) ^ set(self.parts(b))))

    def _error(self, i: int) -> float:
        weight = self.weight[i] + SHRINK
        return (self.weight[i] * self._variance(i) + SHRINK * self._variance(self.chain)) / weight**2

    def _mean(self, i: int) -> float:
        return self.sum[i] / self.weight[i] if self.weight[i] > 0 else 0.0

    def _variance(self, i: int) -> float:
        return max(0.0, self.square[i] / self.weight[i] - self._mean(i) ** 2) if self.weight[i] > 0 else 0.0


def _shares(shapes: Sequence[Shape]) -> list[float]:
    """Of the chain's nodes, the share that each interval adds to as many nodes of a tree."""
    depth = shapes[-1].nodes
    return [(min(high, depth) - min(low, depth)) / depth for low, high in intervals(shapes)]


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is settled for a batch size until more is heard. data: the observation it was made on. probe, of the shapes
    that may be faster, and refresh, of all, are the next to look at and the price in milliseconds.
    """

    data: int
    running: int
    saves: float
    probe: tuple[int, float] | None
    refresh: tuple[int, float] | None


class Policy:
    """Chooses a shape for each round. Starts with the chain at every batch size."""

    def __init__(self, shapes: Sequence[Shape], table: CostTable, half_life: float = HALF_LIFE) -> None:
        self.shapes = tuple(shapes)
        self.table = table
        self.estimates = Estimates(shapes, half_life)
        chain = self.estimates.chain
        self.current = dict.fromkeys(table.batches, chain)
        self.switches = 0
        self.probes = 0
        self._data = 0  # counts observations, so that a decision is made once on each
        self._decided = dict.fromkeys(table.batches, 0)
        self._plans: dict[int, Plan] = {}
        self._advance = self._saved = 0.0
        self._since_probe = self._since_advance = self._unheard = 0
        self._give_advance()

    def observe(self, seen: Seen) -> None:
        changes = self.estimates.changes
        if self.estimates.observe(seen):
            self._data += 1
            self._unheard = 0
        if self.estimates.changes != changes and self._since_advance >= APART:
            self._give_advance()

    def choose(self, batch: int) -> int:
        """The shape of the next round of `batch` requests, as an index into `shapes`."""
        plan = self._plans.get(batch)
        if plan is None or plan.data != self._data:
            plan = self._plans[batch] = self._planned(batch)
        self._saved += plan.saves
        self._since_probe += 1
        self._since_advance += 1
        probe = self._paid(plan) if self._since_probe >= GAP and self._unheard < KNOWN else None
        if probe is None:
            return plan.running
        self.probes += 1
        self._since_probe = 0
        self._unheard += batch
        return probe

    def _planned(self, batch: int) -> Plan:
        costs, place = self.table.at(batch), self.table.place(batch)
        if self._decided[place] != self._data:
            self._decided[place] = self._data
            self._decide(place, costs)
        running = self.current[place]
        probe = refresh = None
        if self.estimates.known(running):
            chain = self.estimates.chain
            asked = [i for i in range(len(costs)) if i != running and (i > running or chain in (i, running))]
            probe = self._telling([i for i in asked if self._may_win(running, i, costs)], running, costs)
            refresh = self._telling(asked, running, costs)
        return Plan(self._data, running, EXPLORE * costs[running], probe, refresh)

    # -- which shape runs ----------------------------------------------------------------------------------------------

    def _decide(self, place: int, costs: Sequence[float]) -> None:
        running = self.current[place]
        if not self.estimates.known(running):
            return
        speed = {i: self.estimates.tokens(i) / costs[i] for i in range(len(costs)) if self.estimates.known(i)}
        better = [i for i in speed if i != running and speed[i] >= speed[running] * (1 + self._needed(running, i))]
        if better:
            self.current[place] = min(better, key=lambda i: (-speed[i], self.shapes[i].narrowness))
            self.switches += 1

    def _needed(self, running: int, wanted: int) -> float:
        """The gain a step must promise: none towards the chain or a narrower tree, so that ties go there."""
        chain = self.estimates.chain
        if wanted == chain or (running != chain and wanted < running):
            return 0.0
        return MARGIN + DEVIATIONS * self.estimates.error(running, wanted) / self.estimates.tokens(running)

    # -- probes --------------------------------------------------------------------------------------------------------

    def _give_advance(self) -> None:
        """Let the first comparisons, of a start or of a change, not wait until they are saved for."""
        self._since_advance = 0
        self._advance = START * self.table.ms[0][self.estimates.chain]

    def _paid(self, plan: Plan) -> int | None:
        """Another shape for this round, if there is the money for it."""
        if plan.probe is not None and plan.probe[1] <= self._advance:
            self._advance -= plan.probe[1]
            return plan.probe[0]
        if plan.refresh is not None and plan.refresh[1] <= self._saved:
            self._saved = min(self._saved - plan.refresh[1], 4 * plan.refresh[1])
            return plan.refresh[0]
        return None

    def _may_win(self, running: int, other: int, costs: Sequence[float]) -> bool:
        """Whether another shape could be faster, as far as is known; no round gives more than the whole block."""
        most = self.estimates.expected(other) + HOPE * self.estimates.error(running, other)
        block = 1 + self.shapes[self.estimates.chain].nodes
        return min(most, block) / costs[other] > self.estimates.tokens(running) / costs[running] * (1 + MARGIN)

    def _telling(self, asked: Sequence[int], running: int, costs: Sequence[float]) -> tuple[int, float] | None:
        """The shape that tells most for its price."""
        if not asked:
            return None
        prices = {i: self._price(running, i, costs) for i in asked}
        best = min(asked, key=lambda i: (-self._doubt(i) / prices[i], self.shapes[i].narrowness))
        return best, prices[best]

    def _price(self, running: int, probe: int, costs: Sequence[float]) -> float:
        """Milliseconds a probe is expected to lose: its time less what the running shape needs for its tokens."""
        worth = self.estimates.expected(probe) / self.estimates.tokens(running)
        return max(FREE * costs[running], costs[probe] - costs[running] * worth)

    def _doubt(self, shape: int) -> float:
        return sum(1 / (1 + self.estimates.weight[i]) for i in self.estimates.parts(shape))

    # -- reports -------------------------------------------------------------------------------------------------------

    def summary(self) -> dict[str, Any]:
        """For /server_info: the choice at each measured batch and the estimates behind it."""
        known = [i for i in range(len(self.shapes)) if self.estimates.known(i)]
        return {
            "choice": {str(batch): self.shapes[i].name for batch, i in self.current.items()},
            "tokens_per_round": {self.shapes[i].name: round(self.estimates.tokens(i), 3) for i in known},
            "switches": self.switches,
            "probes": self.probes,
        }
