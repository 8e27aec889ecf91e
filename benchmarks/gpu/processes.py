"""Stages as processes: started in a session of their own with a mark in the environment, ended with all they started.

A suite and a benchmark start arms and servers in sessions of their own, which a signal to the stage's process group
does not reach. The mark does: children inherit it, and /proc shows it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

MARK = "DDTREE_GPU_STAGE"
GRACE_S = 10.0


def marked(mark: str, proc: Path = Path("/proc")) -> list[int]:
    """Processes that carry the mark. One that has just ended, or is another user's, is not among them."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for place in proc.iterdir():
        if place.name.isdigit() and int(place.name) != os.getpid():
            with contextlib.suppress(OSError):
                if wanted in (place / "environ").read_bytes().split(b"\0"):
                    found.append(int(place.name))
    return found


@dataclass
class Process:
    """One stage that runs."""

    popen: subprocess.Popen[bytes]
    mark: str

    def poll(self) -> int | None:
        """The exit status once it has ended; what it left behind is ended with it."""
        status = self.popen.poll()
        if status is not None:
            self._sweep()
        return status

    def stop(self) -> None:
        """Ask it to end, which lets it write what it has; then end it and all that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.popen.wait(GRACE_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        self._sweep()
        self.popen.wait()

    def _sweep(self) -> None:
        for _ in range(50):
            left = marked(self.mark)
            if not left:
                return
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)  # a process that was just forked by one of them is seen in the next pass


def start(argv: Sequence[str], folder: Path, environment: Mapping[str, str], cwd: Path) -> Process:
    """Start a stage; its output goes to folder/log, behind what an earlier run of it has written."""
    folder.mkdir(parents=True, exist_ok=True)
    mark = f"{folder.name}-{os.getpid()}-{time.monotonic_ns()}"
    with (folder / "log").open("ab") as log:
        popen = subprocess.Popen(
            list(argv), stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, cwd=cwd,
            env={**environment, MARK: mark}, start_new_session=True,
        )  # fmt: skip
    return Process(popen, mark)
