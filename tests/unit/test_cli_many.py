"""Commands that ask many hosts: one document under --json, also when one host does not answer."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ddtree_ops.cli import app as frame
from ddtree_ops.cli import history, prune, unlock
from ddtree_ops.errors import ExitCode, UnreachableError
from ddtree_ops.hosts import Answer, Hosts

RUNNER = CliRunner()
FLEET = """
[defaults.instance]
model = "/m"
mode = "ar"
gpus = [0]
port = 30000
[hosts.up]
address = "root@192.0.2.1"
instances.main = {}
[hosts.away]
address = "root@192.0.2.2"
instances.main = {}
"""
VALUES: dict[str, Any] = {
    "prune": {"releases": {"main": ["aa" * 32]}, "engines": []},
    "unlock": None,
    "history": [{"at": 1.0, "what": "proven", "instance": "main", "host": "up"}],
}


@pytest.mark.parametrize("name", ["prune", "unlock", "history"])
def test_a_host_that_is_away_is_in_the_same_document(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text(FLEET)
    away = UnreachableError("no answer", "away", "no way", "ping away")

    def each_host(hosts: Hosts, _ask: Callable[..., Any], **_: Any) -> Sequence[Answer[Any]]:
        (up, ours), (other, theirs) = hosts
        return [Answer(up, tuple(ours), VALUES[name]), Answer(other, tuple(theirs), error=away)]

    for module in (prune, unlock, history):
        monkeypatch.setattr(module, "each_host", each_host)
    result = RUNNER.invoke(frame.app, ["-i", str(file), name, "all", "--json"])
    assert result.exit_code == ExitCode.UNREACHABLE
    assert [each["host"] for each in json.loads(result.stdout)["errors"]] == ["away"]
    plain = RUNNER.invoke(frame.app, ["-i", str(file), name, "all"])
    assert plain.exit_code == ExitCode.UNREACHABLE
    assert "error: away: no answer\nwhy: no way\nnext: ping away\n" in plain.stderr
