"""For every test run: nothing of the tester's own settings, SIGTERM ends it as Ctrl-C does, and no lab outlives it."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

import pytest

from ddtree_ops.lab import owned

# What a person or a CI service sets for programs: colours and widths, our own variables, SGLang's, proxies.
THEIRS = (
    "CLICOLOR", "CLICOLOR_FORCE", "COLUMNS", "FORCE_COLOR", "GITHUB_ACTIONS", "LINES", "NO_COLOR", "PY_COLORS",
    "TTY_COMPATIBLE", "TTY_INTERACTIVE", "DDTREE_DEBUG", "DDTREE_INVENTORY", "DDTREE_LAB", "SSH_AUTH_SOCK",
    "PYTHONOPTIMIZE", "CDPATH", "ENV", "BASH_ENV",
)  # fmt: skip
for _name in list(os.environ):  # before anything is imported: libraries look at some of these only then
    if _name in THEIRS or _name.startswith(("SGLANG_", "GIT_")) or _name.lower().endswith("_proxy"):
        del os.environ[_name]


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


@pytest.fixture(autouse=True)
def environment_left_as_found() -> Iterator[None]:
    """A variable that a test leaves behind decides what the next test's commands do, by the order of the run."""
    before = dict(os.environ)
    yield
    after = dict(os.environ)
    changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    changed.discard("PYTEST_CURRENT_TEST")
    for name in changed:
        if name in before:
            os.environ[name] = before[name]
        else:
            del os.environ[name]
    assert not changed, f"the test left changed in the environment: {', '.join(sorted(changed))}"


def pytest_configure() -> None:
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _interrupt)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # the process that started the others ends last
        owned.take_down("test")
