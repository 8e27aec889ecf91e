"""The pair on the CPU: whatever the mode, the tokens are those of plain decoding."""

from __future__ import annotations

import copy

import numpy as np
import pytest
from cpu_pair import pair, prompts, run, started
from sglang_ddtree.cpu.decode import Mode, Sampling, Session
from sglang_ddtree.cpu.delta import Rows
from sglang_ddtree.reference.tree import Tree

COUNT = 12
NUMBERS = range(20)
BUDGETS = (1, 4, 16, 32)


@pytest.mark.parametrize("number", NUMBERS)
def test_trees_of_every_budget_emit_what_plain_decoding_does(number: int) -> None:
    want = run(started(number, Mode("ar")), COUNT)
    for budget in BUDGETS:
        session = started(number, Mode("tree", budget=budget))
        assert run(session, COUNT) == want, f"budget {budget}"
        assert session.counters.nodes <= budget * session.counters.rounds
    assert run(started(number, Mode("linear")), COUNT) == want


def test_nodes_beside_the_spine_were_accepted() -> None:
    """Else the equality above would have tested chains only."""
    off_spine = 0
    for number in NUMBERS[::5]:
        session = started(number, Mode("tree", budget=16))
        run(session, COUNT)
        off_spine += session.counters.off_spine
    assert off_spine > 0


@pytest.mark.parametrize("mode", [Mode("linear"), Mode("tree", budget=16), Mode("tree", budget=4, keep_spine=True)])
def test_seeded_sampling_draws_the_same_in_every_mode(mode: Mode) -> None:
    for number in (0, 7, 12):
        want = run(started(number, Mode("ar"), temperature=0.9), COUNT)
        assert run(started(number, mode, temperature=0.9), COUNT) == want


@pytest.mark.parametrize("number", NUMBERS[::2])
def test_a_tree_with_its_spine_accepts_at_least_the_chain(number: int) -> None:
    session = started(number, Mode("linear"))
    while len(session.output) < COUNT:
        wide = started(number, Mode("tree", budget=24, keep_spine=True))
        wide.tokens = list(session.tokens)
        # the same state: caches are committed by tokens alone, so the linear session's own are taken
        wide.caches, wide.context = session.caches, session.context
        tree = wide.plan()
        done = wide.pair.target.forward(
            tree.tokens[: tree.num_nodes],
            Rows(tree.parent[: tree.num_nodes], tree.depth[: tree.num_nodes]),
            session.caches,
        )
        path, row = 0, 0
        while (child := _child(tree, row, int(done.logits[row].argmax()))) >= 0:
            row, path = child, path + 1
        accepted = len(session.round()) - 1
        assert path >= accepted


def _child(tree: Tree, row: int, token: int) -> int:
    child = int(tree.next_token[row])
    while child >= 0 and int(tree.tokens[child]) != token:
        child = int(tree.next_sibling[child])
    return child


def test_a_node_has_the_law_of_its_path_alone() -> None:
    """The logits of every node equal those of a plain pass over its path: each node sees its parent's state."""
    session = started(3, Mode("tree", budget=16))
    tree = session.plan()
    rows = Rows(tree.parent[: tree.num_nodes], tree.depth[: tree.num_nodes])
    target = session.pair.target
    whole = target.forward(tree.tokens[: tree.num_nodes], rows, session.caches)
    for row in range(tree.num_nodes):
        path = tree.path(row)
        alone = target.forward(tree.tokens[path], Rows.chain(len(path)), session.caches)
        np.testing.assert_allclose(whole.logits[row], alone.logits[-1], atol=1e-9)


def test_shadow_linear_decides_like_linear_and_scores_trees() -> None:
    linear, shadow = started(1, Mode("linear")), started(1, Mode("shadow-linear", budget=16))
    assert run(linear, COUNT) == run(shadow, COUNT)
    assert shadow.counters.histogram == linear.counters.histogram
    told = shadow.counters.public(shadow.mode, 16)
    assert told["trees"] + len(shadow.open) == shadow.counters.rounds
    assert sum(told["histogram"]) == told["trees"] > 0
    total = sum(score * trees for score, trees in enumerate(told["histogram"]))
    assert told["would_accept_per_tree"] == pytest.approx(total / told["trees"], abs=0.001)
    assert linear.counters.public(linear.mode, 16) == {}


def test_the_verifier_commits_what_a_prompt_would() -> None:
    """After tree rounds the caches are those of reading the same text as a prompt."""
    session = started(4, Mode("tree", budget=16))
    run(session, COUNT)
    fresh = pair().target.new_caches()
    pair().target.prefill(np.array(session.tokens[:-1]), fresh)
    assert fresh.length == session.caches.length == len(session.tokens) - 1
    for layer, state in fresh.state.items():
        np.testing.assert_allclose(session.caches.state[layer], state, atol=1e-9)
        np.testing.assert_allclose(session.caches.window[layer], fresh.window[layer], atol=1e-9)


def test_counters_add_up() -> None:
    session = started(2, Mode("tree", budget=8))
    run(session, COUNT)
    counters = session.counters
    assert sum(counters.histogram.values()) == counters.rounds
    assert sum(n * count for n, count in counters.histogram.items()) == len(session.output) - 1
    assert counters.accept_length == pytest.approx((len(session.output) - 1) / counters.rounds)


def test_float32_reads_the_same_prompt_alike() -> None:
    session = Session(pair(np.float32), Mode("tree", budget=16), prompts()[0], Sampling())
    plain = Session(pair(np.float32), Mode("ar"), prompts()[0], Sampling())
    assert session.generate(12) == plain.generate(12)


def test_a_mode_that_drafts_needs_a_drafter() -> None:
    alone = copy.copy(pair())
    alone.drafter = None
    with pytest.raises(ValueError, match="needs a drafter"):
        Session(alone, Mode("linear"), [1, 2, 3])
