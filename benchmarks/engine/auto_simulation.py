"""How mode auto's policy behaves on invented drafters and costs: `python -m benchmarks.engine.auto_simulation`.

A simulation: no model and no GPU is involved. It plays the real policy against acceptance drawn from the reference
builder's trees, in rounds whose cost is a formula, and compares with every fixed width. It says whether the policy
finds what is best under these assumptions, not what a server gains. A second table is about the first 700 rounds of a
server, with the accept lengths and the cost table that one H200 gave for the self-test pair.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import statistics
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
SHORT, SEEDS = 700, 20  # rounds of the second table, and runs behind each of its lines


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


# The self-test pair with records on one H200: mode auto's cost table (milliseconds of GPU work at 1 and 8 requests) and
# tokens a round, one request, at two temperatures. The tree of 8 was not measured by itself; its tokens are a guess.
PAIR_SHAPES = shapes_of((8, 16, 32), BLOCK)
PAIR_COSTS = CostTable((1, 8), ((0.528, 0.513, 0.543, 0.519), (0.558, 0.566, 0.620, 0.571)))
PAIR = {"temperature 0": (5.3, 5.8, 6.15, 4.98), "temperature 1": (2.2, 2.36, 2.45, 1.87)}
# Trees that accept half of what the chain does, and 2.5 times its time for 65 rows of 8 requests.
HOPELESS = CostTable((1, 8), ((0.53, 0.54, 0.57, 0.6, 0.52), (0.6, 0.7, 0.95, 1.4275, 0.571)))


def geometric(shapes: Sequence[Shape], lengths: Sequence[float], seed: int = 5, draws: int = 20000) -> np.ndarray:
    """Accepted nodes int64 [draws, shapes] with these tokens a round: of the chain and the narrowest tree as if every
    node were accepted with one probability, and in some draws a geometric number more beyond each next width.
    """
    random = np.random.default_rng(seed)
    columns = [_truncated(random, draws, lengths[0] - 1, min(shapes[0].nodes, BLOCK - 1))]
    for low, high in itertools.pairwise(lengths[:-1]):
        more = (random.random(draws) < (high - low) / 2) * random.geometric(0.5, draws)
        columns.append(np.minimum(columns[-1] + more, BLOCK - 1))
    columns.append(_truncated(random, draws, lengths[-1] - 1, shapes[-1].nodes))
    return np.stack(columns, 1).astype(np.int64)


def _truncated(random: np.random.Generator, draws: int, mean: float, most: int) -> np.ndarray:
    """Nodes accepted one after the other, at most `most`, with the probability a node that gives this mean."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(middle**d for d in range(1, most + 1)) < mean else (low, middle)
    return np.minimum(random.geometric(1 - low, draws) - 1, most)


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
        self.totals = np.zeros((3, len(self.policy.shapes)), dtype=np.int64)
        self.waiting = self.totals.copy()
        self.chosen = [0] * len(self.policy.shapes)

    def rounds(self, count: int, batch: int, accepted: np.ndarray) -> None:
        told, mean = parts(accepted), accepted.mean(0)
        draws = self.random.integers(len(accepted), size=(count, batch))
        cost = self.costs.at(batch)
        for number in range(count):
            shape = self.policy.choose(batch)
            self.tokens += batch * (1 + mean[shape])
            self.ms += cost[shape]
            self.chosen[shape] += 1
            tells = told_by(self.policy.shapes, shape)
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


@dataclasses.dataclass(frozen=True)
class Start:
    """A server's first rounds. compared: by which round every shape was known; left: by which another shape than the
    chain ran by choice; None if neither happened. gain: tokens a millisecond of all rounds, against the chain's.
    """

    compared: int | None
    left: int | None
    gain: float


def first_rounds(accepted: np.ndarray, shapes: Sequence[Shape], costs: CostTable, batch: int, seed: int) -> Start:
    run = Run(Policy(shapes, costs), costs, seed)
    estimates, place = run.policy.estimates, costs.place(batch)
    compared = left = None
    for done in range(LAG, SHORT + 1, LAG):
        run.rounds(LAG, batch, accepted)
        if compared is None and all(map(estimates.known, range(len(shapes)))):
            compared = done
        if left is None and run.policy.current[place] != estimates.chain:
            left = done
    return Start(compared, left, run.speed / speeds(accepted, costs, batch)[-1])


def short_table() -> list[str]:
    """Of SEEDS runs of the first rounds, the middle one and the worst; SHORT where something did not happen."""
    head = "| pair | batch | best | auto | worst | compared by | left the chain by | worst |"
    lines = [head, "| --- " * (head.count("|") - 1) + "|"]
    for title, lengths in PAIR.items():
        accepted = geometric(PAIR_SHAPES, lengths)
        for batch in PAIR_COSTS.batches:
            starts = [first_rounds(accepted, PAIR_SHAPES, PAIR_COSTS, batch, seed) for seed in range(SEEDS)]
            alone = speeds(accepted, PAIR_COSTS, batch)
            gains = sorted(start.gain for start in starts)
            compared = [start.compared or SHORT for start in starts]
            left = [start.left or SHORT for start in starts]
            lines.append(
                f"| {title} | {batch} | {max(alone) / alone[-1]:.3f} | {statistics.median(gains):.3f} | {gains[0]:.3f} "
                f"| {statistics.median(compared):.0f} | {statistics.median(left):.0f} | {max(left)} |"
            )
    return lines


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
    print(f"\nThe first {SHORT} rounds\n", *short_table(), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
