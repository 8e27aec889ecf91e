"""For all unit tests: a home folder of their own, and for a property as much time as the machine needs.

A test reads no settings of the tester's, and leaves none there. A busy machine is no wrong one.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("any-machine", deadline=None)
settings.load_profile("any-machine")


@pytest.fixture(scope="session")
def empty_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home").resolve()


@pytest.fixture(autouse=True)
def own_home(empty_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For each test, not for the session: labs of the same process keep their state in the real one."""
    monkeypatch.setenv("HOME", str(empty_home))
    for name in ("CACHE", "CONFIG", "DATA", "STATE"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(empty_home / name.lower()))
