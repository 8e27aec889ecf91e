"""Remotes for tests: one that follows a script, and one that breaks a real one at a chosen call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import BinaryIO

from ddtree_ops.errors import DeadlineError, RefusedError, UnreachableError
from ddtree_ops.remote.base import Completed, Remote

OnLine = Callable[[str], None] | None


@dataclass(frozen=True)
class Scripted:
    """One expected command. ``argv`` must fit word for word (``None`` fits any word); the answer is what follows."""

    argv: Sequence[str | None]
    out: str = ""
    err: str = ""
    rc: int = 0
    raises: UnreachableError | None = None

    def fits(self, argv: Sequence[str]) -> bool:
        return len(argv) == len(self.argv) and all(
            want in (None, got) for want, got in zip(self.argv, argv, strict=True)
        )


@dataclass
class FakeRemote:
    """Answers from a script, in its order; a command that is not next in it is a failed assertion."""

    script: list[Scripted]
    name: str = "fake"
    files: dict[str, bytes] = field(default_factory=dict)
    calls: list[tuple[tuple[str, ...], bytes, bool]] = field(default_factory=list)
    closed: bool = False

    @property
    def round_trips(self) -> int:
        return len(self.calls)

    def run(
        self,
        argv: Sequence[str],
        *,
        deadline_s: float,
        stdin: bytes | BinaryIO | None = None,
        sudo: bool = False,
        on_line: OnLine = None,
    ) -> Completed:
        assert deadline_s > 0
        given = stdin if isinstance(stdin, bytes) else stdin.read() if stdin is not None else b""
        self.calls.append((tuple(argv), given, sudo))
        assert self.script, f"the script is over, but there came {list(argv)}"
        step = self.script.pop(0)
        assert step.fits(argv), f"expected {list(step.argv)}, but there came {list(argv)}"
        if step.raises is not None:
            raise step.raises
        for line in step.out.splitlines():
            if on_line is not None:
                on_line(line)
        return Completed(tuple(argv), step.rc, step.out.encode(), step.err.encode())

    def put(self, data: bytes, path: str, *, mode: int = 0o644, deadline_s: float, sudo: bool = False) -> None:
        assert deadline_s > 0
        self.calls.append((("put", path, f"{mode:o}"), data, sudo))
        self.files[path] = data

    def get(self, path: str, *, deadline_s: float, sudo: bool = False, limit: int = 64 << 20) -> bytes:
        assert deadline_s > 0
        self.calls.append((("get", path), b"", sudo))
        data = self.files.get(path)
        if data is None or len(data) > limit:
            raise RefusedError(f"{path} could not be read", self.name)
        return data

    def close(self) -> None:
        self.closed = True


@dataclass
class CutRemote:
    """A real remote whose link is cut at call ``at`` (from 0): before the command began, or after it was done.

    Both look the same from here, and that is the point: an operation must be safe to ask for again.
    """

    inner: Remote
    at: int
    after: bool
    silent: bool = False
    count: int = 0

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def round_trips(self) -> int:
        return self.count

    def run(
        self,
        argv: Sequence[str],
        *,
        deadline_s: float,
        stdin: bytes | BinaryIO | None = None,
        sudo: bool = False,
        on_line: OnLine = None,
    ) -> Completed:
        cut = self._next()
        if cut and not self.after:
            raise self._error()
        done = self.inner.run(argv, deadline_s=deadline_s, stdin=stdin, sudo=sudo, on_line=on_line)
        if cut:
            raise self._error()
        return done

    def put(self, data: bytes, path: str, *, mode: int = 0o644, deadline_s: float, sudo: bool = False) -> None:
        cut = self._next()
        if cut and not self.after:
            raise self._error()
        self.inner.put(data, path, mode=mode, deadline_s=deadline_s, sudo=sudo)
        if cut:
            raise self._error()

    def get(self, path: str, *, deadline_s: float, sudo: bool = False, limit: int = 64 << 20) -> bytes:
        if self._next():
            raise self._error()
        return self.inner.get(path, deadline_s=deadline_s, sudo=sudo, limit=limit)

    def close(self) -> None:
        self.inner.close()

    def _next(self) -> bool:
        self.count += 1
        return self.count - 1 == self.at

    def _error(self) -> UnreachableError:
        if self.silent:
            return DeadlineError("silent for 20 s", self.name)
        return UnreachableError("the connection was lost", self.name)
