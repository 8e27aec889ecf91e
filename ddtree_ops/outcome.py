"""What became of each instance, and of a whole run: one result for a person, for ``--json`` and for the exit code."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from ddtree_ops.errors import (
    DdtreeError,
    ExitCode,
    LockedError,
    MovedError,
    NotRolledBackError,
    RefusedError,
    RolledBackError,
    UnreachableError,
    UsageError,
)
from ddtree_ops.release import short


class Status(StrEnum):
    """What became of one instance."""

    DEPLOYED = "deployed"
    UNCHANGED = "unchanged"
    DEMOTED = "demoted to linear"
    ROLLED_BACK = "rolled back"
    NOT_ROLLED_BACK = "not rolled back"
    REFUSED = "refused"
    UNREACHABLE = "unreachable"
    LOCKED = "locked"
    MOVED = "moved"
    FAILED = "failed"
    INTERRUPTED = "interrupted"
    NOT_BEGUN = "not begun"

    @property
    def good(self) -> bool:
        return self in (Status.DEPLOYED, Status.UNCHANGED)


_OF_ERROR: tuple[tuple[type[DdtreeError], Status], ...] = (
    (RolledBackError, Status.ROLLED_BACK),
    (NotRolledBackError, Status.NOT_ROLLED_BACK),
    (LockedError, Status.LOCKED),
    (MovedError, Status.MOVED),
    (UnreachableError, Status.UNREACHABLE),
    (RefusedError, Status.REFUSED),
    (UsageError, Status.REFUSED),
)

# When instances end differently, the run ends with the first of these that occurred: what needs a person most.
WORST = (
    ExitCode.NOT_ROLLED_BACK,
    ExitCode.BUG,
    ExitCode.INTERRUPTED,
    ExitCode.ROLLED_BACK,
    ExitCode.MOVED,
    ExitCode.LOCKED,
    ExitCode.REFUSED,
    ExitCode.UNREACHABLE,
    ExitCode.USAGE,
)


@dataclass(frozen=True)
class Outcome:
    """What became of one instance. ``release`` is what was wanted, ``before`` what was there."""

    host: str
    instance: str
    status: Status
    release: str | None = None
    before: str | None = None
    effect: str = ""
    seconds: float = 0.0
    round_trips: int = 0
    error: DdtreeError | None = None
    notes: tuple[str, ...] = field(default=())

    @property
    def target(self) -> str:
        return f"{self.host}:{self.instance}"

    @property
    def code(self) -> ExitCode:
        if self.error is not None:
            return self.error.exit_code
        if self.status is Status.INTERRUPTED:
            return ExitCode.INTERRUPTED
        return ExitCode.REFUSED if self.status is Status.NOT_BEGUN else ExitCode.DONE

    @property
    def line(self) -> str:
        """One line for a person."""
        if self.status is Status.DEPLOYED:
            return f"deployed {short(self.release)} (was {short(self.before)}) in {self.seconds:.1f} s"
        if self.status is Status.UNCHANGED:
            return f"{short(self.release)} already runs and is healthy ({self.seconds:.1f} s)"
        if self.error is None:
            return str(self.status)
        said = self.error.found.startswith(f"{self.status} ")  # "locked by anna" needs no "locked: " before it
        return self.error.found if said else f"{self.status}: {self.error.found}"

    def as_json(self) -> dict[str, Any]:
        return {
            "target": self.target,
            "host": self.host,
            "instance": self.instance,
            "status": str(self.status),
            "release": self.release,
            "before": self.before,
            "effect": self.effect,
            "seconds": round(self.seconds, 3),
            "round_trips": self.round_trips,
            "exit_code": int(self.code),
            "notes": list(self.notes),
            "error": None
            if self.error is None
            else {
                "kind": type(self.error).__name__,
                "found": self.error.found,
                "why": self.error.why,
                "next": self.error.next,
                "data": self.error.data,
            },
        }


def status_of(error: DdtreeError) -> Status:
    """The status that an error means."""
    return next((status for kind, status in _OF_ERROR if isinstance(error, kind)), Status.FAILED)


def worst(outcomes: Iterable[Outcome]) -> ExitCode:
    """The exit code of a run: what stopped it, or, if nothing but its time did, that not all was begun."""
    seen = list(outcomes)
    codes = {outcome.code for outcome in seen if outcome.status is not Status.NOT_BEGUN}
    bad = next((code for code in WORST if code in codes), ExitCode.DONE)
    left = any(outcome.status is Status.NOT_BEGUN for outcome in seen)
    return ExitCode.REFUSED if left and bad is ExitCode.DONE else bad
