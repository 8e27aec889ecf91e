"""The helper's operations, each through the real zip file, a real python3 and a folder of its own."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from helperhost import HelperHost, deployed, helper_host, release_tar
from waiting import NOBODY

from ddtree_ops.agent import client
from ddtree_ops.errors import HelperError, LockedError, MovedError, RefusedError, UnreachableError

UNIT = "sglang-ddtree-qwen.service"


@pytest.fixture
def free(tmp_path: Path) -> HelperHost:
    """A host whose lock nobody holds."""
    return helper_host(tmp_path)


@pytest.fixture
def host(free: HelperHost) -> Iterator[HelperHost]:
    """A host whose lock we hold."""
    with free.agent.locked("test"):
        yield free


def test_the_helper_is_pushed_once_and_then_run_in_one_round_trip(free: HelperHost) -> None:
    free.do("facts")
    assert free.agent.remote.round_trips == 3  # run: not there, push, run
    free.do("facts")
    assert free.agent.remote.round_trips == 4
    assert [p.suffix for p in (free.root / "helper").iterdir()] == [".pyz"]


def test_facts_of_a_bare_host_are_answers_not_errors(free: HelperHost) -> None:
    facts = free.do("facts", instances=["qwen"], ports=[1], venvs=["/nonexistent"], paths=["/nonexistent"])
    assert facts["instances"]["qwen"]["current"] is None
    assert facts["instances"]["qwen"]["current_kind"] == "absent"
    assert facts["gpus"]["query"]["rc"] == 127
    assert facts["venvs"]["/nonexistent"]["exists"] is False
    assert facts["paths"]["/nonexistent"] is None
    assert facts["lock"] is None
    assert facts["disk"]["free"] > 0


def test_a_release_is_staged_switched_and_its_unit_written(host: HelperHost) -> None:
    digest = deployed(host, "[Service]\nExecStart=/bin/a\n")
    assert host.current("qwen") == digest
    assert (host.units / UNIT).read_text() == "[Service]\nExecStart=/bin/a\n"
    assert host.changes() == [["restart", UNIT]]
    assert host.do("write_unit", instance="qwen")["changed"] is False
    facts = host.do("facts")["instances"]["qwen"]
    assert facts["releases"][digest]["damage"] == []
    assert "ActiveState=active" in facts["show"]


def test_staging_the_same_release_again_changes_nothing_and_mends_what_was_changed(host: HelperHost) -> None:
    digest, tar = release_tar("one\n")
    assert host.do("stage_release", tar, instance="qwen", release=digest) == {"staged": True, "mended": []}
    assert host.do("stage_release", tar, instance="qwen", release=digest) == {"staged": False, "mended": []}
    unit = host.root / "instances/qwen/releases" / digest / "unit"
    unit.write_text("by hand\n")
    (unit.parent / "extra").write_text("by hand\n")
    assert host.do("stage_release", tar, instance="qwen", release=digest) == {"staged": False, "mended": ["unit"]}
    assert unit.read_text() == "one\n"
    assert sorted(p.name for p in unit.parent.iterdir()) == ["manifest.json", "settings.json", "unit"]


@pytest.mark.parametrize(("cut", "kind"), [(700, UnreachableError), (0, UnreachableError)])
def test_a_torn_upload_leaves_nothing(host: HelperHost, cut: int, kind: type[Exception]) -> None:
    digest, tar = release_tar("one\n")
    with pytest.raises(kind, match="broke off"):
        host.do("stage_release", tar[:cut], instance="qwen", release=digest)
    assert list((host.root / "instances/qwen/releases").iterdir()) == []


def test_a_release_that_differs_from_its_manifest_is_refused(host: HelperHost) -> None:
    digest, tar = release_tar("one\n", spoil=True)
    with pytest.raises(HelperError, match="unit differs from the manifest"):
        host.do("stage_release", tar, instance="qwen", release=digest)
    assert list((host.root / "instances/qwen/releases").iterdir()) == []


def test_a_release_whose_engine_is_missing_never_becomes_current(host: HelperHost) -> None:
    digest, tar = release_tar("one\n", engine="ab" * 32)
    host.do("stage_release", tar, instance="qwen", release=digest)
    with pytest.raises(RefusedError, match="its engine abababababab is not on the host"):
        host.do("switch", instance="qwen", release=digest)
    assert host.current("qwen") is None


def test_a_damaged_release_never_becomes_current(host: HelperHost) -> None:
    digest, tar = release_tar("one\n")
    host.do("stage_release", tar, instance="qwen", release=digest)
    (host.root / "instances/qwen/releases" / digest / "unit").write_text("two\n")
    with pytest.raises(RefusedError, match="unit differs"):
        host.do("switch", instance="qwen", release=digest)


def test_switch_refuses_a_host_that_moved_since_the_plan(host: HelperHost) -> None:
    first = deployed(host, "one\n")
    second, tar = release_tar("two\n")
    host.do("stage_release", tar, instance="qwen", release=second)
    with pytest.raises(MovedError, match=f"on release {first}, not on none"):
        host.do("switch", instance="qwen", release=second, expect=None)
    assert host.do("switch", instance="qwen", release=second, expect=first) == {"was": first, "changed": True}


def test_switch_refuses_a_real_folder_and_says_how_to_move_it(host: HelperHost) -> None:
    digest, tar = release_tar("one\n")
    host.do("stage_release", tar, instance="qwen", release=digest)
    (host.root / "instances/qwen/current").mkdir()
    with pytest.raises(RefusedError, match="is a real folder") as refused:
        host.do("switch", instance="qwen", release=digest)
    assert "mv " in refused.value.next
    assert refused.value.next.startswith("on here: ")


def test_take_back_returns_to_the_proven_release_and_marks_the_other(host: HelperHost) -> None:
    first = deployed(host, "one\n")
    host.do("record", instance="qwen", release=first, outcome="proven", gates={"identity": "ok"})
    second = deployed(host, "two\n")
    done = host.do("take_back", instance="qwen", reason="too slow")
    assert (done["was"], done["to"], done["restarted"], done["unit_changed"]) == (second, first, True, True)
    assert host.current("qwen") == first
    assert (host.units / UNIT).read_text() == "one\n"
    assert host.changes()[-3:] == [["daemon-reload"], ["reset-failed", UNIT], ["restart", UNIT]]
    state = host.state("qwen")
    assert state["taken_back"][second]["reason"] == "too slow"
    assert state["proven"] == first
    assert "taking_back" not in state
    assert [e["what"] for e in host.do("history", instance="qwen")["events"]] == ["proven", "taken-back"]


@pytest.mark.parametrize("spoilt", [False, True])
def test_leaving_a_release_that_was_proven_makes_the_one_before_the_proven_one_again(
    host: HelperHost, spoilt: bool
) -> None:
    first = deployed(host, "one\n")
    host.do("record", instance="qwen", release=first, outcome="proven", gates={"identity": "ok"})
    if spoilt:
        host.do("record", instance="qwen", release=first, outcome="taken-back", details={"reason": "slow"})
    second = deployed(host, "two\n")
    host.do("record", instance="qwen", release=second, outcome="proven", gates={"identity": "ok"})
    host.do("take_back", instance="qwen", to=first, reason="nobody confirmed it")
    state = host.state("qwen")
    assert state["proven"] == (None if spoilt else first)
    assert second in state["taken_back"]


def test_take_back_asked_again_after_a_lost_answer_does_not_restart_the_server_again(host: HelperHost) -> None:
    first = deployed(host, "one\n")
    deployed(host, "two\n")
    assert host.do("take_back", instance="qwen", to=first)["restarted"] is True
    assert host.do("take_back", instance="qwen", to=first)["restarted"] is False


def test_take_back_of_the_first_release_leaves_no_unit_and_no_current(host: HelperHost) -> None:
    first = deployed(host, "one\n")
    done = host.do("take_back", instance="qwen", reason="crashed")
    assert (done["was"], done["to"], done["stopped"]) == (first, None, True)
    assert host.current("qwen") is None
    assert list(host.units.iterdir()) == []
    assert ["stop", UNIT] in host.changes()


@pytest.mark.parametrize("ran", [True, False])
def test_take_back_of_the_first_release_restores_the_unit_that_was_there(host: HelperHost, ran: bool) -> None:
    host.units.mkdir()
    (host.units / UNIT).write_text("copied by hand\n")
    if ran:
        host.do("systemctl", verb="start", instance="qwen")
    first = deployed(host, "one\n")
    (host.units / UNIT).write_text("edited\n")
    assert host.do("write_unit", instance="qwen")["changed"] is True
    assert (host.root / "instances/qwen/edited-unit").read_text() == "edited\n"
    done = host.do("take_back", instance="qwen")
    assert (done["was"], done["restarted"], done["stopped"]) == (first, ran, not ran)
    assert (host.units / UNIT).read_text() == "copied by hand\n"


def test_take_back_leaves_the_old_server_alone_if_it_was_never_stopped(host: HelperHost) -> None:
    first = deployed(host, "one\n")
    runs = host.do("observe", instance="qwen", port=1)["show"]
    invocation = next(line for line in runs.splitlines() if line.startswith("InvocationID=")).split("=")[1]
    second, tar = release_tar("two\n")
    host.do("stage_release", tar, instance="qwen", release=second)
    host.do("switch", instance="qwen", release=second)
    done = host.do("take_back", instance="qwen", to=first, invocation=invocation)
    assert done["restarted"] is False
    assert host.changes() == [["restart", UNIT]]


def test_a_release_that_was_taken_back_is_not_chosen_again(host: HelperHost) -> None:
    deployed(host, "one\n")
    deployed(host, "two\n")
    host.do("take_back", instance="qwen")
    deployed(host, "three\n")
    host.do("take_back", instance="qwen")
    assert host.current("qwen") == release_tar("one\n")[0]
    host.do("take_back", instance="qwen")
    assert host.current("qwen") is None


def test_without_the_lock_nothing_changes(free: HelperHost) -> None:
    digest, tar = release_tar("one\n")
    with pytest.raises(LockedError, match="does not hold the host's lock"):
        free.do("stage_release", tar, instance="qwen", release=digest)
    assert not (free.root / "instances").exists()


def test_the_lock_says_who_since_when_and_what_for(free: HelperHost) -> None:
    with free.agent.locked("deploy here:qwen"):
        other = HelperHost(type(free.agent)(free.agent.remote, free.agent.host), free.root, free.units, free.systemd)
        with pytest.raises(LockedError) as held:
            other.do("lock", token="t2", owner="eve@elsewhere", pid=7, purpose="rollback")
    error = held.value
    assert f"pid {os.getpid()} since " in error.found
    assert error.found.endswith("for: deploy here:qwen")
    assert error.next == "ddtree-ops unlock here"
    assert "token" not in json.dumps(error.data)
    assert not (free.root / "lock.json").exists()


def test_asking_for_the_lock_again_after_a_lost_answer_finds_it_ones_own(free: HelperHost) -> None:
    first = free.do("lock", token="mine", owner="op@desk", pid=1, purpose="deploy")
    assert free.do("lock", token="mine", owner="op@desk", pid=1, purpose="deploy")["lock"] == first["lock"]


def test_a_lock_left_by_a_dead_process_of_this_machine_is_taken_over_at_once(free: HelperHost) -> None:
    free.do("lock", token="t", owner="op@desk", pid=NOBODY, client=client(), purpose="deploy")
    with free.agent.locked("mine"):
        pass
    free.do("lock", token="t", owner="op@desk", pid=os.getppid(), client=client(), purpose="deploy")
    with pytest.raises(LockedError), free.agent.locked("mine"):
        pass


def test_a_lock_that_somebody_else_took_meanwhile_is_not_freed_in_the_place_of_a_dead_ones(free: HelperHost) -> None:
    seen = free.do("lock", token="t1", owner="op@desk", pid=NOBODY, purpose="deploy")["lock"]
    free.do("unlock", force=True)
    free.do("lock", token="t2", owner="eve@elsewhere", pid=7, purpose="deploy")
    assert free.do("unlock", force=True, only=seen) == {"was": None}
    assert free.do("facts")["lock"]["owner"] == "eve@elsewhere"
    assert free.do("unlock", force=True, only=free.do("facts")["lock"])["was"]["owner"] == "eve@elsewhere"


@pytest.mark.parametrize(("expires", "live"), [(0.0, True), (9e9, False)], ids=["ahead", "back"])
def test_a_clock_that_is_set_ends_no_lease_and_keeps_none_alive(free: HelperHost, expires: float, live: bool) -> None:
    """Set ahead, the wall clock is past the end of the lease at once; set back, it does not come there for long."""
    free.do("lock", token="t1", owner="eve@elsewhere", purpose="deploy", lease_s=600 if live else -1)
    path = free.root / "lock.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "expires": expires}))
    assert free.do("facts")["lock"]["live"] is live


def test_a_lock_whose_lease_ended_is_taken_over_and_that_is_recorded(free: HelperHost) -> None:
    free.do("lock", token="t1", owner="eve@elsewhere", pid=7, purpose="deploy", lease_s=-1)
    with free.agent.locked("mine") as taken:
        assert taken["took_over"]["owner"] == "eve@elsewhere"
    audit = [json.loads(line) for line in (free.root / "audit.jsonl").read_text().splitlines()]
    assert [a["what"] for a in audit] == ["lock-taken-over"]


def test_prune_keeps_what_could_still_be_needed(host: HelperHost) -> None:
    digests = []
    for n in range(6):
        digests.append(deployed(host, f"{n}\n"))
        os.utime(host.root / "instances/qwen/releases" / digests[-1], (n, n))
        if n == 0:
            host.do("record", instance="qwen", release=digests[0], outcome="proven")
    assert host.do("prune", keep=1, dry_run=True)["releases"]["qwen"] == digests[3:0:-1]
    host.do("prune", keep=1)
    left = {p.name for p in (host.root / "instances/qwen/releases").iterdir()}
    assert left == {digests[0], digests[4], digests[5]}


def test_names_that_would_leave_the_layout_are_refused(host: HelperHost) -> None:
    for name in ("../etc", "a/b", "", ".hidden", "a b"):
        with pytest.raises(Exception, match="is not an instance name"):
            host.do("write_unit", instance=name)


def test_an_unknown_operation_and_a_missing_argument_are_our_own_bugs(free: HelperHost) -> None:
    with pytest.raises(HelperError, match="knows no operation 'dance'"):
        free.do("dance")
    with pytest.raises(HelperError, match="KeyError: 'token'") as bug:
        free.do("lock")
    assert "Traceback" in bug.value.data["traceback"]
