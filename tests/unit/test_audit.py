"""The operator's own log: one whole line an outcome, whoever writes beside it and whatever a crash left."""

from __future__ import annotations

import json
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ddtree_ops.audit import Audit, read
from ddtree_ops.cli.app import build_app
from ddtree_ops.clock import FakeClock
from ddtree_ops.errors import RolledBackError
from ddtree_ops.outcome import Outcome, Status

WHO = {"by": "op", "client": "desk"}


def audit(path: Path) -> Audit:
    return Audit(path / "state" / "audit.jsonl", FakeClock(), WHO)


def outcome(number: int = 0) -> Outcome:
    error = RolledBackError("too slow", "h1:tree", data={"evidence": "/e.tar.gz"})
    return Outcome("h1", "tree", Status.ROLLED_BACK, f"{number:064x}", "b" * 64, "restart", 12.5, error=error)


def test_a_line_says_who_what_from_where_to_where_and_how_it_ended(tmp_path: Path) -> None:
    log = audit(tmp_path)
    log.outcome("deploy", "fleet.toml", outcome())
    (entry,) = read(log.path, 10)
    assert entry == {
        "at": 1_700_000_000.0, "by": "op", "client": "desk", "command": "deploy", "inventory": "fleet.toml",
        "target": "h1:tree", "host": "h1", "instance": "tree", "status": "rolled back", "release": "0" * 64,
        "before": "b" * 64, "effect": "restart", "seconds": 12.5, "round_trips": 0, "exit_code": 5, "notes": [],
        "found": "too slow", "evidence": "/e.tar.gz",
    }  # fmt: skip
    assert stat.S_IMODE(log.path.stat().st_mode) == 0o600


def test_many_writers_and_a_torn_line_spoil_nothing(tmp_path: Path) -> None:
    log = audit(tmp_path)
    log.path.parent.mkdir()
    log.path.write_text('{"at": 1, "half')
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: log.outcome("deploy", "f", outcome(n)), range(40)))
    assert len(read(log.path, 100)) == 40
    assert len({entry["release"] for entry in read(log.path, 100)}) == 40


def test_a_disk_that_takes_a_part_at_a_time_gets_the_whole_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, bytes(data)[:7]))
    log = audit(tmp_path)
    log.outcome("deploy", "f", outcome(3))
    assert [entry["release"] for entry in read(log.path, 10)] == [f"{3:064x}"]


def test_history_local_reads_it_without_any_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    Audit(tmp_path / "ddtree-ops" / "audit.jsonl", FakeClock(), WHO).outcome("deploy", "f", outcome())
    shown = CliRunner().invoke(build_app(), ["history", "--local"])
    assert shown.exit_code == 0, shown.output
    assert "h1:tree\tdeploy\trolled back\t000000000000\tbbbbbbbbbbbb\top@desk\ttoo slow" in shown.stdout
    none = CliRunner().invoke(build_app(), ["history", "--local", "h2", "--json"])
    assert json.loads(none.stdout) == {"events": []}
