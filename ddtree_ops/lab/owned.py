"""Labs that belong to a process, such as a test run or a demonstration, and must not outlive it.

Their name is ``PREFIX-OWNER-USER``: the process that the run belongs to and the one that uses the lab (the same one,
unless a run has workers). However a run ended, the next one takes down what it left. Numbers of processes are used
again, after a boot above all, so a record beside the lab says when those two began: what another process of the same
number is, is neither waited for nor killed.
"""

from __future__ import annotations

import json
import os
import re
import signal
from contextlib import suppress
from pathlib import Path

from ddtree_ops.clock import Deadline, SystemClock
from ddtree_ops.lab.lab import Lab
from ddtree_ops.lab.names import LabNames, state_dir
from ddtree_ops.lab.system import locked, process_start

WORKER_S = 20.0
RECORD = "owner.json"


def owned_lab(prefix: str, owner: int | None = None) -> LabNames:
    """The lab that this process uses for a run of ``owner`` (itself, if none is given)."""
    names = LabNames(f"{prefix}-{owner or os.getpid()}-{os.getpid()}")
    names.dir.mkdir(parents=True, exist_ok=True)
    record = {str(pid): identity(pid) for pid in (owner or os.getpid(), os.getpid())}
    (names.dir / RECORD).write_text(json.dumps(record))
    return names


def identity(pid: int) -> str | None:
    """What tells a process from every other that had or will have its number; None when there is none."""
    start = process_start(pid)
    return None if start is None else f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {start}"


def recorded(names: LabNames) -> dict[str, str]:
    try:
        found = json.loads((names.dir / RECORD).read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def take_down(prefix: str) -> None:
    """Take down the labs of this process's run, and of those whose owner is gone."""
    if os.geteuid() != 0 or not state_dir().is_dir():
        return
    with locked(state_dir() / "owned.lock"):  # two runs that end together must not both take one down
        matches = [re.match(rf"({prefix}-(\d+)-(\d+))(-[a-z]+)?$", path.name) for path in state_dir().iterdir()]
        found = sorted((match for match in matches if match), key=lambda match: match[0])
        records = {match[1]: recorded(LabNames(match[1])) for match in found}  # one goes with its lab
        for match in found:
            began = records[match[1]]
            owner, user = int(match[2]), int(match[3])
            now = identity(owner)
            if owner != os.getpid() and now is not None and began.get(str(owner)) in (None, now):
                continue  # it lives, as far as can be told
            if user != os.getpid():
                _end(user, began.get(str(user)))
            Lab(LabNames(match[0])).down()


def _end(worker: int, began: str | None) -> None:
    """Wait until a worker has taken its lab down itself; one that does not end is killed."""
    clock = SystemClock()
    deadline = Deadline.after(WORKER_S, clock)
    while began is not None and identity(worker) == began:
        if deadline.passed:
            with suppress(ProcessLookupError):
                os.kill(worker, signal.SIGKILL)
        clock.sleep(0.05)
