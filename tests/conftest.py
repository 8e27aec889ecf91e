"""For every test run: nothing of the tester's own settings, SIGTERM ends it as Ctrl-C does, and no lab outlives it."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from ddtree_ops.lab import owned

# What a person or a CI service sets for programs: colours and widths, our own variables, SGLang's, proxies.
THEIRS = (
    "CLICOLOR", "CLICOLOR_FORCE", "COLUMNS", "FORCE_COLOR", "GITHUB_ACTIONS", "LINES", "NO_COLOR", "PY_COLORS",
    "TTY_COMPATIBLE", "TTY_INTERACTIVE", "DDTREE_DEBUG", "DDTREE_INVENTORY", "DDTREE_LAB", "SSH_AUTH_SOCK",
    "PYTHONOPTIMIZE", "CDPATH", "ENV", "BASH_ENV",
)  # fmt: skip
WATCHED = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
for _name in list(os.environ):  # before anything is imported: libraries look at some of these only then
    if _name in THEIRS or _name.startswith(("SGLANG_", "GIT_")) or _name.lower().endswith("_proxy"):
        del os.environ[_name]


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def handlers() -> list[logging.Handler]:
    """Where the root logger writes to, besides pytest's own ear."""
    return [handler for handler in logging.root.handlers if not type(handler).__module__.startswith("_pytest.")]


@dataclass(frozen=True)
class Process:
    """What the next test inherits: variables, the folder, the mask of new files, what a signal does, what is logged."""

    environ: dict[str, str]
    folder: str
    umask: int
    signals: dict[signal.Signals, Any]
    log_level: int
    log_handlers: list[logging.Handler]

    @classmethod
    def now(cls) -> Process:
        environ = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
        status = Path("/proc/self/status").read_text()  # asking os.umask would change it for every thread
        umask = int(status.partition("Umask:")[2].split()[0], 8)
        signals = {number: signal.getsignal(number) for number in WATCHED}
        return cls(environ, os.getcwd(), umask, signals, logging.root.level, handlers())

    def restore(self) -> None:
        for name in os.environ.keys() - self.environ.keys() - {"PYTEST_CURRENT_TEST"}:
            del os.environ[name]
        os.environ.update(self.environ)
        os.chdir(self.folder)
        os.umask(self.umask)
        for number, handler in self.signals.items():
            if signal.getsignal(number) != handler:
                signal.signal(number, handler)
        logging.root.setLevel(self.log_level)
        for added in set(handlers()).difference(self.log_handlers):
            logging.root.removeHandler(added)

    def changes(self, after: Process) -> list[str]:
        found = {
            **{name: (self.environ.get(name), after.environ.get(name)) for name in self.environ | after.environ},
            "the working directory": (self.folder, after.folder),
            "the umask": (self.umask, after.umask),
            **{f"the handler of {number.name}": (self.signals[number], after.signals[number]) for number in WATCHED},
            "the level of the root logger": (self.log_level, after.log_level),
            "the handlers of the root logger": (self.log_handlers, after.log_handlers),
        }
        return sorted(name for name, (old, new) in found.items() if old != new)


@pytest.fixture(autouse=True)
def process_left_as_found() -> Iterator[None]:
    """What a test leaves behind in its process decides what the next one does, by the order of the run."""
    before = Process.now()
    yield
    changed = before.changes(Process.now())
    if changed:
        before.restore()
    assert not changed, f"the test left changed in its process: {', '.join(changed)}"


def pytest_configure() -> None:
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _interrupt)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # the process that started the others ends last
        owned.take_down("test")
