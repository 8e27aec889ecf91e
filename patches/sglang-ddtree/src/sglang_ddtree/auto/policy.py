"""Which width a round gets: expected tokens a millisecond, from a cost table and from what was accepted so far.

Pure: no torch, no clock, no randomness; the same observations give the same choices. Shapes are the tree widths and
the chain. Trees are nested: rows are emitted best-first, so the first m nodes of a tree are the tree of m nodes, and a
verified tree tells what every narrower one would have had accepted. So the estimates are increments: how many
accepted nodes lie beyond the next narrower width, each from all trees that were wide enough. The chain reaches deeper
than a narrow tree and has no siblings: it is estimated from chains alone.

What the running shape cannot tell is found by probes, rounds of another shape. Each shape that would tell something
saves a share of EXPLORE of the time, and probes when it can pay the expected loss; a probe expected to lose nothing
is free, but two probes lie GAP rounds apart.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from sglang_ddtree.auto.costs import CostTable
from sglang_ddtree.auto.shapes import Shape, told_by

EXPLORE = 0.004  # share of the time that probes may cost; prices are estimates, and what they miss is kept in hand
START = 16.0  # rounds' worth of probes in advance, once, so that the first comparison need not be saved for
GAP = 4  # rounds from one probe to the next
HALF_LIFE = 16384.0  # trees verified after which an observation weighs half
BLOCK = 768.0  # newest trees that are compared with those before: if they lie further apart than
SURPRISE = 5.0  # standard errors, the workload has changed,
KEPT = 8.0  # what was seen before the block keeps the weight of this many trees,
APART = 16000  # and the advance is given once more if the last was so many rounds ago, a thousandth of their time
KNOWN = 48.0  # weighted trees before an estimate takes part in choices
SHRINK = 4.0  # imagined trees with nothing accepted, in the price of a probe of a shape hardly seen
MARGIN = 0.01  # a step to a wider tree, or off the chain, must promise this gain
DEVIATIONS = 2.0  # and this many standard errors more
PATIENCE = 3  # in this many decisions on new data, one after the other


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
            told = sum(new[j] for j in range(len(self.shapes)) if i in told_by(self.shapes, j))
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
        return told_by(self.shapes, shape)

    def known(self, shape: int) -> bool:
        return all(self.weight[i] >= KNOWN for i in self.parts(shape))

    def tokens(self, shape: int, shrink: float = 0.0) -> float:
        """Expected tokens of a request and round, the bonus included; `shrink` imagined trees accepted nothing."""
        return 1.0 + sum(self.sum[i] / (self.weight[i] + shrink) for i in self.parts(shape) if self.weight[i] > 0)

    def error(self, a: int, b: int) -> float:
        """Standard error of the difference of two shapes' tokens; of two trees, of what lies between them only."""
        differ = set(self.parts(a)) ^ set(self.parts(b))
        return math.sqrt(sum(self._variance(i) / self.weight[i] for i in differ if self.weight[i] > 0))

    def _variance(self, i: int) -> float:
        mean = self.sum[i] / self.weight[i]
        return max(0.0, self.square[i] / self.weight[i] - mean * mean)


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
        self._streak: dict[int, tuple[int, int]] = {}
        self._purse = [0.0] * len(self.shapes)
        self._since_probe = 0
        self._since_advance = 0
        self._advance()

    def observe(self, seen: Seen) -> None:
        changes = self.estimates.changes
        self._data += self.estimates.observe(seen)
        if self.estimates.changes != changes and self._since_advance >= APART:
            self._advance()

    def choose(self, batch: int) -> int:
        """The shape of the next round of `batch` requests, as an index into `shapes`."""
        costs, place = self.table.at(batch), self.table.place(batch)
        if self._decided[place] != self._data:
            self._decided[place] = self._data
            self._decide(place, costs)
        running = self.current[place]
        probe = self._probe(running, costs)
        self.probes += probe is not None
        return running if probe is None else probe

    # -- which shape runs ----------------------------------------------------------------------------------------------

    def _decide(self, place: int, costs: Sequence[float]) -> None:
        running = self.current[place]
        if not self.estimates.known(running):
            return
        speed = {i: self.estimates.tokens(i) / costs[i] for i in range(len(costs)) if self.estimates.known(i)}
        better = [i for i in speed if i != running and speed[i] >= speed[running] * (1 + self._needed(running, i))]
        if not better:
            self._streak.pop(place, None)
            return
        best = min(better, key=lambda i: (-speed[i], self.shapes[i].narrowness))
        wanted, times = self._streak.get(place, (best, 0))
        times = times + 1 if wanted == best else 1
        self._streak[place] = (best, times)
        if times >= PATIENCE:
            self.current[place] = best
            self.switches += 1
            del self._streak[place]

    def _needed(self, running: int, wanted: int) -> float:
        """The gain a step must promise: none towards the chain or a narrower tree, so that ties go there."""
        chain = self.estimates.chain
        if wanted == chain or (running != chain and wanted < running):
            return 0.0
        return MARGIN + DEVIATIONS * self.estimates.error(running, wanted) / self.estimates.tokens(running)

    # -- probes --------------------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Let the first comparisons, of a start or of a change, not wait until they are saved for."""
        self._since_advance = 0
        for i in range(len(self._purse)):
            self._purse[i] += START * self.table.ms[0][self.estimates.chain] / len(self._purse)

    def _probe(self, running: int, costs: Sequence[float]) -> int | None:
        """Another shape for this round, if one that would tell something can be paid for."""
        chain = self.estimates.chain
        asked = [i for i in range(len(costs)) if i != running and (i > running or chain in (i, running))]
        self._since_probe += 1
        self._since_advance += 1
        for i in asked:
            self._purse[i] += EXPLORE / len(asked) * costs[running]
        if not self.estimates.known(running) or self._since_probe < GAP:
            return None
        prices = {i: self._price(running, i, costs) for i in asked}
        affordable = [i for i in asked if self._purse[i] >= prices[i]]
        if not affordable:
            return None
        probe = min(affordable, key=lambda i: (-self._doubt(i), self.shapes[i].narrowness))
        self._purse[probe] = min(self._purse[probe] - prices[probe], 4 * prices[probe])
        self._since_probe = 0
        return probe

    def _price(self, running: int, probe: int, costs: Sequence[float]) -> float:
        """Milliseconds a probe is expected to lose: its time less what the running shape needs for its tokens."""
        worth = self.estimates.tokens(probe, SHRINK) / self.estimates.tokens(running)
        return max(0.0, costs[probe] - costs[running] * worth)

    def _doubt(self, shape: int) -> float:
        return max(1 / (1 + self.estimates.weight[i]) for i in self.estimates.parts(shape))

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
