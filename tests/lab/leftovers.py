"""Labs of test runs: how they are named, and taking down those whose run is gone.

A name holds the process that owns the run (with xdist the one that starts the workers) and the one that uses the lab.
"""

from __future__ import annotations

import os
import re
import signal
import time
from contextlib import suppress

from ddtree_ops.lab.lab import Lab
from ddtree_ops.lab.names import LabNames, state_dir
from ddtree_ops.lab.system import locked, process_start

PREFIX = "test-"
WORKER_S = 20.0


def lab_of_this_process() -> LabNames:
    owner = os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid()
    return LabNames(f"{PREFIX}{owner}-{os.getpid()}")


def take_down() -> None:
    """Take down the labs of this process's run, and of those whose owner is gone."""
    if os.geteuid() != 0 or not state_dir().is_dir():
        return
    with locked(state_dir() / "leftovers.lock"):  # two runs that end together must not both take one down
        for path in state_dir().glob(f"{PREFIX}*"):
            owner, user = (int(pid) for pid in re.findall(r"\d+", path.name + "-0-0")[:2])
            if owner != os.getpid() and process_start(owner) is not None:
                continue
            if user not in (0, os.getpid()):
                _end(user)
            Lab(LabNames(path.name)).down()


def _end(worker: int) -> None:
    """Wait until a worker of this run has taken its lab down itself; one that does not end is killed."""
    until = time.monotonic() + WORKER_S
    while process_start(worker) is not None:
        if time.monotonic() > until:
            with suppress(ProcessLookupError):
                os.kill(worker, signal.SIGKILL)
        time.sleep(0.05)
