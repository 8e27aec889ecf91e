"""The policy of mode auto against invented drafters and costs (benchmarks/engine/auto_simulation.py)."""

from __future__ import annotations

import functools
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


def test_probes_cost_at_most_what_is_set_aside() -> None:
    """Where no tree is worth its round, all that is lost is what probes lose."""
    costs = simulation.table_of(simulation.CURVES["H200's ratios, then compute"])
    accepted = acceptance("siblings are worthless")
    for batch in (1, 4, 16):
        run = start(costs)
        run.rounds(12000, batch, accepted)
        assert run.policy.current[batch] == CHAIN
        assert run.policy.switches == 0
        ms, mean = costs.at(batch), accepted.mean(0)
        lost = sum(
            count * (ms[i] - ms[CHAIN] * (1 + mean[i]) / (1 + mean[CHAIN])) for i, count in enumerate(run.chosen)
        )
        assert 0 < lost <= 0.005 * run.ms + module.START * costs.ms[0][CHAIN]
        assert run.policy.probes == sum(run.chosen[:CHAIN])


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
    assert len({count > 0 for count in first.chosen}) == 1  # all were tried


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
    assert estimates.error(0, 2) == pytest.approx(error)
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


@pytest.mark.parametrize("break_it", [lambda p: setattr(p, "_price", lambda *_: 0.0)])
def test_the_budget_test_can_fail(break_it: Callable[[Policy], None]) -> None:
    """Free probes of trees that are not worth it are seen as a loss against the chain."""
    costs = simulation.table_of(simulation.CURVES["H200's ratios, then compute"])
    run = start(costs)
    break_it(run.policy)
    run.rounds(4000, 16, acceptance("siblings are worthless"))
    alone = simulation.speeds(acceptance("siblings are worthless"), costs, 16)
    assert run.speed < 0.99 * alone[CHAIN]
