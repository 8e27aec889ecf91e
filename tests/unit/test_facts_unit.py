"""systemctl show, told apart in plain words."""

from __future__ import annotations

import pytest

from ddtree_ops.facts.unit import Condition, parse_show

# systemctl show of systemd 252 (Debian 12), shortened to what is read
CRASH_LOOP = """\
Result=exit-code
NRestarts=2
MainPID=0
ExecMainStatus=1
InvocationID=33c9ee2cc9b04de7a5b9b2b9d0a1a7f4
ControlGroup=
LoadState=loaded
ActiveState=activating
SubState=auto-restart
FragmentPath=/etc/systemd/system/sglang-ddtree-tree.service
UnitFileState=enabled
NeedDaemonReload=no
DropInPaths=/etc/systemd/system/sglang-ddtree-tree.service.d/a.conf /run/systemd/system/service.d/b.conf
"""


def test_crash_loop_is_not_taken_for_a_start() -> None:
    unit = parse_show(CRASH_LOOP)
    assert unit.condition is Condition.RESTARTING
    assert unit.restarts == 2
    assert len(unit.drop_ins) == 2
    assert unit.why_ended == "the process exited with status 1"


@pytest.mark.parametrize(
    ("load", "active", "sub", "condition"),
    [
        ("not-found", "inactive", "dead", Condition.ABSENT),
        ("loaded", "inactive", "dead", Condition.DOWN),
        ("loaded", "activating", "start", Condition.ACTIVATING),
        ("loaded", "activating", "auto-restart-queued", Condition.RESTARTING),
        ("loaded", "active", "running", Condition.ACTIVE),
        ("loaded", "active", "exited", Condition.ACTIVE),
        ("loaded", "deactivating", "stop-sigterm", Condition.STOPPING),
        ("loaded", "failed", "failed", Condition.FAILED),
        ("not-found", "active", "running", Condition.ACTIVE),
    ],
)
def test_conditions(load: str, active: str, sub: str, condition: Condition) -> None:
    shown = f"LoadState={load}\nActiveState={active}\nSubState={sub}\n"
    assert parse_show(shown).condition is condition


@pytest.mark.parametrize(
    ("result", "status", "said"),
    [
        ("exit-code", 203, "EXEC: the program could not be run"),
        ("exit-code", 217, "USER: its user does not exist"),
        ("signal", 9, "killed by signal 9"),
        ("start-limit-hit", 0, "restarted too often"),
        ("oom-kill", 0, "killed it for memory"),
        ("something-new", 0, "systemd says something-new"),
        ("success", 0, ""),
    ],
)
def test_why_it_ended(result: str, status: int, said: str) -> None:
    assert said in parse_show(f"Result={result}\nExecMainStatus={status}\n").why_ended


def test_nothing_at_all_reads_as_an_absent_unit() -> None:
    assert parse_show("").condition is Condition.ABSENT
    assert parse_show("MainPID=[not set]\nNRestarts=[not set]").restarts == 0
