"""What can go wrong, by what the caller can do about it.

    DdtreeError                      every error a person may see
    ├── UsageError           (2)     the command line asks for something that does not exist or make sense
    │   └── InventoryError   (2)     the inventory file is wrong: file, key and repair are named
    ├── UnreachableError     (3)     the host did not answer, or did not let us in
    │   ├── HostKeyError     (3)     its key is unknown or not the one we trust
    │   ├── AuthError        (3)     it refused the user or the key
    │   └── DeadlineError    (3)     it answered, then fell silent longer than allowed
    ├── RefusedError         (4)     preflight: the host is not fit for this change; nothing was touched
    ├── RolledBackError      (5)     the change failed and the release before it is back
    ├── NotRolledBackError   (6)     the change failed and the host needs a person
    ├── LockedError          (7)     somebody else is changing this host
    ├── MovedError           (8)     the host is not what the plan was made for, or differs from the record
    └── HelperError          (1)     the helper on the host answered nonsense: a bug of ours

A bug is any other exception: exit code 1, with a traceback only under ``--debug``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any


class ExitCode(IntEnum):
    """The exit codes of every command; stable, documented in docs/exit-codes.md."""

    DONE = 0
    BUG = 1
    USAGE = 2
    UNREACHABLE = 3
    REFUSED = 4
    ROLLED_BACK = 5
    NOT_ROLLED_BACK = 6
    LOCKED = 7
    MOVED = 8
    INTERRUPTED = 130


@dataclass(eq=False)
class DdtreeError(Exception):
    """An error with the four things a person needs: what was found, where, why it matters, what to run next.

    found: one sentence, the fact.  host: the host (or host:instance) it was found on, empty if none.
    why: why it matters, one sentence.  next: one command to run, or one edit to make.
    data: machine-readable details for ``--json``.
    """

    found: str
    host: str = ""
    why: str = ""
    next: str = ""
    data: dict[str, Any] = field(default_factory=dict)

    exit_code = ExitCode.BUG

    def __str__(self) -> str:
        return f"{self.host}: {self.found}" if self.host else self.found


class UsageError(DdtreeError):
    """The command line asks for something that does not exist or make sense."""

    exit_code = ExitCode.USAGE


class InventoryError(UsageError):
    """The inventory file is wrong."""


class UnreachableError(DdtreeError):
    """The host did not answer, or did not let us in."""

    exit_code = ExitCode.UNREACHABLE


class HostKeyError(UnreachableError):
    """The host's key is unknown or not the one that is trusted."""


class AuthError(UnreachableError):
    """The host refused the user or every key offered."""


class DeadlineError(UnreachableError):
    """The host answered, then fell silent for longer than the deadline."""


class RefusedError(DdtreeError):
    """Preflight: the host is not fit for this change. Nothing was touched."""

    exit_code = ExitCode.REFUSED


class RolledBackError(DdtreeError):
    """The change failed; the host runs what it ran before (or nothing, if it ran nothing)."""

    exit_code = ExitCode.ROLLED_BACK


class NotRolledBackError(DdtreeError):
    """The change failed and could not be taken back; the host needs a person."""

    exit_code = ExitCode.NOT_ROLLED_BACK


class LockedError(DdtreeError):
    """Somebody else is changing this host."""

    exit_code = ExitCode.LOCKED


class MovedError(DdtreeError):
    """The host is not what the plan was made for, or differs from what is recorded."""

    exit_code = ExitCode.MOVED


class HelperError(DdtreeError):
    """The helper on the host answered something that is not its protocol."""
