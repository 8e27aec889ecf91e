"""Bytes in and out of a command: output split into lines as it comes, input handed over in blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import BinaryIO

BLOCK = 1 << 15


class Lines:
    """Keeps everything, and calls ``on_line`` for each whole line; a last line without its end counts too."""

    def __init__(self, on_line: Callable[[str], None] | None) -> None:
        self._on_line = on_line
        self._blocks: list[bytes] = []
        self._open = b""

    def add(self, block: bytes) -> None:
        self._blocks.append(block)
        if self._on_line is None:
            return
        *whole, self._open = (self._open + block).split(b"\n")
        for line in whole:
            self._on_line(line.decode("utf-8", "replace"))

    def all(self) -> bytes:
        if self._on_line is not None and self._open:
            self._on_line(self._open.decode("utf-8", "replace"))
            self._open = b""
        return b"".join(self._blocks)


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
