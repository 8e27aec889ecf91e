"""Bytes in and out of a command: output split into lines as it comes, input handed over in blocks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import BinaryIO

BLOCK = 1 << 15
KEPT_LINES = 100  # the helper's result is the last one; a log that is followed for days must not fill the memory


class Lines:
    """Calls ``on_line`` for each whole line, of which it keeps the last ones; without ``on_line`` it keeps everything.

    A last line without its end counts too.
    """

    def __init__(self, on_line: Callable[[str], None] | None) -> None:
        self._on_line = on_line
        self._blocks: list[bytes] = []
        self._open: list[bytes] = []
        self._kept: deque[bytes] = deque(maxlen=KEPT_LINES)

    def add(self, block: bytes) -> None:
        if self._on_line is None:
            self._blocks.append(block)
            return
        first, *rest = block.split(b"\n")
        self._open.append(first)
        for part in rest:  # joined only when a line ends: one of megabytes comes in hundreds of blocks
            self._line(b"".join(self._open) + b"\n")
            self._open = [part]

    def _line(self, line: bytes) -> None:
        assert self._on_line is not None
        self._kept.append(line)
        self._on_line(line.removesuffix(b"\n").decode("utf-8", "replace"))

    def all(self) -> bytes:
        if self._on_line is None:
            return b"".join(self._blocks)
        if any(self._open):
            self._line(b"".join(self._open))
            self._open = []
        return b"".join(self._kept)


class Feed:
    """What a command reads: bytes or a stream, block by block, never all in memory for a stream."""

    def __init__(self, source: bytes | BinaryIO | None) -> None:
        self._stream = None if isinstance(source, bytes) or source is None else source
        self._block = memoryview(source) if isinstance(source, bytes) else memoryview(b"")
        self._refill()

    def _refill(self) -> None:
        if not self._block and self._stream is not None:
            self._block = memoryview(self._stream.read(BLOCK))
            if not self._block:
                self._stream = None

    @property
    def done(self) -> bool:
        return not self._block

    def head(self) -> memoryview:
        return self._block[:BLOCK]

    def took(self, count: int) -> None:
        self._block = self._block[count:]
        self._refill()

    def stop(self) -> None:
        self._stream, self._block = None, memoryview(b"")
