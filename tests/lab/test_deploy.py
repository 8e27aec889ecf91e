"""Deploys on a real host: the first, one that changes nothing, a mode change, back again; each fault taken back."""

from __future__ import annotations

import json
import signal
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fleet import Cli, Disk, main_pid, outcomes, result, running, until_said
from waiting import LIMIT_S, until

from ddtree_ops.lab.machine import Machine

TREE = ("--mode", "tree", "--budget", "32")
UNIT = "sglang-ddtree-main.service"


def test_from_nothing_to_a_tree_and_back(cli: Cli, host: Machine) -> None:
    """What a person does on the first day, on a host that has never seen ddtree-ops."""
    assert result(cli, "status", "lab1", expect=8)["instances"][0]["health"] == "not deployed"

    plan = result(cli, "plan", "lab1")["plans"][0]
    assert (plan["effect"], plan["before"]) == ("reload + restart", None)
    first = outcomes(cli, "deploy", "lab1")["lab1:main"]
    assert (first["status"], first["release"]) == ("deployed", plan["release"])
    assert running(host, "main") == first["release"]
    assert host.inside("systemctl", "is-enabled", UNIT).stdout.strip() == "enabled"
    linear_unit = host.inside("cat", f"/etc/systemd/system/{UNIT}").stdout

    pid = main_pid(host, "main")
    again = outcomes(cli, "deploy", "lab1")["lab1:main"]
    assert (again["status"], again["effect"], again["release"]) == ("unchanged", "nothing", first["release"])
    assert main_pid(host, "main") == pid

    tree = outcomes(cli, "deploy", "lab1", *TREE)["lab1:main"]
    assert (tree["status"], tree["before"]) == ("deployed", first["release"])
    assert main_pid(host, "main") != pid
    status = result(cli, "status", "lab1")["instances"][0]
    assert (status["health"], status["mode"], status["budget"]) == ("healthy", "tree", 32)
    assert 'mode: "tree" there, "linear" wanted' in status["differs"]
    assert status["stand_in"] is True
    assert status["accept_length"] > 1
    assert status["gpu_memory_mib"]["used"] > 1000

    back = outcomes(cli, "rollback", "lab1")["lab1:main"]
    assert (back["status"], back["release"]) == ("deployed", first["release"])
    assert host.inside("cat", f"/etc/systemd/system/{UNIT}").stdout == linear_unit
    refused = outcomes(cli, "rollback", "lab1", expect=4)["lab1:main"]
    assert "no other proven release" in refused["error"]["found"]
    assert "was taken back" in refused["error"]["why"]
    again = outcomes(cli, "rollback", "lab1", "--to", tree["release"][:9])["lab1:main"]
    assert (again["status"], again["release"]) == ("deployed", tree["release"])
    demoted = outcomes(cli, "rollback", "lab1", "--mode", "linear", "--reason", "slower at 8 streams")["lab1:main"]
    status = result(cli, "status", "lab1")["instances"][0]
    assert (status["health"], status["mode"], status["current"]) == ("healthy", "linear", demoted["release"])

    events = [(event["what"], event.get("release")) for event in result(cli, "history", "lab1")["events"]]
    proven = [release for what, release in events if what == "proven"]
    assert proven == [*[first["release"], tree["release"]] * 2, demoted["release"]]
    said = cli("diff", "lab1", first["release"][:10], tree["release"]).stdout
    assert "budget: 16 -> 32" in said
    assert "+    --speculative-ddtree-budget 32" in said
    assert "The server is fired up" in cli("logs", "lab1").stdout
    Disk.of(host).invariants()


@pytest.fixture(scope="module")
def settled(fleet: Callable[[int], list[Machine]]) -> Machine:
    """One host for the tests below, which leave it as they found it: a proven linear release runs."""
    return fleet(1)[0]


@pytest.fixture
def linear(cli: Cli, settled: Machine) -> Iterator[str]:
    """The release that runs when the test begins; nothing of a fault may outlive it."""
    settled.set_faults(None)
    release = outcomes(cli, "deploy", "lab1")["lab1:main"]["release"]
    yield release
    settled.set_faults(None)


@pytest.mark.parametrize(
    ("faults", "words", "said"),
    [
        (["CRASH_AT_START=1"], (), "CUDA out of memory"),
        (["HANG_LOADING=1"], ("--health-timeout", "10"), "not healthy after 10 s; last seen: loading weights"),
        (["HANG_COMPLETION=1"], ("--health-timeout", "15"), "a completion failed"),  # begins once it is ready
        (["SHORT_COMPLETION=1"], (), "a completion returned 4 tokens where 8 were asked for"),
        (["WEIGHT_VERSION=feedfacefeed"], (), "the server that answers is release feedfacefeed"),
        (["REFUSE_HYBRID=1"], (), "has not passed its parity suite"),
    ],
)
def test_a_change_that_fails_is_taken_back(
    cli: Cli, settled: Machine, linear: str, faults: list[str], words: tuple[str, ...], said: str
) -> None:
    settled.set_faults(["ONLY=tree", *faults])
    outcome = outcomes(cli, "deploy", "lab1", *TREE, *words, expect=5)["lab1:main"]
    assert outcome["status"] == "rolled back"
    assert said in outcome["error"]["found"]
    assert "runs again" in outcome["error"]["why"]
    assert running(settled, "main") == linear
    disk = Disk.of(settled)
    disk.invariants()
    there = disk.instance("main")
    assert (there["current"], there["unit_of"], there["state"]["proven"]) == (linear, linear, linear)
    assert outcome["release"] in there["state"]["taken_back"]
    assert disk.seen["lock"] is None
    with tarfile.open(outcome["error"]["data"]["evidence"]) as evidence:
        names = {Path(name).name for name in evidence.getnames()}
    assert {"unit-state.txt", "unit-file.txt", "journal.txt", "gpus.json", "release-settings.json"} <= names


def test_a_release_that_was_taken_back_is_not_returned_to_but_may_be_tried_again(
    cli: Cli, settled: Machine, linear: str
) -> None:
    settled.set_faults(["ONLY=tree", "CRASH_AT_START=1"])
    failed = outcomes(cli, "deploy", "lab1", "--mode", "tree", "--budget", "24", expect=5)["lab1:main"]
    settled.set_faults(None)
    plan = result(cli, "plan", "lab1", "--mode", "tree", "--budget", "24")["plans"][0]
    assert plan["release"] == failed["release"]
    assert "was taken back before" in plan["notes"][0]
    assert outcomes(cli, "deploy", "lab1", "--mode", "tree", "--budget", "24")["lab1:main"]["status"] == "deployed"
    assert failed["release"] not in Disk.of(settled).instance("main")["state"]["taken_back"]
    assert outcomes(cli, "rollback", "lab1")["lab1:main"]["release"] == linear


def test_a_first_deploy_that_fails_leaves_nothing(cli: Cli, host: Machine) -> None:
    host.set_faults(["CRASH_AT_START=1"])
    outcome = outcomes(cli, "deploy", "lab1", expect=5)["lab1:main"]
    assert "nothing was there before" in outcome["error"]["why"]
    there = Disk.of(host).instance("main")
    assert (there["current"], there["unit"]) == (None, False)
    assert host.inside("systemctl", "is-active", UNIT, ok=(3, 4)).stdout.strip() == "inactive"
    host.set_faults(None)
    assert outcomes(cli, "deploy", "lab1")["lab1:main"]["status"] == "deployed"


def test_a_plan_is_carried_out_as_shown_or_not_at_all(cli: Cli, settled: Machine, linear: str, tmp_path: Path) -> None:
    file = str(tmp_path / "plan.json")
    cli("plan", "lab1", *TREE, "--out", file)
    settled.inside("sh", "-c", f"echo '# by hand' >>/etc/systemd/system/{UNIT}")
    moved = outcomes(cli, "deploy", "--plan", file, expect=8)["lab1:main"]
    assert "changed since the plan was made" in moved["error"]["found"]
    assert running(settled, "main") == linear
    assert outcomes(cli, "deploy", "lab1")["lab1:main"]["effect"] == "reload + restart"
    cli("plan", "lab1", *TREE, "--out", file)
    done = outcomes(cli, "deploy", "--plan", file)["lab1:main"]
    assert done["release"] == running(settled, "main") == json.loads(Path(file).read_text())["plans"][0]["release"]


@pytest.mark.usefixtures("linear")
def test_states_are_told_apart(cli: Cli, settled: Machine) -> None:
    def health() -> str:
        found = result(cli, "status", "lab1", expect=(0, 3, 8))["instances"][0]
        return str(found["health"])

    def systemctl(verb: str) -> None:
        settled.inside("systemctl", verb, UNIT)

    assert health() == "healthy"
    systemctl("stop")
    assert health() == "down"
    settled.set_faults(["HANG_LOADING=1"])
    systemctl("start")
    assert health() == "starting"
    settled.set_faults(["CRASH_AT_START=1", "LOAD_S=0.1"])
    systemctl("restart")
    until(lambda: health() == "restarting", "restarting")
    until(lambda: health() == "failed", "failed")
    settled.set_faults(["WEIGHT_VERSION=feedfacefeed"])
    systemctl("reset-failed")
    systemctl("start")
    until(lambda: health() == "up but wrong", "up but wrong")
    settled.set_faults(["MODE=ar"])
    systemctl("restart")
    until(lambda: health() == "up but wrong", "up but wrong")
    settled.set_faults(None)
    systemctl("restart")
    until(lambda: health() == "healthy", "healthy")
    settled.cut()
    try:
        assert health() == "unreachable"
    finally:
        settled.heal()


@pytest.mark.usefixtures("linear")
def test_two_terminals_at_once(cli: Cli, settled: Machine) -> None:
    first = cli.start("deploy", "lab1", *TREE)
    until(lambda: Disk.of(settled).seen["lock"] is not None, "it holds the lock")
    first.send_signal(signal.SIGSTOP)  # it holds the lock for as long as the second one needs to look at it
    refused = outcomes(cli, "deploy", "lab1", *TREE, expect=7)["lab1:main"]
    assert "for: deploy main" in refused["error"]["found"]
    assert refused["error"]["next"] == "ddtree-ops unlock lab1"
    assert "being changed by" in cli("status", "lab1", expect=(0, 8)).stdout
    second = cli.start("deploy", "lab1", *TREE, "--wait", "240")
    until_said(second, "; waiting, ")
    first.send_signal(signal.SIGCONT)
    said, _ = first.communicate(timeout=LIMIT_S)
    assert first.returncode == 0, said
    said, _ = second.communicate(timeout=LIMIT_S)
    assert (second.returncode, "already runs and is healthy" in said) == (0, True), said
    there = Disk.of(settled).instance("main")
    assert running(settled, "main") == there["current"] == there["state"]["proven"]


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_while_it_loads(cli: Cli, settled: Machine, linear: str, sent: signal.Signals) -> None:
    settled.set_faults(["ONLY=tree", "HANG_LOADING=1"])
    client = cli.start("deploy", "lab1", *TREE)
    until(lambda: running(settled, "main") not in (linear, None), "the new server runs")
    client.send_signal(sent)
    said, _ = client.communicate(timeout=LIMIT_S)
    assert client.returncode == 130, said
    assert "interrupted" in said
    assert running(settled, "main") == linear
    disk = Disk.of(settled)
    disk.invariants()
    assert disk.seen["lock"] is None
    assert disk.instance("main")["current"] == linear


def test_a_second_interrupt_ends_at_once_and_the_lock_says_whose_it_is(cli: Cli, settled: Machine, linear: str) -> None:
    settled.set_faults(["ONLY=tree", "HANG_LOADING=1"])
    client = cli.start("deploy", "lab1", *TREE)
    until(lambda: running(settled, "main") not in (linear, None), "the new server runs")
    settled.freeze()  # whatever it asks the host now is not answered: it can end by waiting for nothing, or late
    try:
        client.send_signal(signal.SIGINT)
        until_said(client, "interrupted: taking back what was begun")
        client.send_signal(signal.SIGINT)
        said, _ = client.communicate(timeout=LIMIT_S)
    finally:
        settled.thaw()
    assert client.returncode == 130, said
    assert said.rstrip().endswith("ended at once; the host's lock names this command until it runs out")
    disk = Disk.of(settled)
    disk.invariants()
    assert disk.seen["lock"]["purpose"] == "deploy main"
    settled.set_faults(None)
    # the owner was a process of this machine and is gone, so its lock is no obstacle
    assert outcomes(cli, "deploy", "lab1")["lab1:main"]["status"] in ("deployed", "unchanged")


@pytest.mark.usefixtures("linear")
def test_prune_keeps_what_could_be_returned_to(cli: Cli, settled: Machine) -> None:
    for budget in ("40", "41"):
        outcomes(cli, "deploy", "lab1", "--mode", "tree", "--budget", budget)
    before = set(Disk.of(settled).instance("main")["releases"])
    would = result(cli, "prune", "lab1", "--keep", "1", "--dry-run")["removed"]["lab1"]
    assert set(Disk.of(settled).instance("main")["releases"]) == before
    gone = result(cli, "prune", "lab1", "--keep", "1")["removed"]["lab1"]
    assert gone == would
    left = Disk.of(settled).instance("main")
    assert set(left["releases"]) == before - set(gone["releases"]["main"])
    assert {left["current"], left["state"]["previous"], left["state"]["proven"]} <= set(left["releases"])
    assert cli("prune", "lab1", "--keep", "1").stdout == "lab1  removed: nothing\n"


def test_lock_of_a_dead_command_elsewhere_is_freed_by_hand(cli: Cli, settled: Machine, linear: str) -> None:
    lock = {"token": "t", "owner": "eve@laptop", "pid": 7, "client": "x", "purpose": "deploy main", "since": 1.0}
    settled.inside("sh", "-c", 'printf %s "$1" >/opt/ddtree/lock.json', "sh", json.dumps({**lock, "expires": 9e9}))
    said = cli("deploy", "lab1", *TREE, expect=7).stdout
    assert "locked by eve@laptop, pid 7" in said
    assert "next: ddtree-ops unlock lab1" in said
    assert "held by eve@laptop" in cli("unlock", "lab1", expect=7).stderr
    assert cli("unlock", "lab1", "--force").stdout == "lab1  freed the lock of eve@laptop (deploy main)\n"
    assert cli("unlock", "lab1").stdout == "lab1  was not locked\n"
    assert running(settled, "main") == linear
