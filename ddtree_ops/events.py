"""What happens while something runs, as data: the seam between acting and showing.

``run`` and its steps emit ``Event``; ``ui`` makes a live table, plain lines or JSON lines of them. An event says one
thing about one instance (or about a whole host, then ``instance`` is empty).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class Kind(StrEnum):
    """What an event says about its step."""

    START = "start"
    PROGRESS = "progress"
    OK = "ok"
    SKIP = "skip"
    FAIL = "fail"
    UNDO = "undo"
    NOTE = "note"
    END = "end"


@dataclass(frozen=True)
class Event:
    """One line of a run. ``left_s`` is the time left until the step's deadline, where it has one."""

    kind: Kind
    host: str
    instance: str
    step: str
    line: str
    left_s: float | None = None

    def as_json(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if value is not None}


Report = Callable[[Event], None]


def silent(_: Event) -> None:
    """A reporter that shows nothing."""
