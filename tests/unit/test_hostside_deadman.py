"""The dead-man switch: armed before a switch, disarmed by a confirmation, else the host takes the release back."""

from __future__ import annotations

import fcntl
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helperhost import HelperHost, deployed, helper_host, release_tar
from hypothesis import given
from hypothesis import strategies as st
from systemd_words import exec_start
from waiting import LIMIT_S, NOBODY, until

from ddtree_ops.errors import LockedError, RefusedError, RolledBackError
from ddtree_ops.hostside.deadman import quote
from ddtree_ops.hostside.lock import boot_id

UNIT = "sglang-ddtree-qwen.service"


@pytest.fixture
def host(tmp_path: Path) -> Iterator[HelperHost]:
    made = helper_host(tmp_path)
    with made.agent.locked("test"):
        yield made


def armed_file(host: HelperHost) -> Path:
    return host.root / "instances" / "qwen" / "armed.json"


def let_it_pass(host: HelperHost) -> None:
    armed = json.loads(armed_file(host).read_text())
    armed_file(host).write_text(json.dumps({**armed, "deadline": armed["since"] - 1, "until": 0.0}))


def change(host: HelperHost, **values: Any) -> None:
    armed_file(host).write_text(json.dumps({**json.loads(armed_file(host).read_text()), **values}))


def timer_fires(host: HelperHost, request: str = "instances/qwen/expire.json") -> dict[str, Any]:
    """Run what the timer (or the boot) runs: the helper that stayed on the host, with its request in a file."""
    argv = [sys.executable, "-I", str(host.root / "takeback.pyz"), str(host.root / request)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def timers(host: HelperHost) -> list[str]:
    """The timers that run, by the calls that started and stopped them."""
    running: list[str] = []
    for call in host.calls():
        if call[0] == "systemd-run":
            running.append(next(w for w in call if w.startswith("--unit=")).removeprefix("--unit="))
        elif call[0] == "systemctl" and call[1] == "stop" and call[2].endswith(".timer"):
            running.remove(call[2].removesuffix(".timer"))
    return running


def test_an_unconfirmed_release_is_taken_back_by_the_host(host: HelperHost) -> None:
    first = deployed(host, "one\n")
    host.do("record", instance="qwen", release=first, outcome="proven")
    host.do("arm", instance="qwen", to=first, within_s=6000)
    second = deployed(host, "two\n")
    assert timer_fires(host)["value"] == {"taken_back": False, "why": "not due"}
    assert host.current("qwen") == second
    let_it_pass(host)
    done = timer_fires(host)["value"]
    assert (done["taken_back"], done["was"], done["to"]) == (True, second, first)
    assert host.current("qwen") == first
    assert (host.units / UNIT).read_text() == "one\n"
    assert second in host.state("qwen")["taken_back"]
    assert timers(host) == []
    assert not armed_file(host).exists()
    with pytest.raises(RolledBackError, match="qwen was not confirmed in time; the host took it back by itself"):
        host.do("confirm", instance="qwen")


def test_a_first_release_that_is_not_confirmed_leaves_nothing(host: HelperHost) -> None:
    host.do("arm", instance="qwen", to="none", within_s=6000)
    deployed(host, "one\n")
    let_it_pass(host)
    assert timer_fires(host)["value"]["to"] is None
    assert host.current("qwen") is None
    assert not (host.units / UNIT).exists()


def test_a_confirmed_release_stays(host: HelperHost) -> None:
    host.do("arm", instance="qwen", to="none", within_s=6000)
    second = deployed(host, "two\n")
    assert host.do("facts")["instances"]["qwen"]["armed"]["to"] == "none"
    assert host.do("confirm", instance="qwen") == {"was_armed": True}
    assert host.do("confirm", instance="qwen") == {"was_armed": False}
    assert timers(host) == []
    assert timer_fires(host)["value"] == {"taken_back": False, "why": "not armed"}
    assert host.current("qwen") == second
    assert host.do("facts")["instances"]["qwen"]["armed"] is None


def test_arming_again_moves_the_deadline_but_not_what_is_returned_to(host: HelperHost) -> None:
    first = deployed(host, "one\n")
    early = host.do("arm", instance="qwen", to=first, within_s=6000)
    second = deployed(host, "two\n")
    late = host.do("arm", instance="qwen", to=second, within_s=60000)
    assert late["to"] == first
    assert late["deadline"] > early["deadline"]
    assert len(timers(host)) == 1
    assert host.do("facts")["instances"]["qwen"]["armed"]["timer"] == timers(host)[0]
    assert "token" not in host.do("facts")["instances"]["qwen"]["armed"]


def test_arming_needs_no_daemon_reload_and_leaves_a_unit_for_the_next_boot(host: HelperHost) -> None:
    host.do("arm", instance="qwen", to="none", within_s=6000)
    assert ["daemon-reload"] not in host.changes()
    unit = host.units / "ddtree-takeback.service"
    assert (host.units / "multi-user.target.wants" / unit.name).resolve() == unit
    assert f'"{host.root}/takeback.pyz" "{host.root}/at_boot.json"' in unit.read_text()
    assert f'RequiresMountsFor="{host.root}"' in unit.read_text()  # what decides must be there to be looked at


def test_after_a_reboot_what_is_due_is_taken_back_and_the_rest_waits_again(host: HelperHost) -> None:
    host.do("arm", instance="qwen", to="none", within_s=6000)
    second = deployed(host, "two\n")
    change(host, boot="an earlier one", until=0.0)
    assert timer_fires(host, "at_boot.json")["value"]["instances"]["qwen"]["why"] == "not due"
    assert host.current("qwen") == second
    assert len(timers(host)) == 2  # the first one did not outlive the boot
    assert timer_fires(host, "at_boot.json")["value"]["instances"]["qwen"]["why"] == "not due"
    assert len(timers(host)) == 2  # the second one does not outrun itself
    let_it_pass(host)
    assert timer_fires(host, "at_boot.json")["value"]["instances"]["qwen"]["taken_back"] is True
    assert host.current("qwen") is None


@pytest.mark.parametrize(("wall_s", "taken_back"), [(-1e6, False), (1e6, True)], ids=["ahead", "back"])
def test_a_clock_that_is_set_moves_no_deadline(host: HelperHost, wall_s: float, taken_back: bool) -> None:
    """Set ahead, the wall clock is past the deadline at once; set back, it comes there in days."""
    host.do("arm", instance="qwen", to="none", within_s=6000)
    deployed(host, "one\n")
    change(host, deadline=time.time() + wall_s, **({"until": 0.0} if taken_back else {}))
    assert timer_fires(host)["value"]["taken_back"] is taken_back


def test_after_a_boot_with_a_wrong_clock_it_waits_no_longer_than_it_was_to_wait(host: HelperHost) -> None:
    host.do("arm", instance="qwen", to="none", within_s=6000)
    change(host, boot="an earlier one", deadline=time.time() + 1e6)
    timer_fires(host, "at_boot.json")
    last = [call for call in host.calls() if call[0] == "systemd-run"][-1]
    assert "--on-active=6000" in last


def test_at_boot_one_instance_in_trouble_does_not_keep_the_others(host: HelperHost) -> None:
    host.do("arm", instance="broken", to="none", within_s=6000)
    host.do("arm", instance="qwen", to="none", within_s=6000)
    deployed(host, "one\n")
    let_it_pass(host)
    place = host.root / "instances" / "broken" / "armed.json"
    place.unlink()
    place.mkdir()
    failed = timer_fires(host, "at_boot.json")["error"]
    assert "broken: " in failed["found"]
    assert host.current("qwen") is None


def test_what_a_client_has_begun_is_over_before_the_host_looks_whether_it_is_due(host: HelperHost) -> None:
    """Else a confirmation that is on its way would be answered with yes, and the release be taken back all the same."""
    host.do("arm", instance="qwen", to="none", within_s=6000)
    second = deployed(host, "one\n")
    let_it_pass(host)
    argv = [sys.executable, "-I", str(host.root / "takeback.pyz"), str(host.root / "instances/qwen/expire.json")]
    with (host.root / "change.guard").open("r+") as guard:
        fcntl.flock(guard, fcntl.LOCK_EX)
        with subprocess.Popen(argv, stdout=subprocess.PIPE) as child:
            waits = re.compile(rf"-> FLOCK +\S+ +WRITE {child.pid} ")
            until(lambda: waits.search(Path("/proc/locks").read_text()), "the host's switch waits")
            armed_file(host).unlink()  # what a confirmation does
            fcntl.flock(guard, fcntl.LOCK_UN)
            said, _ = child.communicate(timeout=LIMIT_S)
    assert json.loads(said.splitlines()[-1])["value"] == {"taken_back": False, "why": "not armed"}
    assert host.current("qwen") == second


def test_the_host_waits_for_another_change_but_not_for_the_one_that_armed(host: HelperHost) -> None:
    host.do("arm", instance="qwen", to="none", within_s=6000)
    deployed(host, "one\n")
    let_it_pass(host)
    token = host.agent.token
    host.do("unlock", token=token)
    host.do("lock", token="other", owner="eve@elsewhere", purpose="deploy")
    refused = timer_fires(host)
    assert refused["error"]["kind"] == LockedError.__name__
    assert host.current("qwen") is not None
    boot = timer_fires(host, "at_boot.json")["value"]["instances"]["qwen"]
    assert boot["taken_back"] is False
    assert "locked by eve@elsewhere" in boot["why"]
    host.do("unlock", force=True)
    assert timer_fires(host)["value"]["taken_back"] is True


@pytest.mark.parametrize("boot", ["this", "an earlier one"])
def test_a_switch_that_was_killed_half_way_does_not_keep_the_next_one_waiting(host: HelperHost, boot: str) -> None:
    first = deployed(host, "first\n")
    host.do("record", instance="qwen", release=first, outcome="proven")
    host.do("arm", instance="qwen", to=first, within_s=30000)
    deployed(host, "second\n")
    let_it_pass(host)
    held = {
        "token": "its own",
        "owner": "dead-man switch",
        "pid": NOBODY if boot == "this" else os.getpid(),
        "expires": time.time() + 300,
        "boot": boot_id() if boot == "this" else boot,
    }
    (host.root / "lock.json").write_text(json.dumps(held))
    assert timer_fires(host)["value"]["taken_back"] is True


def test_a_switch_that_is_at_work_is_waited_for(host: HelperHost) -> None:
    first = deployed(host, "first\n")
    host.do("arm", instance="qwen", to=first, within_s=30000)
    deployed(host, "second\n")
    let_it_pass(host)
    held = {"token": "its own", "owner": "dead-man switch", "pid": os.getpid(), "expires": time.time() + 300}
    (host.root / "lock.json").write_text(json.dumps({**held, "boot": boot_id()}))
    assert timer_fires(host)["error"]["kind"] == "LockedError"


def test_the_old_server_that_was_never_touched_is_not_restarted(host: HelperHost) -> None:
    first = deployed(host, "one\n")
    host.do("arm", instance="qwen", to=first, within_s=6000)
    second, tar = release_tar("two\n")
    host.do("stage_release", tar, instance="qwen", release=second)
    host.do("switch", instance="qwen", release=second)
    let_it_pass(host)
    assert timer_fires(host)["value"]["restarted"] is False


def test_a_switch_without_a_way_back_is_not_armed(host: HelperHost) -> None:
    with pytest.raises(RefusedError, match="could not be returned to"):
        host.do("arm", instance="qwen", to="ab" * 32, within_s=6000)
    (host.systemd / "fail-systemd-run").touch()
    with pytest.raises(RefusedError, match="could not be armed"):
        host.do("arm", instance="qwen", to="none", within_s=6000)
    assert not armed_file(host).exists()


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0\n\r"), max_size=40))
def test_a_folder_with_any_name_survives_the_boot_unit(word: str) -> None:
    assert exec_start(f"[Service]\nExecStart=/bin/x {quote(word)}\n") == ["/bin/x", word]
