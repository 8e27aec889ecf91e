"""Rounds of speculative decoding for one request at a time: draft, build, verify, commit.

All modes share one round. A mode decides which tree the target verifies: none but its root (ar), the drafter's top-1
chain (linear, shadow-linear), or the best tree of the budget (tree). The emitted tokens are in every mode those of
plain decoding, greedy or seeded: the target decides at each row, the tree only says how many rows one pass may use.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from sglang_ddtree.cpu.delta import Rows
from sglang_ddtree.cpu.drafter import Drafter, target_layers
from sglang_ddtree.cpu.target import Target
from sglang_ddtree.reference.accept import Accepted, accept
from sglang_ddtree.reference.sampling import draw
from sglang_ddtree.reference.shadow import Proposal, shadow_score
from sglang_ddtree.reference.topk import log_probs, topk
from sglang_ddtree.reference.tree import Tree, build_tree

MODES = ("ar", "linear", "shadow-linear", "tree")
TOPK_MAX = 16


@dataclass(frozen=True)
class Mode:
    """How rounds are made; the names are the plugin's."""

    name: str = "ar"
    budget: int = 16
    topk_cap: int = 8
    keep_spine: bool = False

    def __post_init__(self) -> None:
        if self.name not in MODES:
            raise ValueError(f"mode {self.name!r}; choose one of {', '.join(MODES)}")

    @property
    def drafts(self) -> bool:
        return self.name != "ar"

    @property
    def builds_trees(self) -> bool:
        return self.name in ("shadow-linear", "tree")


@dataclass(frozen=True)
class Sampling:
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = field(default_factory=lambda: secrets.randbits(31))

    def choose(self, logits: np.ndarray, position: int) -> int:
        if self.temperature == 0:
            return int(logits.argmax())
        return draw(
            logits, self.seed, position, temperature=self.temperature, top_k=self.top_k, top_p=self.top_p,
            min_p=self.min_p,
        )  # fmt: skip


class Choices:
    """The target's token at each row, drawn when the walk asks for it: most rows of a tree are never visited."""

    def __init__(self, sampling: Sampling, logits: np.ndarray, positions: np.ndarray) -> None:
        self._sampling, self._logits, self._positions = sampling, logits, positions

    def __getitem__(self, row: int) -> int:
        return self._sampling.choose(self._logits[row], int(self._positions[row]))


class Counters:
    """What was drafted and accepted: of one request, or of a server's whole life."""

    def __init__(self) -> None:
        self.rounds = self.nodes = self.accepted = self.off_spine = 0
        self.histogram: dict[int, int] = {}  # accept length, the bonus token included -> rounds
        self.offered: dict[int, int] = {}  # depth -> rounds whose accepted path reached the row above, with a child
        self.reached: dict[int, int] = {}  # depth -> rounds whose accepted path reached it
        self.watched = self.dropped = 0  # shadow-linear: nodes of the trees judged; trees that the end left open
        self.judged: dict[int, int] = {}  # nodes that a tree would have had accepted -> trees

    def round(self, tree: Tree, path: list[int]) -> None:
        self.rounds += 1
        self.nodes += tree.num_nodes - 1
        self.accepted += len(path) - 1
        self.off_spine += sum(any(tree.rank_path(row)) for row in path[1:])
        _bump(self.histogram, len(path))
        for depth in range(1, len(path)):
            _bump(self.reached, depth)
        for row in path:
            if int(tree.next_token[row]) >= 0:
                _bump(self.offered, int(tree.depth[row]) + 1)

    def add(self, other: Counters) -> None:
        for name in ("rounds", "nodes", "accepted", "off_spine", "watched", "dropped"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("histogram", "offered", "reached", "judged"):
            mine = getattr(self, name)
            for key, count in getattr(other, name).items():
                mine[key] = mine.get(key, 0) + count

    @property
    def accept_length(self) -> float | None:
        """Tokens a round, the target's own included; None before the first round."""
        return (self.accepted + self.rounds) / self.rounds if self.rounds else None

    def public(self, mode: Mode, block: int) -> dict[str, Any]:
        """The figures under the plugin's names, as /server_info shows them; of a chain it has none."""
        if mode.name == "tree":
            return self._trees(block - 1)
        return self._shadows(block) if mode.builds_trees else {}

    def _trees(self, depths: int) -> dict[str, Any]:
        rounds = max(self.rounds, 1)
        by_depth = [(self.reached.get(depth, 0), self.offered.get(depth, 0)) for depth in range(1, depths + 1)]
        return {
            "trees": self.rounds,
            "nodes_per_tree": round(self.nodes / rounds, 3),
            "accepted_per_tree": round(self.accepted / rounds, 3),
            "accepted_off_spine": self.off_spine,
            "off_spine_share": round(self.off_spine / max(self.accepted, 1), 4),
            "acceptance_by_depth": [round(taken / offers, 3) if offers else None for taken, offers in by_depth],
        }

    def _shadows(self, scores: int) -> dict[str, Any]:
        trees = sum(self.judged.values())
        taken = sum(score * count for score, count in self.judged.items())
        return {
            "trees": trees,
            "nodes_per_tree": round(self.watched / max(trees, 1), 3),
            "would_accept_per_tree": round(taken / max(trees, 1), 3),
            "dropped": self.dropped,
            "histogram": [self.judged.get(score, 0) for score in range(scores)],
        }


def _bump(counts: dict[int, int], key: int) -> None:
    counts[key] = counts.get(key, 0) + 1


class Pair:
    """The loaded weights: a target and, unless the mode is ar, its drafter."""

    def __init__(
        self, target: Path, drafter: Path | None = None, *, dtype: type[np.floating[Any]] = np.float32
    ) -> None:
        self.target = Target(target, dtype, target_layers(drafter) if drafter else ())
        self.drafter = Drafter(drafter, dtype) if drafter else None

    @property
    def block(self) -> int:
        return self.drafter.block if self.drafter else 1


class Session:
    """One request: its tokens, its caches, its rounds."""

    def __init__(self, pair: Pair, mode: Mode, prompt: list[int], sampling: Sampling | None = None) -> None:
        if mode.drafts and pair.drafter is None:
            raise ValueError(f"mode {mode.name} needs a drafter")
        self.pair, self.mode, self.sampling = pair, mode, sampling or Sampling()
        self.tokens = list(prompt)
        self.prompt_tokens = len(prompt)
        self.counters = Counters()
        self.caches = pair.target.new_caches()
        self.context = pair.drafter.new_cache() if pair.drafter else []
        self.open: list[Proposal] = []  # shadow-linear: trees not judged yet
        self.last_logits: list[np.ndarray] = []  # rows that chose the last step's tokens, one each

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_tokens :]

    def start(self) -> list[int]:
        """Read the prompt; the first token."""
        logits, features = self.pair.target.prefill(np.array(self.tokens), self.caches)
        if self.pair.drafter:
            self.pair.drafter.extend(features, self.context)
        self.last_logits = [logits]
        self.tokens.append(self.sampling.choose(logits, self.caches.length - 1))
        return self.tokens[-1:]

    def draft(self) -> tuple[np.ndarray, np.ndarray]:
        """Top log-probabilities and ids [depths, K] of the drafter for the slots after the last token."""
        drafter, target = self.pair.drafter, self.pair.target
        assert drafter is not None
        hidden = drafter.draft(self.tokens[-1], target.embedding, self.context)
        ids, values, lse = topk(hidden @ target.head.T, TOPK_MAX)
        return log_probs(values, lse), ids

    def plan(self) -> Tree:
        """The tree that this round verifies."""
        root = self.tokens[-1]
        if not self.mode.drafts:
            return build_tree(np.zeros((0, 1)), np.zeros((0, 1), dtype=np.int64), root, 1)
        logp, ids = self.draft()
        cap = min(self.mode.topk_cap, self.mode.budget)
        if self.mode.builds_trees:
            tree = build_tree(logp[:, :cap], ids[:, :cap], root, self.mode.budget + 1, keep_spine=self.mode.keep_spine)
            if self.mode.name == "tree":
                return tree
            self.open.append(Proposal(tree, len(self.tokens)))
        return build_tree(logp[:, :1], ids[:, :1], root, self.pair.block)

    def verify(self, tree: Tree) -> Accepted:
        """One pass of the target over the tree, the walk, and the commit of the accepted path."""
        used = tree.num_nodes
        rows = Rows(tree.parent[:used], tree.depth[:used])
        done = self.pair.target.forward(tree.tokens[:used], rows, self.caches)
        choices: Any = Choices(self.sampling, done.logits, self.caches.length + rows.depth)
        accepted = accept(tree, choices)
        self.pair.target.commit(done, accepted.path, self.caches)
        if self.pair.drafter:
            self.pair.drafter.extend(done.features[accepted.path], self.context)
        self.last_logits = [done.logits[row] for row in accepted.path]
        return accepted

    def round(self) -> list[int]:
        """One round: at least one new token."""
        tree = self.plan()
        accepted = self.verify(tree)
        self.tokens += accepted.tokens
        self.counters.round(tree, accepted.path)
        self._judge_shadows()
        return accepted.tokens

    def _judge_shadows(self) -> None:
        waiting = []
        for proposal in self.open:
            score = shadow_score(proposal, self.tokens)
            if score is None:
                waiting.append(proposal)
            else:
                self.counters.watched += proposal.tree.num_nodes - 1
                _bump(self.counters.judged, score)
        self.open = waiting

    def generate(self, count: int) -> list[int]:
        """The first ``count`` tokens after the prompt."""
        self.start()
        while len(self.output) < count:
            self.round()
        return self.output[:count]
