"""Arms that share a GPU's memory count it in one unit, whatever parts each of them names."""

from __future__ import annotations

import contextlib
import fcntl
import threading
from pathlib import Path

import pytest
from sglang_ddtree.parity import arm


def free(lock: Path) -> int:
    """Quarters that nobody holds."""
    found = 0
    for quarter in range(arm.QUARTERS):
        with Path(f"{lock}.memory.{quarter}").open("a") as handle, contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            found += 1
    return found


@pytest.mark.parametrize(
    ("shares", "left"),
    [([(0, 1)], 4), ([(1, 4)], 3), ([(1, 2)], 2), ([(2, 2)], 0), ([(1, 2), (1, 2)], 0), ([(1, 2), (1, 4)], 1)],
)
def test_shares_are_quarters_of_one_memory(shares: list[tuple[int, int]], left: int, tmp_path: Path) -> None:
    lock = tmp_path / "gpu.lock"
    with contextlib.ExitStack() as stack:
        for part in shares:
            stack.enter_context(arm.memory(str(lock), *part))
        assert free(lock) == left
    assert free(lock) == arm.QUARTERS


def test_two_that_want_all_of_it_get_it_in_turn(tmp_path: Path) -> None:
    lock, seen = tmp_path / "gpu.lock", []  # type: tuple[Path, list[int]]

    def take() -> None:
        with arm.memory(str(lock), 2, 2):
            seen.append(free(lock))

    threads = [threading.Thread(target=take, daemon=True) for _ in range(2)]
    with arm.memory(str(lock), 1, 4):
        for thread in threads:
            thread.start()
        assert not seen
    for thread in threads:
        thread.join(60)
    assert seen == [0, 0]


@pytest.mark.parametrize("part", [(1, 3), (3, 2), (-1, 4)])
def test_what_is_no_part_in_quarters_is_refused(part: tuple[int, int], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="shares of memory"), arm.memory(str(tmp_path / "lock"), *part):
        pass


def test_without_a_lock_nobody_waits() -> None:
    with arm.memory(None, 2, 2), arm.memory(None, 2, 2):
        pass
