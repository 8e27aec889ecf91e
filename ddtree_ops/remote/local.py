"""This machine as a remote: the same protocol, without SSH."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, BinaryIO

from ddtree_ops.clock import Clock, Deadline, SystemClock
from ddtree_ops.errors import DeadlineError
from ddtree_ops.remote.base import Completed
from ddtree_ops.remote.files import FilesOverRun, bounded, ended
from ddtree_ops.remote.lines import Feed, Lines

CHUNK = 1 << 16


def where_commands_begin() -> Path:
    """The home folder; the root for one who has none, as sshd does it."""
    home = Path.home()
    return home if home.is_dir() else Path("/")


class LocalRemote(FilesOverRun):
    """Commands run as children of this process, in the home folder (as over SSH), each in its own process group."""

    def __init__(self, name: str, clock: Clock | None = None) -> None:
        self.name = name
        self.round_trips = 0
        self._clock = clock or SystemClock()

    def run(
        self,
        argv: Sequence[str],
        *,
        deadline_s: float,
        stdin: bytes | BinaryIO | None = None,
        sudo: bool = False,
        on_line: Callable[[str], None] | None = None,
    ) -> Completed:
        self.round_trips += 1
        command = bounded(argv, deadline_s, sudo=sudo and os.geteuid() != 0)
        try:
            child = subprocess.Popen(
                command, stdin=subprocess.PIPE if stdin is not None else subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=subprocess.PIPE, cwd=where_commands_begin(), start_new_session=True,
            )  # fmt: skip
        except FileNotFoundError as missing:
            return Completed(tuple(argv), 127, b"", f"{missing.filename}: not found".encode())
        with child:
            try:
                out, err = self._exchange(child, stdin, Deadline.after(deadline_s + 6.0, self._clock), on_line)
                rc = child.wait()
            except BaseException:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(child.pid, signal.SIGTERM)
                raise
        return ended(Completed(tuple(argv), rc, out, err), self.name, deadline_s)

    def _exchange(
        self,
        child: subprocess.Popen[bytes],
        stdin: bytes | BinaryIO | None,
        deadline: Deadline,
        on_line: Callable[[str], None] | None,
    ) -> tuple[bytes, bytes]:
        """Write and read at once, so that neither side waits for the other with a full pipe."""
        assert child.stdout is not None
        assert child.stderr is not None
        got: dict[IO[bytes], Lines] = {child.stdout: Lines(on_line), child.stderr: Lines(None)}
        source = Feed(stdin)
        with selectors.DefaultSelector() as selector:
            for stream in got:
                selector.register(stream, selectors.EVENT_READ)
            if child.stdin is not None:
                os.set_blocking(child.stdin.fileno(), False)
                selector.register(child.stdin, selectors.EVENT_WRITE)
            while selector.get_map():
                if deadline.passed:
                    raise DeadlineError("the command did not end in time", self.name)
                for key, _events in selector.select(timeout=min(1.0, deadline.left)):
                    if key.fileobj is child.stdin:
                        source = self._write(child.stdin, source)
                        if source.done:
                            selector.unregister(child.stdin)
                            with contextlib.suppress(BrokenPipeError):
                                child.stdin.close()
                        continue
                    block = os.read(key.fd, CHUNK)
                    if block:
                        got[key.fileobj].add(block)  # type: ignore[index]
                    else:
                        selector.unregister(key.fileobj)
        return got[child.stdout].all(), got[child.stderr].all()

    @staticmethod
    def _write(pipe: IO[bytes], source: Feed) -> Feed:
        try:
            source.took(os.write(pipe.fileno(), source.head()) if not source.done else 0)
        except BlockingIOError:
            pass
        except BrokenPipeError:
            source.stop()  # the command ended without reading it all: its exit status says why
        return source

    def close(self) -> None:
        """Nothing is held."""
