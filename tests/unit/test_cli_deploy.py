"""What ``deploy``, ``plan`` and ``rollback`` refuse before anything is contacted, and what kept files are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ddtree_ops import resume
from ddtree_ops.cli import app as frame
from ddtree_ops.errors import ExitCode, UsageError
from ddtree_ops.outcome import Outcome, Status
from ddtree_ops.rollout import Rules, parse_batches
from ddtree_ops.targets import resolve_targets

ROOT = Path(__file__).parents[2]
RUNNER = CliRunner()


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(ROOT)
    for name in ("CONFIG", "STATE", "CACHE"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path))


def refused(*words: str) -> tuple[dict[str, Any], int]:
    result = RUNNER.invoke(frame.build_app(), [*words, "--json"])
    return json.loads(result.stdout)["error"], result.exit_code


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("deploy",), "TARGET"),
        (("deploy", "nowhere"), "unknown host or group 'nowhere'"),
        (("deploy", "ct200:nothing"), "has no instance 'nothing'"),
        (("deploy", "ct200", "--batches", "1,half"), "'half' is no batch"),
        (("deploy", "ct200", "--batches", "rest,1"), "nothing can come after rest"),
        (("deploy", "ct200", "--resume"), "--resume takes no TARGET"),
        (("deploy", "--resume"), "there is no rollout to resume"),
        (("deploy", "ct200", "--plan", "x.json"), "--plan takes no TARGET"),
        (("deploy", "--plan", "/nowhere/x.json"), "/nowhere/x.json cannot be read"),
        (("deploy", "--plan", "pyproject.toml"), "pyproject.toml is not a plan"),
        (("plan", "ct200", "--out", "/nowhere/x.json"), "/nowhere/x.json cannot be written: there is no folder"),
        (("smoke", "ct200:tree", "--junit", "docs"), "docs cannot be written: it is a folder"),
        (("smoke", "ct200:tree", "--markdown", "/nowhere/x.md"), "there is no folder /nowhere"),
        (("deploy", "ct200", "--skip-gate", "throughput"), "reason"),
        (("deploy", "ct200", "--skip-gate", "thruput", "--reason", "x"), "thruput"),
        (("deploy", "ct200", "--mode", "sideways"), "sideways"),
        (("deploy", "ct200", "--budget", "0"), "budget"),
        (("deploy", "ct200", "--parallel", "0"), "parallel"),
        (("rollback", "ct200:tree", "--to", "ab", "--mode", "linear"), "exclude each other"),
        (("rollback", "ct200:tree", "ct200:linear", "--to", "ab"), "names a release of one instance"),
    ],
)
def test_usage_errors(words: tuple[str, ...], said: str) -> None:
    error, code = refused(*words)
    assert code == ExitCode.USAGE
    assert said in error["found"]
    assert error["next"]


def rollout_file(tmp_path: Path) -> tuple[resume.RolloutFile, Path]:
    from ddtree_ops.inventory import load_fleet

    fleet = load_fleet(ROOT / "inventory/ct200.toml")
    rules = Rules(parse_batches("1,25%,rest"), max_failures=1, soak_s=30.0)
    made = resume.begin(fleet.path, resolve_targets(fleet, ["all"]).targets, rules)
    return made, tmp_path / "rollout.json"


def test_a_rollout_is_kept_and_goes_on_past_its_canary(tmp_path: Path) -> None:
    made, path = rollout_file(tmp_path)
    resume.write(
        made, path, [Outcome("ct200", "linear", Status.DEPLOYED), Outcome("ct200", "tree", Status.ROLLED_BACK)]
    )
    found = resume.read(path)
    assert set(found.left) == {"ct200:tree"}
    assert found.left["ct200:tree"] == made.settings["ct200:tree"]
    assert found.rules == Rules(("25%", "rest"), max_failures=1, soak_s=30.0)
    assert resume.read(path).rules.batches == ("25%", "rest")


def test_a_rollout_without_its_canary_begins_with_it(tmp_path: Path) -> None:
    made, path = rollout_file(tmp_path)
    resume.write(made, path)
    assert resume.read(path).rules.batches == ("1", "25%", "rest")


def test_a_rollout_that_is_over_or_broken(tmp_path: Path) -> None:
    made, path = rollout_file(tmp_path)
    resume.write(made, path, [Outcome("ct200", name, Status.UNCHANGED) for name in ("linear", "tree")])
    with pytest.raises(UsageError, match="the last rollout is complete"):
        resume.read(path)
    path.write_text("{}")
    with pytest.raises(UsageError, match="is no rollout"):
        resume.read(path)
