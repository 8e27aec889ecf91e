"""Waiting in tests: for a condition, never for a time. The limit is only there so that a test that fails ends."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

NOBODY = 2**22 + 1  # beyond the largest number that Linux gives a process
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


def running(word: str) -> list[int]:
    """The processes with ``word`` on their command line; choose one that nothing else on the machine has."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().decode("utf-8", "replace").split("\0")
            except OSError:
                continue  # it ended meanwhile
            if word in words:
                found.append(int(entry.name))
    return found
