"""The cost table of mode auto: interpolation, which batches are timed, and what is timed again."""

from __future__ import annotations

from collections import Counter

import pytest
from sglang_ddtree.auto import costs
from sglang_ddtree.auto.costs import CostTable, batches_to_measure, measure

TABLE = CostTable((1, 4, 16), ((5.0, 6.0), (6.0, 9.0), (10.0, 21.0)))


@pytest.mark.parametrize(
    ("batch", "ms", "place"),
    [(1, (5.0, 6.0), 1), (2, (5 + 1 / 3, 7.0), 4), (4, (6.0, 9.0), 4), (10, (8.0, 15.0), 16), (16, (10.0, 21.0), 16),
     (40, (10.0, 21.0), 16)],
)  # fmt: skip
def test_batches_between_are_interpolated_and_those_beyond_are_the_end(
    batch: int, ms: tuple[float, ...], place: int
) -> None:
    assert TABLE.at(batch) == pytest.approx(ms)
    assert TABLE.place(batch) == place


def test_the_log_line_names_batches_and_shapes() -> None:
    line = TABLE.line(["8", "chain"])
    assert line == "batch 1: 8 5.000, chain 6.000; batch 4: 8 6.000, chain 9.000; batch 16: 8 10.000, chain 21.000"


@pytest.mark.parametrize(
    ("batches", "ms"),
    [((), ()), ((4, 1), ((1.0,), (1.0,))), ((1, 1), ((1.0,), (1.0,))), ((1,), ((1.0,), (1.0,))), ((1,), ((0.0,),)),
     ((1, 2), ((1.0,), (1.0, 2.0)))],
)  # fmt: skip
def test_a_broken_table_is_refused(batches: tuple[int, ...], ms: tuple[tuple[float, ...], ...]) -> None:
    with pytest.raises(ValueError, match="a cost table needs"):
        CostTable(batches, ms)


def test_few_captured_batches_are_all_timed_and_many_are_thinned() -> None:
    assert batches_to_measure([8, 1, 4, 2]) == (1, 2, 4, 8)
    many = batches_to_measure([1, 2, 4, *range(8, 264, 8)])
    assert (many[0], many[-1], len(many)) == (1, 256, 8)
    assert list(many) == sorted(set(many))


def exact(batch: int, shape: int) -> float:
    return 5.0 + batch * (9, 33, 16)[shape] / 10


def test_a_cell_is_the_median_of_its_timings() -> None:
    count: Counter[tuple[int, int]] = Counter()

    def noisy(batch: int, shape: int) -> float:
        count[batch, shape] += 1
        return exact(batch, shape) * (3.0 if count[batch, shape] == 2 else 1.0)

    table = measure((1, 4), (8, 32, 15), noisy)
    assert table.ms == tuple(tuple(exact(b, s) for s in range(3)) for b in (1, 4))
    assert set(count.values()) == {costs.REPEATS}


def test_a_disturbance_that_lasts_disturbs_no_cell() -> None:
    """As long as two and a half passes over the table, in which everything takes three times as long."""
    calls = 0

    def beside_another(batch: int, shape: int) -> float:
        nonlocal calls
        calls += 1
        return exact(batch, shape) * (3.0 if 5 <= calls < 5 + 15 else 1.0)

    table = measure((1, 4), (8, 32, 15), beside_another)
    assert table.ms == tuple(tuple(exact(b, s) for s in range(3)) for b in (1, 4))


@pytest.mark.parametrize("wrong", [(1, 1), (4, 2), (4, 0)])
def test_what_contradicts_its_neighbours_is_timed_once_more(wrong: tuple[int, int]) -> None:
    """The chain's 15 nodes stand last in the list and lie between the widths."""
    count: Counter[tuple[int, int]] = Counter()

    def disturbed(batch: int, shape: int) -> float:
        count[batch, shape] += 1
        first = count[batch, shape] <= costs.REPEATS
        return exact(batch, shape) * (0.3 if (batch, shape) == wrong and first else 1.0)

    table = measure((1, 4), (8, 32, 15), disturbed)
    assert table.ms == tuple(tuple(exact(b, s) for s in range(3)) for b in (1, 4))
    assert count[wrong] == 2 * costs.REPEATS
    assert set(count.values()) == {costs.REPEATS, 2 * costs.REPEATS}


def test_a_second_answer_counts_whatever_it_is() -> None:
    always = measure((1, 2), (8, 16), lambda batch, _shape: 5.0 / batch)
    assert always.ms == ((5.0, 5.0), (2.5, 2.5))


def test_differences_within_the_noise_are_left_alone() -> None:
    count: Counter[tuple[int, int]] = Counter()

    def close(batch: int, shape: int) -> float:
        count[batch, shape] += 1
        return 5.0 - 0.02 * shape

    measure((1,), (8, 16, 32), close)
    assert set(count.values()) == {costs.REPEATS}
