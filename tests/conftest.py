"""For every test run: SIGTERM ends it as Ctrl-C does, and no lab outlives it, however its processes ended."""

from __future__ import annotations

import signal
import threading
from types import FrameType

import pytest

from ddtree_ops.lab import owned


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def pytest_configure() -> None:
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _interrupt)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # the process that started the others ends last
        owned.take_down("test")
