"""The agent's side of the protocol, and the helper file itself."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helperhost import helper_host, release_tar

from ddtree_ops import hostside
from ddtree_ops.agent import KINDS, Agent
from ddtree_ops.clock import FakeClock
from ddtree_ops.errors import DeadlineError, HelperError, MovedError, RefusedError, UnreachableError
from ddtree_ops.helper import helper_file
from ddtree_ops.log import Log
from ddtree_ops.model import Address, HostSpec
from ddtree_ops.remote.fake import CutRemote, FakeRemote, Scripted

SOURCES = sorted(Path(hostside.__file__).parent.glob("*.py"))
HOST = HostSpec(name="h1", address=Address(host="h1"))
PATH = f"/opt/ddtree/helper/{helper_file().name}"
RUN = ["python3", "-I", PATH]
OK = '{"event":"result","ok":true,"value":{"a":1}}\n'


def agent(*script: Scripted) -> tuple[Agent, FakeRemote]:
    remote = FakeRemote(list(script), name="h1")
    return Agent(remote, HOST), remote


def test_one_round_trip_with_progress_and_a_value() -> None:
    out = '{"event":"progress","done":1}\nnoise\n{"event":"progress","done":2}\n' + OK
    caller, remote = agent(Scripted(RUN, out))
    events: list[dict[str, object]] = []
    assert caller.call("x", {"k": "v"}, b"tar", deadline_s=5, on_event=events.append) == {"a": 1}
    assert [e["done"] for e in events] == [1, 2]
    line, _, payload = remote.calls[0][1].partition(b"\n")
    assert payload == b"tar"
    assert json.loads(line) == {
        "op": "x", "args": {"k": "v"}, "root": "/opt/ddtree", "scope": "system", "host": "h1", "lock": None,
        "deadline_s": 5,
    }  # fmt: skip
    assert remote.calls[0][2] is True  # with sudo


def test_debug_shows_every_call_but_none_of_its_arguments() -> None:
    seen: list[dict[str, object]] = []
    answer = {"event": "result", "ok": False, "error": {"kind": "MovedError", "found": "moved"}}
    remote = FakeRemote([Scripted(RUN, OK), Scripted(RUN, json.dumps(answer), rc=1)], name="h1")
    caller = Agent(remote, HOST, clock=FakeClock(), log=lambda event, **facts: seen.append({"event": event, **facts}))
    caller.call("x", {"key": "secret"}, deadline_s=5)
    with pytest.raises(MovedError):
        caller.call("y", deadline_s=5)
    common = {"event": "call", "host": "h1", "seconds": 0.0, "round_trips": 1}
    assert seen == [{**common, "op": "x", "ended": "ok"}, {**common, "op": "y", "ended": "MovedError: h1: moved"}]


def test_the_log_is_silent_until_enabled_and_then_one_json_line(capsys: pytest.CaptureFixture[str]) -> None:
    log = Log()
    log("call", host="h1")
    assert capsys.readouterr() == ("", "")
    log.enable()
    log("call", host="h1", seconds=0.1)
    out, err = capsys.readouterr()
    assert out == ""
    assert {key: json.loads(err)[key] for key in ("event", "host", "seconds")} == {
        "event": "call",
        "host": "h1",
        "seconds": 0.1,
    }


def test_a_missing_helper_is_pushed_and_the_call_made_again() -> None:
    gone = f"python3: can't open file '{PATH}': [Errno 2] No such file or directory\n"
    caller, remote = agent(Scripted(RUN, err=gone, rc=2), Scripted(RUN, OK))
    assert caller.call("x", deadline_s=5) == {"a": 1}
    assert [call[0][0] for call in remote.calls] == ["python3", "put", "python3"]
    assert remote.files[PATH] == helper_file().data


@pytest.mark.parametrize(
    ("rc", "err", "found", "repair"),
    [
        (1, "sudo: a password is required\n", "sudo asks for a password", ">/etc/sudoers.d/ddtree-ops"),
        (127, "sh: 1: sudo: not found\n", "sudo: not found", "apt-get install sudo"),
        (1, "op is not in the sudoers file.\nsudo: rejected\n", "rejected", ">/etc/sudoers.d/ddtree-ops"),
        (127, "timeout: failed to run command 'python3': No such file\n", "python3 is not on", "python3-min"),
    ],
)  # fmt: skip
def test_no_sudo_and_no_python3_are_told_apart(rc: int, err: str, found: str, repair: str) -> None:
    caller, _ = agent(Scripted(RUN, err=err, rc=rc))
    with pytest.raises(RefusedError) as refused:
        caller.call("x", deadline_s=5)
    assert found in refused.value.found
    assert repair in refused.value.next
    assert refused.value.host == "h1"


def test_no_systemd_is_a_refusal_of_its_own(tmp_path: Path) -> None:
    host = helper_host(tmp_path)
    host.agent._extra["bin"]["systemctl"] = [
        sys.executable, "-c", "import sys; sys.exit('System has not been booted with systemd as init system')",
    ]  # fmt: skip
    with host.agent.locked("test"), pytest.raises(RefusedError, match="no systemd") as refused:
        host.do("systemctl", verb="restart", instance="qwen")
    assert refused.value.next == "run it on a machine that systemd has booted"
    assert host.do("facts")["host"]["systemd_runs"] is False


def test_an_error_of_the_helper_becomes_the_error_it_names() -> None:
    answer = {"event": "result", "ok": False, "error": {"kind": "MovedError", "found": "f", "why": "w", "next": "n"}}
    caller, _ = agent(Scripted(RUN, json.dumps(answer), rc=1))
    with pytest.raises(MovedError) as moved:
        caller.call("x", deadline_s=5)
    assert (moved.value.found, moved.value.why, moved.value.next, moved.value.host) == ("f", "w", "n", "h1")


def test_an_answer_that_is_no_answer_is_our_own_bug_with_its_last_words() -> None:
    caller, _ = agent(Scripted(RUN, "half a li", "Traceback ...\nMemoryError\n", rc=1))
    with pytest.raises(HelperError, match="status 1 and no result: MemoryError"):
        caller.call("x", deadline_s=5)


def test_the_kinds_a_helper_may_name_are_those_of_errors() -> None:
    named = {
        node.args[0].value
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Failure"
        if isinstance(node.args[0], ast.Constant)
    }  # fmt: skip
    assert named
    assert named <= KINDS.keys()


def test_every_operation_of_the_table_exists_and_every_one_is_in_the_table() -> None:
    import importlib

    from ddtree_ops.hostside.__main__ import OPERATIONS

    modules = {module for module, _ in OPERATIONS.values()}
    found = {
        (name, module)
        for module in modules
        for name in importlib.import_module(f"ddtree_ops.hostside.{module}").OPS
    }  # fmt: skip
    assert found == {(name, module) for name, (module, _) in OPERATIONS.items()}


def test_every_operation_is_described() -> None:
    from ddtree_ops.hostside.__main__ import OPERATIONS

    text = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text()
    rows = [line.split("|")[1] for line in text.split("## The helper's operations")[1].splitlines() if "|" in line]
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == set(OPERATIONS)


def test_the_helper_is_the_same_bytes_every_time() -> None:
    again = helper_file.__wrapped__()
    assert again == helper_file()
    assert len(again.version) == 16


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_the_helper_is_python_3_8_of_the_standard_library(path: Path) -> None:
    tree = ast.parse(path.read_text(), feature_version=(3, 8))
    for node in ast.walk(tree):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [str(node.module)]
        for name in names:
            assert name.split(".")[0] in sys.stdlib_module_names


def test_the_helper_uses_nothing_newer_than_python_3_8() -> None:
    vermin = [sys.executable, "-c", "from vermin import main; main()"]
    flags = ["--no-tips", "--no-eval-annotations", "-t=3.8-", "--violations"]
    done = subprocess.run([*vermin, *flags, *map(str, SOURCES)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("at", range(4))
def test_a_link_cut_at_any_call_and_asked_again_ends_the_same(tmp_path: Path, at: int, after: bool) -> None:
    host = helper_host(tmp_path)
    first, tar = release_tar("one\n")
    second, other = release_tar("two\n")
    with host.agent.locked("test"):
        host.do("stage_release", tar, instance="qwen", release=first)
        host.do("switch", instance="qwen", release=first)
        host.agent.remote = CutRemote(host.agent.remote, at, after)
        steps: list[tuple[str, bytes | None, dict[str, object]]] = [
            ("stage_release", other, {"release": second}),
            ("switch", None, {"release": second, "expect": first}),
            ("write_unit", None, {}),
            ("take_back", None, {"to": first}),
        ]
        for op, payload, args in steps:
            try:
                host.do(op, payload, instance="qwen", **args)
            except UnreachableError:
                host.do(op, payload, instance="qwen", **args)
    assert host.current("qwen") == first
    assert (host.units / "sglang-ddtree-qwen.service").read_text() == "one\n"
    assert set(host.state("qwen")["taken_back"]) == {second}


def test_an_operation_that_takes_too_long_ends_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddtree_ops.agent.GRACE_S", 120.0)  # the far side's own limit must not come first
    host = helper_host(tmp_path)
    host.do("facts")
    slow = [sys.executable, "-c", "import time; time.sleep(600)"]
    host.agent._extra["bin"]["journalctl"] = slow
    with pytest.raises(DeadlineError, match="logs took longer than 1 s"):
        host.agent.call("logs", {"instance": "qwen", "follow": True}, deadline_s=1)
