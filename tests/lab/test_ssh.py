"""The road to a host, on real sshd and real systemd: what is said when it ends, and what is left behind."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from labagent import agent, current, deploy, do, release, remote, runs
from waiting import until

from ddtree_ops.errors import (
    AuthError,
    DeadlineError,
    HostKeyError,
    LockedError,
    RefusedError,
    UnreachableError,
)
from ddtree_ops.lab.machine import Machine


def as_it_runs(act: Callable[[], object]) -> Callable[[str], None]:
    """For ``on_line``: act once the command has said that it runs."""
    return lambda _line: act()  # type: ignore[func-returns-value]


def said_and_sleeps(seconds: int) -> list[str]:
    return ["sh", "-c", f"echo on; exec sleep {seconds}"]


@pytest.mark.parametrize("user", ["root", "ops"])
def test_a_first_call_pushes_the_helper_and_later_ones_are_one_round_trip(host: Machine, user: str) -> None:
    caller = agent(host, user=user)
    facts = do(caller, "facts")
    assert facts["host"]["uid"] == 0
    assert facts["host"]["systemd_runs"] is True
    assert caller.remote.round_trips == 3
    do(caller, "facts")
    assert caller.remote.round_trips == 4
    assert host.inside("sh", "-c", "ls -la /opt/ddtree/helper").stdout.count("root root") == 3


def test_a_release_runs_and_is_taken_back(host: Machine) -> None:
    caller = agent(host, user="ops")
    with caller.locked("test"):
        first = deploy(caller, 1001)
        do(caller, "record", instance="qwen", release=first, outcome="proven")
        deploy(caller, 1002)
        assert runs(host) == "/bin/sleep 1002"
        done = do(caller, "take_back", instance="qwen", reason="test")
        assert done["to"] == first
        assert runs(host) == "/bin/sleep 1001"
    assert do(caller, "facts")["lock"] is None


def test_no_sudo_is_refused_with_the_repair(host: Machine) -> None:
    with pytest.raises(RefusedError, match="sudo") as refused:
        do(agent(host, user="visitor"), "facts")
    assert "NOPASSWD" in refused.value.next


def test_no_python3_is_refused_with_the_repair(host: Machine) -> None:
    host.inside("mv", "/usr/bin/python3", "/usr/bin/python3.away")
    try:
        with pytest.raises(RefusedError, match="python3 is not on the host"):
            do(agent(host), "facts")
    finally:
        host.inside("mv", "/usr/bin/python3.away", "/usr/bin/python3")


def test_an_unknown_and_a_wrong_host_key(host: Machine, tmp_path: Path) -> None:
    none = tmp_path / "none"
    none.touch()
    with pytest.raises(HostKeyError, match=r"its key ssh-ed25519 SHA256:.* is not known"):
        do(agent(host, known_hosts=str(none)), "facts")
    wrong = tmp_path / "wrong"
    wrong.write_text(f"{host.address} ssh-ed25519 {'A' * 68}\n")
    with pytest.raises(HostKeyError, match="line 1 has ssh-ed25519") as error:
        do(agent(host, known_hosts=str(wrong)), "facts")
    assert error.value.next == f"ddtree-ops trust {host.name} --replace"


def test_a_wrong_user_or_no_sshd_is_told_apart(host: Machine) -> None:
    with pytest.raises(AuthError, match="does not let nobody-here in"):
        do(agent(host, user="nobody-here"), "facts")
    host.inside("systemctl", "stop", "ssh.socket", "ssh.service", ok=(0, 5))
    try:
        with pytest.raises(UnreachableError, match="refuses connections"):
            do(agent(host), "facts")
    finally:
        host.inside("systemctl", "start", "ssh.service")


def test_a_link_cut_in_the_middle_of_a_command_is_noticed_and_the_command_ends_there(host: Machine) -> None:
    link = remote(host)
    assert link.run(["true"], deadline_s=60).rc == 0
    with pytest.raises(DeadlineError, match="silent for"):
        link.run(said_and_sleeps(6012), deadline_s=30, on_line=as_it_runs(host.cut))
    with pytest.raises(UnreachableError, match=r"does not answer|No route"):
        link.run(["true"], deadline_s=60)
    until(lambda: "sleep 6012" not in host.inside("ps", "-eo", "args").stdout, "the command is gone there")
    host.heal()
    assert link.run(["echo", "back"], deadline_s=60).text == "back\n"


def test_a_frozen_host_is_noticed_in_a_command_and_when_connecting(host: Machine) -> None:
    link = remote(host)
    assert link.run(["true"], deadline_s=60).rc == 0
    try:
        with pytest.raises(DeadlineError, match="silent for"):
            link.run(said_and_sleeps(600), deadline_s=600, on_line=as_it_runs(host.freeze))
        with pytest.raises(DeadlineError, match="accepts connections, but no SSH server answers"):
            link.run(["true"], deadline_s=60)
    finally:
        host.thaw()
    assert link.run(["true"], deadline_s=60).rc == 0


def test_a_host_that_dies_mid_command(host: Machine, lab: object) -> None:
    link = remote(host)
    assert link.run(["true"], deadline_s=60).rc == 0
    with pytest.raises(UnreachableError):
        link.run(said_and_sleeps(600), deadline_s=600, on_line=as_it_runs(host.kill))
    lab.power_on(host)  # type: ignore[attr-defined]
    assert link.run(["true"], deadline_s=60).rc == 0


def test_of_two_clients_one_gets_the_lock_and_the_other_learns_who(host: Machine) -> None:
    do(agent(host), "facts")

    refused = threading.Event()

    def change(number: int) -> str:
        caller = agent(host)
        try:
            with caller.locked(f"change {number}"):
                refused.wait(240)
                return "done"
        except LockedError as error:
            refused.set()
            return error.found

    with ThreadPoolExecutor(2) as pool:
        said = sorted(pool.map(change, (1, 2)))
    assert said[0] == "done"
    assert "locked by root@" in said[1]
    assert "for: change" in said[1]


def test_a_full_disk_leaves_the_release_that_was_there(host: Machine) -> None:
    caller = agent(host)
    with caller.locked("test"):
        first = deploy(caller, 1001)
        host.fill()
        digest, tar = release(1002)
        try:
            with pytest.raises(RefusedError, match="no space left") as refused:
                do(caller, "stage_release", tar + bytes(4 << 20), instance="qwen", release=digest)
            assert refused.value.next == f"ddtree-ops prune {host.name}"
        finally:
            host.empty()
        assert current(host) == first
        assert host.inside("ls", "/opt/ddtree/instances/qwen/releases").stdout.split() == [first]
        assert deploy(caller, 1002) == digest


def test_a_read_only_target_is_refused(host: Machine) -> None:
    host.inside("sh", "-c", "mkdir -p /opt/ddtree && mount --bind /opt/ddtree /opt/ddtree")
    caller = agent(host)
    do(caller, "facts")
    host.inside("mount", "-o", "remount,ro,bind", "/opt/ddtree")
    try:
        assert do(caller, "facts")["host"]["root_state"]["read_only"] is True
        with pytest.raises(RefusedError, match="read-only"), caller.locked("test"):
            pass
    finally:
        host.inside("umount", "/opt/ddtree")
