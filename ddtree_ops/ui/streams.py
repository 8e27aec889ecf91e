"""Standard output and error that may go away: a reader that left, a full disk. Showing must never break doing.

A deploy whose progress nobody reads any more still ends as it would have, with the exit code that it earned. What goes
on without end (following logs, watching) asks ``gone`` and ends.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO, cast


class Patient:
    """A text stream whose writes never raise; ``failure`` is the first that did, ``wrote`` whether there was any."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.failure: OSError | None = None
        self.wrote = False

    def write(self, text: str) -> int:
        self.wrote = self.wrote or bool(text)
        with self._kept():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._kept():
            self._stream.flush()

    @contextlib.contextmanager
    def _kept(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.failure = self.failure or error
        except UnicodeEncodeError as error:  # a terminal that knows ASCII only
            self._stream.write(error.object.encode("ascii", "backslashreplace").decode("ascii"))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def patient_streams() -> Iterator[tuple[Patient, Patient]]:
    """Standard output and error as ``Patient`` while this lasts; what their buffers hold is written at the end."""
    whole = sys.stdout, sys.stderr
    out, err = Patient(whole[0] or _nowhere()), Patient(whole[1] or _nowhere())
    sys.stdout, sys.stderr = cast(TextIO, out), cast(TextIO, err)
    try:
        yield out, err
    finally:
        for stream in (out, err):
            stream.flush()
            if stream.failure is not None:
                _forget(stream)
        sys.stdout, sys.stderr = whole


def gone() -> bool:
    """Whether what is written to standard output arrives nowhere any more."""
    return getattr(sys.stdout, "failure", None) is not None


def only_ascii() -> bool:
    """Whether standard output cannot hold every character: then JSON escapes them."""
    return (getattr(sys.stdout, "encoding", None) or "ascii").replace("-", "").lower() not in ("utf8", "utf16", "utf32")


def _nowhere() -> TextIO:
    """A stream for a process that was started with standard output or error closed."""
    return open(os.devnull, "w", encoding="utf-8")


def _forget(stream: Patient) -> None:
    """Send what the buffer still holds nowhere: Python's own flush at its end would fail again, and say so."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
