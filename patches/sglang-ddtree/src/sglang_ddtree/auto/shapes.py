"""What a round of mode auto can verify: a tree of one of the widths, or the chain."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Shape:
    """What a round can verify. nodes: rows besides the root. chain: the drafter's top-1 path alone."""

    nodes: int
    chain: bool = False

    @property
    def narrowness(self) -> tuple[int, bool]:
        """Smaller is narrower; of equal sizes the chain is."""
        return self.nodes, not self.chain

    @property
    def name(self) -> str:
        return "chain" if self.chain else str(self.nodes)


def shapes_of(widths: Sequence[int], block_size: int) -> tuple[Shape, ...]:
    """The trees from narrow to wide, then the chain of block_size - 1 nodes: the order of every list by shape."""
    return (*(Shape(width) for width in sorted(set(widths))), Shape(block_size - 1, chain=True))


def intervals(shapes: Sequence[Shape]) -> list[tuple[int, int]]:
    """Rows low < row <= high by shape: of a tree those beyond the next narrower one, of the chain all."""
    lows = [0, *(shape.nodes for shape in shapes[:-2]), 0]
    return [(low, shape.nodes) for low, shape in zip(lows, shapes, strict=True)]


def told_by(shapes: Sequence[Shape], place: int) -> range:
    """Whose intervals a round in shapes[place] tells: a tree those of all narrower ones too, the chain its own."""
    return range(place, place + 1) if shapes[place].chain else range(place + 1)
