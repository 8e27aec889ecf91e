"""The same question to many hosts: order, errors, and a person who does not want to wait any more."""

from __future__ import annotations

import threading

import pytest

from ddtree_ops.hosts import side_by_side


def test_results_come_in_order_however_they_end() -> None:
    second = threading.Event()

    def slow() -> str:
        assert second.wait(10)
        return "one"

    def quick() -> str:
        second.set()
        return "two"

    assert side_by_side([slow, quick]) == ["one", "two"]


def test_no_more_at_once_than_allowed() -> None:
    busy, most, lock = [0], [0], threading.Lock()

    def work() -> None:
        with lock:
            busy[0] += 1
            most[0] = max(most[0], busy[0])
        with lock:
            busy[0] -= 1

    side_by_side([work] * 12, parallel=1)
    assert most == [1]


def test_an_end_in_one_thread_does_not_wait_for_a_silent_one() -> None:
    """A host that does not answer must not hold a person who pressed Ctrl-C."""
    never = threading.Event()

    def interrupted() -> None:
        raise KeyboardInterrupt

    try:
        with pytest.raises(KeyboardInterrupt):
            side_by_side([lambda: never.wait(60), interrupted])
    finally:
        never.set()


def test_nobody_to_ask() -> None:
    assert side_by_side([]) == []
