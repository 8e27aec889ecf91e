"""Waiting in tests: for a condition, never for a time. The limit is only there so that a test that fails ends."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

LIMIT_S = 120.0  # a busy machine may be many times slower than a quiet one


def until(found: Callable[[], T], what: str, limit_s: float = LIMIT_S, every_s: float = 0.02) -> T:
    """What ``found`` answers as soon as it is true; fails with ``what`` and its last answer after ``limit_s``."""
    end = time.monotonic() + limit_s
    while True:
        answer = found()
        if answer:
            return answer
        assert time.monotonic() < end, f"not within {limit_s:.0f} s: {what}; the last answer is {answer!r}"
        time.sleep(every_s)
