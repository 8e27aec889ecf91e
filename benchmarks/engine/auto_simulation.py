"""How mode auto's policy behaves on invented drafters and costs: `python -m benchmarks.engine.auto_simulation`.

A simulation: no model and no GPU is involved. It plays the real policy against acceptance drawn from the reference
builder's trees, in rounds whose cost is a formula, and compares with every fixed width. It says whether the policy
finds what is best under these assumptions, not what a server gains.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2] / "patches" / "sglang-ddtree" / "src"))

from sglang_ddtree.auto.costs import CostTable
from sglang_ddtree.auto.policy import Policy, Seen
from sglang_ddtree.auto.shapes import Shape, shapes_of, told_by
from sglang_ddtree.reference.tree import build_tree

BLOCK, WIDTHS, CHILDREN = 16, (8, 16, 32, 64), 8
SHAPES = shapes_of(WIDTHS, BLOCK)
LAG = 8  # rounds between two looks at the totals, which are as old when they arrive
CONTEXTS, DRAWS = 150, 100


@dataclasses.dataclass(frozen=True)
class Profile:
    """An invented drafter. Each context has one confidence, from Beta(a, b), the share of its first choice; the others
    fall by half. siblings: how often the target takes one of those others where it leaves the first choice.
    """

    name: str
    a: float
    b: float
    siblings: float = 0.9


PROFILES = (
    Profile("sure", 9, 1.5),
    Profile("mixed", 3, 2),
    Profile("unsure", 2, 4),
    Profile("siblings are worthless", 6, 2, siblings=0.0),
)
Curve = Callable[[int, Shape], float]
# Milliseconds by requests and shape. The H200's ratios: benchmarks/results/engine-h200.md, batch 1.
CURVES: dict[str, Curve] = {
    "flat": lambda batch, shape: 6.0 + 0.001 * batch * shape.nodes,
    "H200's ratios, then compute": lambda batch, shape: 5.5 + (0.042 * shape.nodes) * (0.8 + 0.2 * batch),
    "compute from 64 rows": lambda batch, shape: 5.0 + 0.06 * max(64.0, batch * (shape.nodes + 1.0)),
    "rows are dear": lambda batch, shape: 2.0 + 0.3 * batch * (shape.nodes + 1.0),
}


def acceptance(profile: Profile, seed: int = 0) -> np.ndarray:
    """Accepted nodes int64 [draws, shapes] of the same draws by every shape."""
    random = np.random.default_rng(seed)
    depths, widest = BLOCK - 1, max(WIDTHS)
    found = []
    for _ in range(CONTEXTS):
        sure = np.clip(random.beta(profile.a, profile.b), 0.02, 0.98)
        law = np.concatenate([[sure], (1 - sure) * 0.5 ** np.arange(1, CHILDREN)])
        tree = build_tree(np.tile(np.log(law), (depths, 1)), np.tile(np.arange(CHILDREN), (depths, 1)), 0, widest + 1)
        row_of = {tree.rank_path(row): row for row in range(1, tree.num_nodes)}
        true = np.concatenate([[sure], law[1:] * profile.siblings])
        true = np.append(true, 1 - true.sum())
        ranks = random.choice(CHILDREN + 1, size=(DRAWS, depths), p=true)
        found += [_accepted(list(path), row_of) for path in ranks.tolist()]
    return np.array(found)


def _accepted(ranks: list[int], row_of: dict[tuple[int, ...], int]) -> list[int]:
    rows = []
    while len(rows) < len(ranks) and (row := row_of.get(tuple(ranks[: len(rows) + 1]))) is not None:
        rows.append(row)
    spine = next((d for d, rank in enumerate(ranks) if rank), len(ranks))
    return [spine if shape.chain else sum(row <= shape.nodes for row in rows) for shape in SHAPES]


def parts(accepted: np.ndarray) -> np.ndarray:
    """What the policy is told of each draw, int64 [draws, shapes]: increments of the trees, all of the chain."""
    told = accepted.copy()
    told[:, 1:-1] -= accepted[:, :-2]
    return told


def table_of(curve: Curve, batches: Sequence[int] = (1, 2, 4, 8, 16)) -> CostTable:
    return CostTable(tuple(batches), tuple(tuple(curve(b, shape) for shape in SHAPES) for b in batches))


@dataclasses.dataclass
class Run:
    """A server in decode. tokens: those to be expected in the shapes it chose, so that luck is left out of the result;
    ms, chosen: the time and the rounds of each shape.
    """

    policy: Policy
    costs: CostTable
    seed: int = 1
    tokens: float = 0.0
    ms: float = 0.0

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)
        self.totals = np.zeros((3, len(SHAPES)), dtype=np.int64)
        self.waiting = self.totals.copy()
        self.chosen = [0] * len(SHAPES)

    def rounds(self, count: int, batch: int, accepted: np.ndarray) -> None:
        told, mean = parts(accepted), accepted.mean(0)
        draws = self.random.integers(len(accepted), size=(count, batch))
        cost = self.costs.at(batch)
        for number in range(count):
            shape = self.policy.choose(batch)
            self.tokens += batch * (1 + mean[shape])
            self.ms += cost[shape]
            self.chosen[shape] += 1
            tells = told_by(SHAPES, shape)
            values = told[draws[number], tells.start : tells.stop]
            self.totals[0, shape] += batch
            self.totals[1, tells.start : tells.stop] += values.sum(0)
            self.totals[2, tells.start : tells.stop] += (values * values).sum(0)
            if number % LAG == LAG - 1:
                self.policy.observe(Seen(*(tuple(int(n) for n in line) for line in self.waiting)))
                self.waiting = self.totals.copy()

    @property
    def speed(self) -> float:
        return self.tokens / self.ms


def speeds(accepted: np.ndarray, costs: CostTable, batch: int) -> list[float]:
    """Tokens a millisecond of each shape alone."""
    return [batch * (1 + mean) / ms for mean, ms in zip(accepted.mean(0), costs.at(batch), strict=True)]


def play(profile: Profile, curve: Curve, batch: int, rounds: int) -> tuple[Run, list[float]]:
    accepted, costs = acceptance(profile), table_of(curve)
    run = Run(Policy(SHAPES, costs), costs)
    run.rounds(rounds, batch, accepted)
    return run, speeds(accepted, costs, batch)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40000)
    options = parser.parse_args(argv)
    names = [shape.name for shape in SHAPES]
    print("| drafter | cost | batch | " + " | ".join(names) + " | auto | chose | switches | probes |")
    print("| --- " * (len(names) + 7) + "|")
    for profile in PROFILES:
        for title, curve in CURVES.items():
            for batch in (1, 4, 16):
                run, alone = play(profile, curve, batch, options.rounds)
                chain = alone[names.index("chain")]
                relative = " | ".join(f"{speed / chain:.3f}" for speed in alone)
                choice = SHAPES[run.policy.current[batch]].name
                print(
                    f"| {profile.name} | {title} | {batch} | {relative} | {run.speed / chain:.3f} | {choice} "
                    f"| {run.policy.switches} | {run.policy.probes} |"
                )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
