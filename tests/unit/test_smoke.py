from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddtree_ops import smoke as smoke_module
from ddtree_ops.clock import FakeClock
from ddtree_ops.errors import ExitCode, LockedError, RolledBackError, UnreachableError
from ddtree_ops.events import Event, Kind, Report
from ddtree_ops.model import Address, HostSpec, Mode, Settings
from ddtree_ops.operate import How, Wanted
from ddtree_ops.outcome import Outcome, Status
from ddtree_ops.smoke import Case, Smoke, Verdict, smoke
from ddtree_ops.targets import Target
from ddtree_ops.ui.smoke import junit, markdown

DEAD_MAN_S = 77.0
ROOT = Path(__file__).parents[2]
SETTINGS = Settings(instance="tree", mode=Mode.TREE, gpus=(0,), port=30001, model="/m", drafter="/d")
HOST = HostSpec(name="ct200", address=Address(host="ct200"), instances={"tree": SETTINGS})
WANTED = Wanted("fleet.toml", (Target(HOST, SETTINGS),))
NEW, OLD = "a" * 64, "b" * 64
GATES = {
    "identity": {"verdict": "passed", "line": "the release answers", "findings": []},
    "lossless": {"verdict": "skipped", "line": "no baseline", "findings": []},
}


def outcome(status: Status, **change: Any) -> Outcome:
    return Outcome(**({"host": "ct200", "instance": "tree", "status": status, "release": NEW, "before": OLD} | change))


@pytest.fixture
def acted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was done besides deploying, in order."""
    did: list[str] = []

    def rollback(_wanted: Wanted, how: How, _report: Report, *, to: str, **_: Any) -> list[Outcome]:
        assert (how.hold, how.dead_man_s) == (False, DEAD_MAN_S)
        did.append(f"rollback to {to[:1]}")
        return [outcome(Status.DEPLOYED, release=to)]

    def to_nothing(_target: Target) -> tuple[Verdict, str]:
        did.append("to nothing")
        return Verdict.PASSED, "nothing was there before"

    def let_go(_target: Target) -> str:
        did.append("switch off")
        return ""

    monkeypatch.setattr(smoke_module.operate, "rollback", rollback)
    monkeypatch.setattr(smoke_module, "to_nothing", to_nothing)
    monkeypatch.setattr(smoke_module, "let_go", let_go)
    return did


Run = Callable[..., Smoke]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, acted: list[str]) -> Run:
    del acted

    def made(result: Outcome, before: str | None = OLD, now: Any = "as it ended") -> Smoke:
        clock = FakeClock()
        left = (result.release if result.status.good else before) if now == "as it ended" else now

        def deploy(_wanted: Wanted, how: How, report: Report) -> list[Outcome]:
            assert (how.hold, how.dead_man_s) == (True, DEAD_MAN_S)
            report(Event(Kind.START, "ct200", "tree", "stage engine", "sending"))
            clock.sleep(2.5)
            report(Event(Kind.OK, "ct200", "tree", "stage engine", "staged"))
            return [result]

        looks = iter([(before, {}), left if isinstance(left, Exception | signal.Signals) else (left, GATES)])

        def current(_target: Target) -> Any:
            look = next(looks)
            if isinstance(look, signal.Signals):
                os.kill(os.getpid(), look)
                return NEW, GATES
            if isinstance(look, Exception):
                raise look
            return look

        monkeypatch.setattr(smoke_module.operate, "deploy", deploy)
        monkeypatch.setattr(smoke_module, "current", current)
        return smoke(WANTED, How(dead_man_s=DEAD_MAN_S), lambda _event: None, clock)

    return made


def verdicts(seen: Smoke) -> dict[str, str]:
    return {f"{case.group}/{case.name}": str(case.verdict) for case in seen.cases}


def test_what_passed_is_put_back(run: Run, acted: list[str]) -> None:
    seen = run(outcome(Status.DEPLOYED))
    assert verdicts(seen) == {
        "deploy/stage engine": "passed",
        "deploy/as a whole": "passed",
        "gates/identity": "passed",
        "gates/lossless": "skipped",
        "rollback/put back": "passed",
    }
    assert seen.cases[0].seconds == 2.5
    assert acted == ["rollback to b"]
    assert seen.code is ExitCode.DONE


def test_a_first_deploy_goes_back_to_nothing(run: Run, acted: list[str]) -> None:
    assert run(outcome(Status.DEPLOYED, before=None), before=None).code is ExitCode.DONE
    assert acted == ["to nothing"]


def test_what_was_there_already_stays(run: Run, acted: list[str]) -> None:
    seen = run(outcome(Status.UNCHANGED, before=NEW), before=NEW)
    assert verdicts(seen)["rollback/put back"] == "skipped"
    assert acted == ["switch off"]


def test_a_switch_that_cannot_be_turned_off_is_no_success(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smoke_module, "let_go", lambda _target: "the host's own switch could not be turned off: away")
    seen = run(outcome(Status.DEPLOYED, before=NEW), before=NEW)
    assert verdicts(seen)["rollback/put back"] == "failed"
    assert seen.code is ExitCode.NOT_ROLLED_BACK


class Called:
    """A connection that answers everything and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    @contextmanager
    def locked(self, purpose: str, *_: Any) -> Iterator[str]:
        self.asked.append(f"lock for {purpose}")
        yield ""
        self.asked.append("unlock")

    def call(self, op: str, args: dict[str, Any], **_: Any) -> dict[str, Any]:
        self.asked.append((op, args["instance"], args.get("to")))
        return {}

    def close(self) -> None:
        self.asked.append("close")


def test_the_switch_goes_off_last_and_under_the_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Called()
    monkeypatch.setattr(smoke_module.wiring, "connect", lambda _host: made)
    assert smoke_module.to_nothing(WANTED.targets[0])[0] is Verdict.PASSED
    held = ["lock for smoke tree", ("take_back", "tree", "none"), ("confirm", "tree", None), "unlock", "close"]
    assert made.asked == held
    made.asked.clear()
    assert smoke_module.let_go(WANTED.targets[0]) == ""
    assert made.asked == ["lock for smoke tree", ("confirm", "tree", None), "unlock", "close"]


def test_what_failed_was_taken_back_by_the_deploy(run: Run, acted: list[str]) -> None:
    gates = {**GATES, "throughput": {"verdict": "failed", "line": "0.91 x linear", "findings": ["8 streams: 0.88"]}}
    error = RolledBackError("a gate did not hold", "ct200:tree", "slower than linear", "look", {"gates": gates})
    seen = run(outcome(Status.ROLLED_BACK, error=error))
    found = verdicts(seen)
    assert (found["gates/throughput"], found["deploy/as a whole"]) == ("failed", "failed")
    assert found["rollback/put back"] == "passed"
    assert acted == []
    assert seen.code is ExitCode.ROLLED_BACK


def test_a_way_back_that_fails_is_the_result(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    stuck = outcome(Status.ROLLED_BACK, error=RolledBackError("the old one does not start", "ct200:tree"))
    monkeypatch.setattr(smoke_module.operate, "rollback", lambda *_args, **_more: [stuck])
    seen = run(outcome(Status.DEPLOYED))
    assert verdicts(seen)["rollback/put back"] == "failed"
    assert seen.code is ExitCode.ROLLED_BACK


def test_a_way_back_to_nothing_that_fails_is_no_success(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smoke_module, "to_nothing", lambda _target: (Verdict.FAILED, "the host fell silent"))
    seen = run(outcome(Status.DEPLOYED, before=None), before=None)
    assert seen.code is ExitCode.NOT_ROLLED_BACK


LINEAR = "c" * 64


@pytest.mark.parametrize("status", [Status.DEMOTED, Status.ROLLED_BACK, Status.INTERRUPTED, Status.REFUSED])
def test_what_is_there_decides_not_how_the_deploy_ended(run: Run, acted: list[str], status: Status) -> None:
    """A tree that was demoted, or that failed after its baseline was measured, leaves another release behind."""
    error = None if status is Status.INTERRUPTED else RolledBackError("slower", "ct200:tree")
    seen = run(outcome(status, error=error), now=LINEAR)
    assert acted == ["rollback to b"]
    assert verdicts(seen)["rollback/put back"] == "passed"
    assert seen.code in (ExitCode.ROLLED_BACK, ExitCode.INTERRUPTED)


def test_what_somebody_else_deploys_is_left_alone(run: Run, acted: list[str]) -> None:
    error = LockedError("locked by anna", "ct200")
    assert run(outcome(Status.LOCKED, error=error), now=LINEAR).code is ExitCode.LOCKED
    assert acted == []


def test_a_host_that_falls_silent_after_the_deploy(run: Run, acted: list[str]) -> None:
    seen = run(outcome(Status.DEPLOYED), now=UnreachableError("no answer", "ct200"))
    assert seen.code is ExitCode.NOT_ROLLED_BACK
    assert verdicts(seen)["rollback/put back"] == "failed"
    assert acted == []


def test_ctrl_c_between_deploy_and_rollback_still_puts_back(run: Run, acted: list[str]) -> None:
    seen = run(outcome(Status.DEPLOYED), now=signal.SIGINT)
    assert acted == ["rollback to b"]
    assert seen.code is ExitCode.INTERRUPTED


# -- reports ----------------------------------------------------------------------------------------------------------

SEEN = Smoke(
    "ct200:tree",
    (
        Case("deploy", "restart", Verdict.PASSED, "restarted", 1.25),
        Case("gates", "throughput", Verdict.FAILED, "0.91 x linear", 3.0, ("8 streams | 0.88", "<b>slow</b>")),
        Case("gates", "soak", Verdict.SKIPPED, "not asked for"),
    ),
    42.0,
    ExitCode.ROLLED_BACK,
    NEW,
    OLD,
)


def test_junit() -> None:
    suite = ElementTree.fromstring(junit(SEEN)).find("testsuite")
    assert suite is not None
    assert (suite.get("tests"), suite.get("failures"), suite.get("skipped")) == ("3", "1", "1")
    passed, failed, skipped = suite.findall("testcase")
    assert (passed.get("classname"), passed.get("name"), passed.get("time")) == (
        "ct200:tree.deploy",
        "restart",
        "1.250",
    )
    failure = failed.find("failure")
    assert failure is not None
    assert failure.get("message") == "0.91 x linear"
    assert failure.text == "0.91 x linear\n8 streams | 0.88\n<b>slow</b>"
    assert skipped.find("skipped") is not None


def test_markdown() -> None:
    page = markdown(SEEN)
    assert page.startswith("# Smoke test of ct200:tree: failed (exit code 5)\n")
    assert "| throughput | **failed** | 3.0 | 0.91 x linear<br>8 streams \\| 0.88<br>&lt;b>slow&lt;/b> |" in page


@given(st.text(), st.lists(st.text(), max_size=3))
def test_any_text_makes_a_report(line: str, details: list[str]) -> None:
    """Whatever a server wrote into its log: the XML parses, and a table row stays one row of four cells."""
    case = Case("gates", "soak", Verdict.FAILED, line, details=tuple(details))
    seen = replace(SEEN, cases=(case,))
    ElementTree.fromstring(junit(seen))
    row = next(text for text in markdown(seen).splitlines() if text.startswith("| soak"))
    assert len(re.findall(r"(?<!\\)(?:\\\\)*\|", row)) == 5


def test_the_example_workflow_is_valid() -> None:
    workflow = ROOT / "examples/github-actions/smoke.yml"
    argv = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows", str(workflow)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
