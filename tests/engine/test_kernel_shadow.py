"""The shadow ring against brute force over synthetic streams."""

from __future__ import annotations

import numpy as np
import torch
from engine_trees import buffers_of, random_tree
from sglang_ddtree.kernels.shadow import ShadowRing, shadow_step
from sglang_ddtree.reference.shadow import Proposal, shadow_score


class Stream:
    """One request: what was emitted, and every tree proposed at a round start."""

    def __init__(self, generation: int, start: int) -> None:
        self.generation, self.start = generation, start
        self.emitted: list[int] = []
        self.proposals: list[Proposal] = []


def test_scores_equal_brute_force_and_slots_may_be_reused() -> None:
    rng = np.random.default_rng(1)
    depths, rows, slots = 5, 14, 4
    ring = ShadowRing.allocate(slots, depths, rows, "cpu")
    scored, closed_early, nodes, histogram = [], 0, 0, np.zeros(depths + 1, int)
    live = {s: Stream(generation=s, start=20 + s) for s in range(slots)}
    finished: list[Stream] = []
    for step in range(60):
        for slot in list(live):
            if rng.random() < 0.08:  # the request ends; its slot goes to another one, once even at the same length
                old = live[slot]
                finished.append(old)
                live[slot] = Stream(generation=100 * (step + 1) + slot, start=old.start + len(old.emitted))
        chosen = [int(s) for s in rng.permutation(slots)[: int(rng.integers(1, slots + 1))]]
        trees, tokens, lens, commits = [], [], [], []
        for slot in chosen:
            stream = live[slot]
            tree = random_tree(rng, rows, depths, int(rng.integers(1, rows + 1)))
            stream.proposals.append(Proposal(tree, len(stream.emitted)))
            commit = int(rng.integers(1, depths + 2))
            path = tree.path(int(rng.integers(tree.num_nodes)))[1:]
            new = [int(tree.tokens[r]) for r in path] if rng.random() < 0.7 else []
            new = (new + [int(t) for t in rng.integers(0, 8, size=commit)])[:commit]
            trees.append(tree)
            lens.append(stream.start + len(stream.emitted))
            tokens.append(new + [0] * (depths + 1 - commit))
            commits.append(commit)
            stream.emitted += new
        shadow_step(
            ring, buffers_of(trees, lens), torch.tensor(chosen, dtype=torch.int32),
            torch.tensor([live[s].generation for s in chosen]), torch.tensor(lens),
            torch.tensor(tokens), torch.tensor(commits, dtype=torch.int32),
        )  # fmt: skip
    for stream in [*finished, *live.values()]:
        for proposal in stream.proposals:
            score = shadow_score(proposal, stream.emitted)
            if score is None:
                closed_early += 1
            else:
                scored.append(score)
                nodes += proposal.tree.num_nodes - 1
                histogram[score] += 1
    still_open = int((ring.cursor >= 0).sum())
    assert ring.total.tolist() == [len(scored), nodes, sum(scored), closed_early - still_open]
    assert ring.histogram.tolist() == histogram.tolist()
    assert len(scored) > 60
    assert histogram[2:].sum() > 10
    assert closed_early > still_open > 0


def test_a_gap_in_the_rounds_drops_what_is_open() -> None:
    rng = np.random.default_rng(2)
    chain = random_tree(rng, 2, 1)
    ring = ShadowRing.allocate(1, 3, 2, "cpu")
    one = torch.tensor([0], dtype=torch.int32)
    token = int(chain.tokens[1])

    def step(length: int, first: int) -> None:
        tokens = torch.tensor([[first, 0, 0, 0]])
        shadow_step(ring, buffers_of([chain], [length]), one, torch.tensor([5]), torch.tensor([length]), tokens,
                    torch.tensor([1], dtype=torch.int32))  # fmt: skip

    step(10, token)
    assert ring.total.tolist() == [1, 1, 1, 0]
    step(11, token + 1)
    assert ring.total.tolist() == [2, 2, 1, 0]
    ring.cursor[0, 0] = 0  # an open tree, then the request jumps
    step(40, token)
    assert ring.total.tolist() == [3, 3, 2, 1]
