"""The seam between ddtree-ops and a machine: run a command, put a file, get a file.

Three implementations: ``ssh`` (fabric and paramiko), ``local`` (this machine) and ``fake`` (scripted, for tests).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import BinaryIO, Protocol


@dataclass(frozen=True)
class Completed:
    """A command that ended: its argv, exit status, and what it wrote."""

    argv: tuple[str, ...]
    rc: int
    out: bytes
    err: bytes

    @property
    def text(self) -> str:
        return self.out.decode("utf-8", "replace")

    @property
    def err_text(self) -> str:
        return self.err.decode("utf-8", "replace")


class Remote(Protocol):
    """One machine. Errors are ``UnreachableError`` and its kinds; an exit status is an answer, not an error."""

    @property
    def name(self) -> str:
        """The host's name in the inventory."""
        ...

    @property
    def round_trips(self) -> int:
        """How many times a command was run, a file put or read: what the link's latency is paid for."""
        ...

    def run(
        self,
        argv: Sequence[str],
        *,
        deadline_s: float,
        stdin: bytes | BinaryIO | None = None,
        sudo: bool = False,
        on_line: Callable[[str], None] | None = None,
    ) -> Completed:
        """Run ``argv`` (every argument quoted; no shell syntax) and wait for its end.

        The remote process is bounded too: it must not live on after ``deadline_s``. ``on_line`` gets each line
        of standard output as it comes.  Raises DeadlineError when the deadline passes.
        """
        ...

    def put(self, data: bytes, path: str, *, mode: int = 0o644, deadline_s: float, sudo: bool = False) -> None:
        """Write a file so that it is whole or absent: temporary name, size and sha256 checked there, fsync, rename."""
        ...

    def get(self, path: str, *, deadline_s: float, sudo: bool = False, limit: int = 64 << 20) -> bytes:
        """Read a file of at most ``limit`` bytes."""
        ...

    def close(self) -> None:
        """Let go of connections. Safe to call twice."""
        ...
