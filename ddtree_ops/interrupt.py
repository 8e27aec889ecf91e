"""Ctrl-C and SIGTERM: the first asks every running step to end tidily, the second ends the program at once."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Protocol

from ddtree_ops.clock import Deadline
from ddtree_ops.errors import ExitCode


class Interrupted(Exception):
    """A person or the system asked us to stop. Not an error: what was begun is taken back, then we end."""


class Checks(Protocol):
    """What is looked at between steps and while waiting; raises when it is time to end."""

    def check(self) -> None: ...


class Token:
    """Set once, looked at between steps and while waiting."""

    def __init__(self) -> None:
        self.is_set = False  # no Event: its lock would keep a second signal waiting that comes while it is being set
        self.signal = ""

    def set(self, name: str) -> None:
        self.signal = self.signal or name
        self.is_set = True

    def check(self) -> None:
        if self.is_set:
            raise Interrupted(self.signal)


class Limited:
    """A token that also ends its work when a deadline has passed."""

    def __init__(self, token: Token, deadline: Deadline, late: Exception) -> None:
        self._token, self._deadline, self._late = token, deadline, late

    def check(self) -> None:
        self._token.check()
        if self._deadline.passed:
            raise self._late


@contextmanager
def handling(token: Token, say: Callable[[str], None]) -> Iterator[Token]:
    """While this lasts, SIGINT, SIGTERM and SIGHUP set ``token``; a second one ends the process with 130 at once.

    The second is ``os._exit``: threads may be inside a call to a host that no longer answers, and must not hold us.
    """
    caught = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def handler(number: int, _frame: FrameType | None) -> None:
        if token.is_set:
            with suppress(OSError):  # a terminal that is gone must not keep us
                os.write(2, b"\nended at once; the host's lock names this command until it runs out\n")
            os._exit(ExitCode.INTERRUPTED)
        token.set(signal.Signals(number).name)
        say("interrupted: taking back what was begun (once more to end at once)")

    previous = {number: signal.signal(number, handler) for number in caught}
    try:
        yield token
    finally:
        for number, old in previous.items():
            signal.signal(number, old)
