"""The policy of mode auto against invented drafters and costs (benchmarks/engine/auto_simulation.py)."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import numpy as np
import pytest
from sglang_ddtree.auto import policy as module
from sglang_ddtree.auto.costs import CostTable
from sglang_ddtree.auto.policy import Estimates, Policy, Seen
from sglang_ddtree.auto.shapes import Shape, intervals, shapes_of, told_by

from benchmarks.engine import auto_simulation as simulation

SHAPES = simulation.SHAPES
CHAIN = len(SHAPES) - 1
PROFILES = {profile.name: profile for profile in simulation.PROFILES}
ROUNDS = {1: 16000, 4: 8000, 16: 4000}


@functools.cache
def acceptance(profile: str) -> np.ndarray:
    return simulation.acceptance(PROFILES[profile])


def start(costs: CostTable, seed: int = 1, half_life: float = module.HALF_LIFE) -> simulation.Run:
    return simulation.Run(Policy(SHAPES, costs, half_life), costs, seed)


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("curve", simulation.CURVES)
def test_it_is_never_much_slower_than_the_chain_and_close_to_the_best(profile: str, curve: str) -> None:
    costs = simulation.table_of(simulation.CURVES[curve])
    for batch, rounds in ROUNDS.items():
        run = start(costs)
        run.rounds(rounds, batch, acceptance(profile))
        alone = simulation.speeds(acceptance(profile), costs, batch)
        assert run.speed >= 0.99 * alone[CHAIN], (batch, run.speed / alone[CHAIN])
        assert run.speed >= 0.965 * max(alone), (batch, run.speed / max(alone))
        chosen = run.policy.current[batch]
        assert alone[chosen] >= 0.97 * max(alone), (batch, SHAPES[chosen].name)


def lost(run: simulation.Run, costs: CostTable, batch: int, accepted: np.ndarray) -> float:
    """Milliseconds that rounds off the chain took more than the chain needs for their tokens."""
    ms, mean = costs.at(batch), accepted.mean(0)
    return sum(count * (ms[i] - ms[CHAIN] * (1 + mean[i]) / (1 + mean[CHAIN])) for i, count in enumerate(run.chosen))


def test_probes_cost_at_most_what_is_set_aside() -> None:
    """Where no tree is worth its round, though some are close to it."""
    costs = simulation.table_of(simulation.CURVES["H200's ratios, then compute"])
    accepted = acceptance("siblings are worthless")
    for batch in (1, 4, 16):
        run = start(costs)
        run.rounds(12000, batch, accepted)
        assert run.policy.current[batch] == CHAIN
        aside = 1.25 * module.EXPLORE * run.ms + module.START * costs.ms[0][CHAIN]
        assert 0 < lost(run, costs, batch, accepted) <= aside, batch


@pytest.mark.parametrize("batch", [1, 8])
def test_hopeless_trees_take_little_of_the_advance_and_never_run(batch: int) -> None:
    """All that is lost is what probes lose: first to find out, then from what is saved."""
    accepted = np.repeat(acceptance("sure")[:, CHAIN:], len(SHAPES), 1)
    accepted[:, :CHAIN] //= 2
    run = start(simulation.HOPELESS)
    for rounds, share in ((700, 0.96 if batch == 1 else 0.98), (19300, 0.995)):
        run.rounds(rounds, batch, accepted)
        alone = simulation.speeds(accepted, simulation.HOPELESS, batch)
        assert run.speed >= share * alone[CHAIN], (rounds, run.speed / alone[CHAIN])
    assert (run.policy.current[batch], run.policy.switches) == (CHAIN, 0)
    assert run.policy.probes == sum(run.chosen[:CHAIN])
    assert all(map(run.policy.estimates.known, range(len(SHAPES))))
    spent = lost(run, simulation.HOPELESS, batch, accepted) - module.EXPLORE * run.ms
    assert spent <= 0.75 * module.START * simulation.HOPELESS.ms[0][CHAIN]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("pair", simulation.PAIR)
@pytest.mark.parametrize("batch", [1, 8])
def test_a_short_run_gains_where_wider_trees_win(pair: str, batch: int, seed: int) -> None:
    """The numbers of the self-test pair, in 700 rounds with their start."""
    accepted = simulation.geometric(simulation.PAIR_SHAPES, simulation.PAIR[pair])
    first = simulation.first_rounds(accepted, simulation.PAIR_SHAPES, simulation.PAIR_COSTS, batch, seed)
    assert first.gain >= (1.05 if batch == 1 else 1.13)
    assert first.compared is not None
    assert first.compared <= (128 if batch == 1 else 48)


@pytest.mark.parametrize(("batch", "soon"), [(1, 144), (8, 64)])
@pytest.mark.parametrize("pair", simulation.PAIR)
def test_a_clear_win_is_taken_soon(pair: str, batch: int, soon: int) -> None:
    """By half of 21 runs; how soon one run is sure is left to chance."""
    accepted = simulation.geometric(simulation.PAIR_SHAPES, simulation.PAIR[pair])
    left = sorted(
        simulation.first_rounds(accepted, simulation.PAIR_SHAPES, simulation.PAIR_COSTS, batch, seed).left or 9999
        for seed in range(21)
    )
    assert left[10] <= soon, left


def test_the_pairs_tokens_are_those_measured() -> None:
    for lengths in simulation.PAIR.values():
        accepted = simulation.geometric(simulation.PAIR_SHAPES, lengths)
        assert 1 + accepted.mean(0) == pytest.approx(lengths, abs=0.1)
        assert (np.diff(accepted[:, :-1]) >= 0).all()


def test_a_tree_not_seen_is_imagined_from_the_chain() -> None:
    """Half of a whole chain's nodes from 15 nodes on, 8 fifteenths of that for 8; and never more than was seen."""
    estimates = Estimates(SHAPES)
    assert estimates.expected(3) == 1.0
    estimates.observe(Seen((0, 0, 0, 0, 100), (0, 0, 0, 0, 600), (0, 0, 0, 0, 5000)))
    assert [estimates.expected(i) for i in range(4)] == pytest.approx([1 + 3 * 8 / 15, 4.0, 4.0, 4.0])
    assert estimates.tokens(3) == 1.0
    estimates.observe(Seen((0, 0, 0, 10**6, 100), (5 * 10**6, 0, 0, 0, 600), (26 * 10**6, 0, 0, 0, 5000)))
    assert [estimates.expected(i) for i in range(4)] == pytest.approx([6.0] * 4, abs=1e-4)


def test_the_widest_tree_is_the_first_probe_where_rows_are_cheap_and_a_narrow_one_where_they_are_dear() -> None:
    for curve, batch, name in (("flat", 1, "64"), ("rows are dear", 16, "8")):
        policy = Policy(SHAPES, simulation.table_of(simulation.CURVES[curve]))
        policy.observe(Seen((0, 0, 0, 0, 20), (0, 0, 0, 0, 80), (0, 0, 0, 0, 400)))
        chosen = [policy.choose(batch) for _ in range(3)]
        assert {SHAPES[i].name for i in chosen} == {name, "chain"}


def test_no_more_is_probed_from_one_look_to_the_next_than_makes_a_shape_known() -> None:
    for batch, most in ((1, 16), (8, 2), (100, 1)):
        policy = Policy(SHAPES, simulation.table_of(simulation.CURVES["flat"]))
        policy.observe(Seen((0, 0, 0, 0, 2000), (0, 0, 0, 0, 8000), (0, 0, 0, 0, 40000)))
        chosen = [policy.choose(batch) for _ in range(60)]
        assert sum(i != CHAIN for i in chosen) == most, batch
        assert not any(a != CHAIN and b != CHAIN for a, b in itertools.pairwise(chosen))


def test_a_tree_that_could_win_only_by_more_than_a_whole_block_is_no_open_question() -> None:
    """A chain of 9 tokens that vary much, and trees not seen; 16 tokens are a block."""
    for dear, probed in ((1.7, True), (2.0, False)):
        policy = Policy(SHAPES, CostTable((1,), ((5.0 * dear,) * CHAIN + (5.0,),)))
        policy.observe(Seen((0, 0, 0, 0, 100), (0, 0, 0, 0, 800), (0, 0, 0, 0, 12000)))
        assert any(policy.choose(1) != CHAIN for _ in range(8)) == probed


def test_a_probe_that_is_expected_to_gain_is_paid_for_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """2 % of a round from 0.4 % of the time: every fifth. Trees of 9 tokens, too few to be chosen; chains of 5."""
    monkeypatch.setattr(module, "START", 0.0)
    policy = Policy(SHAPES, CostTable((1,), ((8.0,) * len(SHAPES),)))
    chosen = []
    for n in range(20, 1020):
        policy.observe(Seen((0, 0, 0, 15, n), (120, 0, 0, 0, 4 * n), (1000, 0, 0, 0, 30 * n)))
        chosen.append(policy.choose(1))
    assert sum(i != CHAIN for i in chosen) == pytest.approx(200, abs=2)


def test_the_advance_is_given_again_for_a_change_long_after_the_last() -> None:
    policy = Policy(SHAPES, simulation.table_of(simulation.CURVES["flat"]))
    trees, nodes, squares, given = 0, 0, 0, []
    for rounds, accepted in ((0, 1), (100, 1), (100, 9), (module.APART, 9), (100, 1), (100, 1), (100, 9)):
        for _ in range(rounds):
            policy.choose(1)
        policy._advance = 0.0
        for some in (accepted - 1, accepted + 1):
            trees, nodes, squares = trees + 500, nodes + 500 * some, squares + 500 * some**2
        policy.observe(Seen((0, 0, 0, 0, trees), (0, 0, 0, 0, nodes), (0, 0, 0, 0, squares)))
        given.append((policy.estimates.changes, policy._advance > 0))
    assert given == [(0, False), (0, False), (1, False), (1, False), (2, True), (2, False), (3, False)]


def test_nothing_is_worked_out_again_until_more_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """A round waits for the choice."""
    policy = Policy(SHAPES, simulation.table_of(simulation.CURVES["flat"]))
    seen = Seen((0, 0, 0, 0, 20), (0, 0, 0, 0, 80), (0, 0, 0, 0, 400))
    policy.observe(seen)
    asked = []
    expected = policy.estimates.expected
    monkeypatch.setattr(policy.estimates, "expected", lambda shape: asked.append(shape) or expected(shape))
    policy.choose(1)
    first = len(asked)
    assert first > 0
    for _ in range(20):
        policy.choose(1)
        policy.observe(seen)
    assert len(asked) == first
    policy.choose(2)
    policy.observe(Seen((0, 0, 0, 0, 21), (0, 0, 0, 0, 84), (0, 0, 0, 0, 420)))
    policy.choose(1)
    assert len(asked) == 3 * first


@pytest.mark.parametrize(
    ("first", "then"), [("siblings are worthless", "unsure"), ("unsure", "siblings are worthless"), ("sure", "unsure")]
)
@pytest.mark.parametrize(("batch", "rounds"), [(1, 16000), (8, 4000)])
def test_it_follows_a_change_of_the_workload(first: str, then: str, batch: int, rounds: int) -> None:
    costs = simulation.table_of(simulation.CURVES["H200's ratios, then compute"])
    run = start(costs)
    run.rounds(rounds, batch, acceptance(first))
    run.rounds(rounds, batch, acceptance(then))
    tokens, ms = run.tokens, run.ms
    run.rounds(rounds // 4, batch, acceptance(then))
    alone = simulation.speeds(acceptance(then), costs, batch)
    assert (run.tokens - tokens) / (run.ms - ms) >= 0.985 * max(alone)
    assert 1 <= run.policy.estimates.changes <= 3


def test_a_steady_workload_is_no_change() -> None:
    costs = simulation.table_of(simulation.CURVES["flat"])
    for batch in (1, 16):
        run = start(costs)
        run.rounds(6000, batch, acceptance("mixed"))
        assert run.policy.estimates.changes == 0


def test_each_batch_size_has_its_own_choice() -> None:
    costs = simulation.table_of(simulation.CURVES["H200's ratios, then compute"])
    run = start(costs)
    for _ in range(40):
        run.rounds(400, 1, acceptance("unsure"))
        run.rounds(100, 16, acceptance("unsure"))
    assert SHAPES[run.policy.current[1]].name in ("16", "32")
    assert SHAPES[run.policy.current[16]].name == "8"


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_noise_makes_it_change_its_mind_seldom(seed: int) -> None:
    """Costs under which the chain and the tree of 16 give the very same speed."""
    mean = acceptance("mixed").mean(0)
    ms = [8.0 * (1 + mean[i]) / (1 + mean[CHAIN]) * (1.0 if i in (1, CHAIN) else 1.1) for i in range(len(SHAPES))]
    run = start(CostTable((1,), (tuple(ms),)), seed)
    run.rounds(30000, 1, acceptance("mixed"))
    assert run.policy.switches <= 6
    assert run.speed >= 0.99 * (1 + mean[CHAIN]) / ms[CHAIN]


def test_the_same_observations_give_the_same_choices() -> None:
    costs = simulation.table_of(simulation.CURVES["flat"])
    first, second = start(costs), start(costs)
    for run in (first, second):
        run.rounds(2000, 4, acceptance("mixed"))
    assert first.chosen == second.chosen
    assert first.policy.summary() == second.policy.summary()
    assert first.policy.probes > 0
    assert len(set(first.chosen)) > 2


def test_of_equally_fast_shapes_the_narrower_runs() -> None:
    """No node beyond the eighth is ever accepted, and every round costs the same."""
    accepted = np.full((10, len(SHAPES)), 5)
    accepted[:, CHAIN] = 2
    run = start(CostTable((1,), ((8.0,) * len(SHAPES),)))
    run.rounds(4000, 1, accepted)
    assert SHAPES[run.policy.current[1]].name == "8"


def test_it_starts_with_the_chain_and_stays_while_nothing_is_heard() -> None:
    policy = Policy(SHAPES, CostTable((1,), ((8.0,) * len(SHAPES),)))
    assert [policy.choose(1) for _ in range(500)] == [CHAIN] * 500


def test_estimates_are_those_of_each_shape_alone() -> None:
    """Increments, summed from trees of different widths, against plain means of what each shape accepted."""
    accepted = np.random.default_rng(2).permutation(acceptance("mixed"))
    told = simulation.parts(accepted)
    estimates = Estimates(SHAPES, half_life=1e12)
    totals = np.zeros((3, len(SHAPES)), dtype=np.int64)
    for shape, draws in ((3, slice(0, 5000)), (0, slice(5000, 9000)), (CHAIN, slice(9000, 14000))):
        tells = told_by(SHAPES, shape)
        totals[0, shape] += len(accepted[draws])
        for i in tells:
            totals[1, i] += told[draws, i].sum()
            totals[2, i] += (told[draws, i] ** 2).sum()
        assert estimates.observe(Seen(*(tuple(int(n) for n in line) for line in totals)))
    assert not estimates.observe(Seen(*(tuple(int(n) for n in line) for line in totals)))
    assert estimates.tokens(0) == pytest.approx(1 + accepted[:9000, 0].mean())
    beyond = (accepted[:5000, 2] - accepted[:5000, 0]).mean()
    assert estimates.tokens(2) == pytest.approx(1 + accepted[:9000, 0].mean() + beyond)
    assert estimates.tokens(CHAIN) == pytest.approx(1 + accepted[9000:14000, CHAIN].mean())
    error = np.hypot(*(told[:5000, i].std() / 5000**0.5 for i in (1, 2)))
    assert estimates.error(0, 2) == pytest.approx(error, rel=0.01)  # and of four imagined trees
    assert estimates.error(0, 2) < estimates.error(CHAIN, 0)


def test_an_observation_weighs_half_after_the_half_life() -> None:
    shapes = shapes_of((4,), 5)
    estimates = Estimates(shapes, half_life=100)
    estimates.observe(Seen((100, 0), (300, 0), (900, 0)))
    estimates.observe(Seen((100, 100), (300, 100), (900, 100)))
    assert estimates.weight == pytest.approx([50, 100])
    assert estimates.tokens(0) == pytest.approx(4)


def test_shapes_and_what_they_tell() -> None:
    shapes = shapes_of((32, 8, 16), 16)
    assert [shape.name for shape in shapes] == ["8", "16", "32", "chain"]
    assert intervals(shapes) == [(0, 8), (8, 16), (16, 32), (0, 15)]
    assert [list(told_by(shapes, i)) for i in range(4)] == [[0], [0, 1], [0, 1, 2], [3]]
    assert Shape(15, chain=True).narrowness < Shape(15).narrowness < Shape(16).narrowness


@pytest.mark.parametrize("break_it", [lambda p: setattr(p, "_price", lambda *_: 1e-9)])
def test_the_budget_test_can_fail(break_it: Callable[[Policy], None]) -> None:
    """Free probes of trees that are not worth it are seen as a loss against the chain."""
    costs = simulation.table_of(simulation.CURVES["H200's ratios, then compute"])
    run = start(costs)
    break_it(run.policy)
    run.rounds(4000, 16, acceptance("siblings are worthless"))
    alone = simulation.speeds(acceptance("siblings are worthless"), costs, 16)
    assert run.speed < 0.99 * alone[CHAIN]
