"""Milliseconds of a round, by batch and shape: measured once at the start, interpolated for batches between."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import statistics
from collections.abc import Callable, Iterable, Sequence

MOST_BATCHES = 8  # measured at most; a round's time is close to linear between
REPEATS = 7
NOISE = 0.03  # a round that grows in nodes or requests may seem this much faster before it is measured again


@dataclasses.dataclass(frozen=True)
class CostTable:
    """batches: ascending, the first is 1. ms[b][s]: a round of batches[b] requests in shape s."""

    batches: tuple[int, ...]
    ms: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        if not self.batches or list(self.batches) != sorted(set(self.batches)) or len(self.ms) != len(self.batches):
            raise ValueError(f"a cost table needs one line for each of its ascending batches, got {self.batches}")
        if any(len(line) != len(self.ms[0]) or min(line) <= 0 for line in self.ms):
            raise ValueError("a cost table needs a positive time for each batch and shape")

    def at(self, batch: int) -> tuple[float, ...]:
        """Times of a round of `batch` requests; beyond the ends, those of the end."""
        right = bisect.bisect_left(self.batches, batch)
        if right == len(self.batches):
            return self.ms[-1]
        if right == 0 or self.batches[right] == batch:
            return self.ms[right]
        low, high = self.batches[right - 1], self.batches[right]
        part = (batch - low) / (high - low)
        return tuple(a + (b - a) * part for a, b in zip(self.ms[right - 1], self.ms[right], strict=True))

    def place(self, batch: int) -> int:
        """The measured batch whose choice holds for `batch`: the next larger, as graphs are padded."""
        return self.batches[min(bisect.bisect_left(self.batches, batch), len(self.batches) - 1)]

    def line(self, names: Sequence[str]) -> str:
        """For the log."""
        return "; ".join(
            f"batch {batch}: " + ", ".join(f"{name} {ms:.3f}" for name, ms in zip(names, line, strict=True))
            for batch, line in zip(self.batches, self.ms, strict=True)
        )


def batches_to_measure(captured: Iterable[int], most: int = MOST_BATCHES) -> tuple[int, ...]:
    """At most `most` of the captured batch sizes: both ends, and the rest spread by ratio."""
    sizes = sorted(set(captured))
    if len(sizes) <= most:
        return tuple(sizes)
    ratio = (sizes[-1] / sizes[0]) ** (1 / (most - 1))
    wanted = [sizes[0] * ratio**i for i in range(most)]
    return tuple(sorted({min(sizes, key=lambda size: (abs(size - goal), size)) for goal in wanted}))


def measure(batches: Sequence[int], nodes: Sequence[int], time_ms: Callable[[int, int], float]) -> CostTable:
    """The table. time_ms(batch, shape): one timing of one round; nodes: of each shape.

    Each cell is the median of REPEATS timings, one in each pass over all cells: what disturbs the GPU for a while
    (another process that starts beside this one, a clock that still rises) is in every cell and in no cell's median.
    Where more nodes or more requests seem cheaper than fewer by more than NOISE, both cells are timed once more, and
    the second answer counts.
    """
    cells = _medians(time_ms, [(b, s) for b in batches for s in range(len(nodes))])
    cells |= _medians(time_ms, sorted(_suspects(cells, batches, nodes)))
    return CostTable(tuple(batches), tuple(tuple(cells[b, s] for s in range(len(nodes))) for b in batches))


def _medians(time_ms: Callable[[int, int], float], places: Sequence[tuple[int, int]]) -> dict[tuple[int, int], float]:
    passes = [{place: time_ms(*place) for place in places} for _ in range(REPEATS)]
    return {place: statistics.median(one[place] for one in passes) for place in places}


def _suspects(
    cells: dict[tuple[int, int], float], batches: Sequence[int], nodes: Sequence[int]
) -> set[tuple[int, int]]:
    """Cells of pairs in which the larger one is the faster."""
    order = sorted(range(len(nodes)), key=lambda shape: nodes[shape])
    pairs = [((b, s), (b, t)) for b in batches for s, t in itertools.pairwise(order)]
    pairs += [((a, s), (b, s)) for a, b in itertools.pairwise(batches) for s in order]
    return {cell for pair in pairs if cells[pair[1]] < cells[pair[0]] * (1 - NOISE) for cell in pair}
