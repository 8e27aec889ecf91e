"""Which labs a run takes down: what it or a dead one left, nothing of a living one, and no process of another."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator

import pytest
from waiting import NOBODY

from ddtree_ops.lab import owned
from ddtree_ops.lab.names import LabNames, state_dir


@pytest.fixture
def downed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the labs that are taken down, which here have nothing but a folder."""
    names: list[str] = []

    class Lab:
        def __init__(self, lab: LabNames) -> None:
            self.lab = lab

        def down(self) -> None:
            names.append(self.lab.lab)
            for path in self.lab.dir.iterdir():
                path.unlink()
            self.lab.dir.rmdir()

    monkeypatch.setattr(owned, "Lab", Lab)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    state_dir().mkdir(parents=True, exist_ok=True)
    return names


@pytest.fixture
def other() -> Iterator[int]:
    with subprocess.Popen(["sleep", "600"]) as running:
        yield running.pid
        running.kill()


def left(owner: int, user: int, record: dict[str, str | None], more: str = "") -> str:
    names = LabNames(f"t-{owner}-{user}{more}")
    names.dir.mkdir()
    if not more:
        (names.dir / owned.RECORD).write_text(json.dumps(record))
    return names.lab


def test_ones_own_lab_and_those_beside_it(downed: list[str]) -> None:
    mine = owned.owned_lab("t").lab
    beside = left(os.getpid(), os.getpid(), {}, "-other")
    owned.take_down("t")
    assert downed == [mine, beside]


def test_a_living_runs_lab_is_left(downed: list[str], other: int) -> None:
    lab = left(other, other, {str(other): owned.identity(other)})
    owned.take_down("t")
    assert downed == []
    assert LabNames(lab).dir.exists()
    (LabNames(lab).dir / owned.RECORD).unlink()
    LabNames(lab).dir.rmdir()


@pytest.mark.parametrize("began", ["an earlier boot 123", None], ids=["number used again", "no record"])
def test_a_process_that_has_the_number_of_a_dead_one_is_neither_waited_for_nor_killed(
    downed: list[str], other: int, began: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owned, "WORKER_S", 0.0)
    lab = left(NOBODY, other, {str(other): began} if began else {})
    both = left(other, other, {str(other): began} if began else {})
    owned.take_down("t")
    assert set(downed) == ({lab, both} if began else {lab})  # without a record it may be the living run's own
    assert owned.identity(other) is not None
    monkeypatch.setattr(owned, "identity", lambda _pid: None)
    owned.take_down("t")
    assert set(downed) == {lab, both}


def test_a_worker_that_does_not_end_is_killed(downed: list[str], other: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owned, "WORKER_S", 0.0)
    lab = left(NOBODY, other, {str(other): owned.identity(other)})
    owned.take_down("t")
    assert downed == [lab]
    assert owned.identity(other) is None
