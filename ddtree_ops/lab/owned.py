"""Labs that belong to a process, such as a test run or a demonstration, and must not outlive it.

Their name is ``PREFIX-OWNER-USER``: the process that the run belongs to and the one that uses the lab (the same one,
unless a run has workers). However a run ended, the next one takes down what it left.
"""

from __future__ import annotations

import os
import re
import signal
from contextlib import suppress

from ddtree_ops.clock import Deadline, SystemClock
from ddtree_ops.lab.lab import Lab
from ddtree_ops.lab.names import LabNames, state_dir
from ddtree_ops.lab.system import locked, process_start

WORKER_S = 20.0


def owned_lab(prefix: str, owner: int | None = None) -> LabNames:
    """The lab that this process uses for a run of ``owner`` (itself, if none is given)."""
    return LabNames(f"{prefix}-{owner or os.getpid()}-{os.getpid()}")


def take_down(prefix: str) -> None:
    """Take down the labs of this process's run, and of those whose owner is gone."""
    if os.geteuid() != 0 or not state_dir().is_dir():
        return
    with locked(state_dir() / "owned.lock"):  # two runs that end together must not both take one down
        for path in sorted(state_dir().glob(f"{prefix}-*")):
            found = re.match(rf"{prefix}-(\d+)-(\d+)(-[a-z]+)?$", path.name)
            if found is None:
                continue
            owner, user = int(found[1]), int(found[2])
            if owner != os.getpid() and process_start(owner) is not None:
                continue
            if user != os.getpid():
                _end(user)
            Lab(LabNames(path.name)).down()


def _end(worker: int) -> None:
    """Wait until a worker has taken its lab down itself; one that does not end is killed."""
    clock = SystemClock()
    deadline = Deadline.after(WORKER_S, clock)
    while process_start(worker) is not None:
        if deadline.passed:
            with suppress(ProcessLookupError):
                os.kill(worker, signal.SIGKILL)
        clock.sleep(0.05)
