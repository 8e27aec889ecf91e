"""The settings of mode auto: the widths to choose among, beside what every tree has (config.DDTreeConfig).

To SGLang and to the rest of this package a server in mode auto is a tree of its widest width. The choice of the user
travels in the same environment variable, as {"mode": "auto", "widths": [8, 16, 32], ...} without a budget.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from collections.abc import Sequence
from typing import Any

from sglang_ddtree import config, states
from sglang_ddtree.auto.shapes import Shape, shapes_of
from sglang_ddtree.config import DDTreeConfig

AUTO = "auto"
MODES = (*config.MODES, AUTO)
CHOICES = ("measured", "cycle")
_OWN = ("widths", "choice")


@dataclasses.dataclass(frozen=True)
class AutoConfig:
    """widths: nodes of the trees to choose among; the drafter's chain is always one more choice.

    choice: measured (by cost and acceptance) or cycle (the next one each round, which is how parity is proven: it is
    no way to serve).
    """

    widths: tuple[int, ...] = (8, 16, 32)
    choice: str = "measured"

    def __post_init__(self) -> None:
        if not self.widths or any(not 1 <= width <= config.MAX_BUDGET for width in self.widths):
            raise ValueError(
                f"--speculative-ddtree-widths is {','.join(map(str, self.widths)) or 'empty'}; "
                f"give one or more numbers of nodes, each 1 to {config.MAX_BUDGET}."
            )
        if len(set(self.widths)) != len(self.widths):
            raise ValueError(f"--speculative-ddtree-widths names a width twice: {','.join(map(str, self.widths))}.")
        if self.choice not in CHOICES:
            raise ValueError(f"the choice of mode auto is {self.choice!r}; it is one of {', '.join(CHOICES)}.")


@dataclasses.dataclass(frozen=True)
class AutoResolved(states.Resolved):
    """A tree of the widest width, and the shapes a round may take instead."""

    auto: AutoConfig = dataclasses.field(default_factory=AutoConfig)

    @property
    def shapes(self) -> tuple[Shape, ...]:
        return shapes_of(self.auto.widths, self.block_size)

    def of_shape(self, shape: Shape) -> states.Resolved:
        """What a server of this shape alone would be resolved to.

        The chain is the tree whose every node is the drafter's first choice: a spine of block size - 1 nodes.
        """
        given = self.config
        spine = given.keep_spine or shape.chain
        chosen = dataclasses.replace(given, budget=shape.nodes, keep_spine=spine)
        return states.Resolved(chosen, self.block_size, self.verdict, self.states)

    def public(self) -> dict[str, Any]:
        return {
            **super().public(),
            "mode": AUTO,
            "widths": [shape.name for shape in self.shapes],
            "choose_by": self.auto.choice,
        }


def parse_widths(text: str) -> tuple[int, ...]:
    """'8,16,32' of a flag."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers such as 8,16,32") from None


def read(values: dict[str, Any]) -> tuple[DDTreeConfig, AutoConfig | None]:
    """The settings in a JSON object of the environment variable; AutoConfig in mode auto only."""
    own = {name: value for name, value in values.items() if name in _OWN}
    rest = {name: value for name, value in values.items() if name not in _OWN}
    if values.get("mode") != AUTO:
        if own:
            raise ValueError(f"{' and '.join(sorted(own))} set without --speculative-ddtree-mode auto.")
        return DDTreeConfig.from_json(json.dumps(rest)), None
    if "budget" in rest:
        raise ValueError(
            "--speculative-ddtree-budget does not apply to mode auto; name the budgets to choose among with "
            "--speculative-ddtree-widths."
        )
    if "widths" in own:
        own["widths"] = _whole_numbers(own["widths"])
    auto = AutoConfig(**own)
    tree = {**rest, "mode": "tree", "budget": max(auto.widths)}
    return DDTreeConfig.from_json(json.dumps(tree)), auto


def _whole_numbers(found: Any) -> tuple[int, ...]:
    if not isinstance(found, Sequence) or isinstance(found, str) or any(type(width) is not int for width in found):
        raise ValueError(f"widths in {config.ENV} are {found!r}, not a list of whole numbers.")
    return tuple(found)


def environment() -> dict[str, Any]:
    """The JSON object in the environment variable; empty if it is not set."""
    text = os.environ.get(config.ENV, "")
    if not text:
        return {}
    try:
        values = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{config.ENV} is no JSON object: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{config.ENV} holds {type(values).__name__}, not a JSON object.")
    return values


def from_environment() -> tuple[DDTreeConfig, AutoConfig | None]:
    return read(environment())


def to_json(tree: DDTreeConfig, auto: AutoConfig | None) -> str:
    """The inverse of `read`."""
    if auto is None:
        return tree.to_json()
    values = {**dataclasses.asdict(tree), **dataclasses.asdict(auto), "mode": AUTO}
    del values["budget"]
    return json.dumps(values, sort_keys=True)
