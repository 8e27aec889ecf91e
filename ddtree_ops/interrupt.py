"""Ctrl-C and SIGTERM: the first asks every running step to end tidily, the second ends the program at once."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import BinaryIO

from ddtree_ops.errors import ExitCode


class Interrupted(Exception):
    """A person or the system asked us to stop. Not an error: what was begun is taken back, then we end."""


class Token:
    """Set once, looked at between steps and while waiting."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self.signal = ""

    def set(self, name: str) -> None:
        self.signal = self.signal or name
        self._event.set()

    @property
    def is_set(self) -> bool:
        return self._event.is_set()

    def check(self) -> None:
        if self._event.is_set():
            raise Interrupted(self.signal)


@contextmanager
def handling(token: Token, say: Callable[[str], None]) -> Iterator[Token]:
    """While this lasts, SIGINT and SIGTERM set ``token``; a second one ends the process with 130 and no tidying.

    The second is ``os._exit``: threads may be inside a call to a host that no longer answers, and must not hold us.
    """
    caught = (signal.SIGINT, signal.SIGTERM)

    def handler(number: int, _frame: FrameType | None) -> None:
        if token.is_set:
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


class Watched:
    """A binary stream that stops being read when ``token`` is set, so that a long upload can be interrupted."""

    def __init__(self, stream: BinaryIO, token: Token) -> None:
        self._stream = stream
        self._token = token

    def read(self, size: int = -1) -> bytes:
        self._token.check()
        return self._stream.read(size)

    def close(self) -> None:
        self._stream.close()
