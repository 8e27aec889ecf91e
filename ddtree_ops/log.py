"""What ``--debug`` shows besides tracebacks: every call to a host, one JSON line each, on standard error.

Arguments are not shown: they may hold keys. structlog is imported only when somebody wants to see this.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


class _Error:
    """Writes to whatever standard error is at that moment: tests put another in its place, and close it."""

    def info(self, line: str) -> None:
        sys.stderr.write(line + "\n")


class Log:
    """Drops everything until it is enabled."""

    def __init__(self) -> None:
        self._write: Callable[..., Any] | None = None

    def enable(self) -> None:
        import structlog

        logger = structlog.wrap_logger(
            _Error(),
            processors=[
                structlog.processors.TimeStamper(fmt="iso", utc=True, key="at"),
                structlog.processors.JSONRenderer(sort_keys=True),
            ],
        )
        self._write = logger.info

    def __call__(self, event: str, **facts: Any) -> None:
        if self._write is not None:
            self._write(event, **facts)


LOG = Log()
