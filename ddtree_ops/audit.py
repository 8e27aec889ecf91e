"""The operator's own log: one JSON line for each instance that a command changed or failed to, append-only.

The host keeps the same in its history; this one is there when the host is not. Who, from where, what, from which
release to which, the result, and where the evidence lies.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ddtree_ops.clock import Clock
from ddtree_ops.outcome import Outcome


class Audit:
    """Appends to ``path``. Several commands may write at once: each line is written under a kernel lock."""

    def __init__(self, path: Path, clock: Clock, who: Mapping[str, Any]) -> None:
        self.path, self._clock, self._who = path, clock, who

    def outcome(self, command: str, inventory: str, outcome: Outcome) -> None:
        """What became of one instance."""
        result = outcome.as_json()
        error = result.pop("error")
        self._append(
            {
                "at": round(self._clock.time(), 3),
                **self._who,
                "command": command,
                "inventory": inventory,
                **result,
                "found": error["found"] if error else None,
                "evidence": (error["data"].get("evidence") or None) if error else None,
            }
        )

    def _append(self, entry: Mapping[str, Any]) -> None:
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        line = json.dumps(entry, sort_keys=True, ensure_ascii=False, default=str).encode() + b"\n"
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            size = os.fstat(descriptor).st_size
            torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
            rest = memoryview(b"\n" + line if torn else line)
            while rest:  # a disk that becomes full takes a part, and says so at the next write only
                rest = rest[os.write(descriptor, rest) :]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def read(path: Path, last: int) -> list[dict[str, Any]]:
    """The newest ``last`` entries, oldest first; a line that a crash tore is left out."""
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return []
    found = []
    for line in lines[-last:]:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found
