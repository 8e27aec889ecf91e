"""A sweep and a measurement on a real host: what ran before runs again, also after an interruption and a kill."""

from __future__ import annotations

import json
import signal

from waiting import LIMIT_S, until

from ddtree_ops.lab.machine import Machine

from .conftest import Cli
from .fleet import Disk

QUICK = ("--streams", "1", "--tokens", "16", "--prompts", "8")


def armed(host: Machine) -> bool:
    return bool(Disk.of(host).instance("main")["armed"])


def current(host: Machine) -> str:
    return str(Disk.of(host).instance("main")["current"])


def test_a_sweep_recommends_and_leaves_a_host_as_it_was(cli: Cli, host: Machine) -> None:
    cli("deploy", host.name, timeout=300)
    before = current(host)
    host.set_faults(["ONLY=budget=32", "CRASH_AT_START=1", "TOK_S=linear=40,tree=100"])
    seen = json.loads(cli("sweep", host.name, "--budgets", "8,32", *QUICK, "--json", timeout=600).stdout)
    assert [(arm["name"], arm["verdict"]) for arm in seen["arms"]] == [
        ("linear", "measured"),
        ("tree 8 top-8", "measured"),
        ("tree 32 top-8", "failed"),
    ]
    assert seen["recommended"]["budget"] == 8
    assert current(host) == before
    assert not armed(host)
    assert Disk.of(host).seen["lock"] is None
    cli("status", host.name)
    cli("status", host.name, "--drift")
    measured = json.loads(cli("bench", host.name, *QUICK, "--json", timeout=300).stdout)
    assert measured["targets"][0]["release"] == before


def test_a_sweep_that_ends_early_puts_back_what_ran(cli: Cli, host: Machine) -> None:
    cli("deploy", host.name, timeout=300)
    before = current(host)
    host.set_faults(["TOK_S=tree=2"])  # minutes of measuring

    interrupted = cli.start("sweep", host.name, "--budgets", "8", *QUICK)
    until(lambda: armed(host), "it has begun")
    interrupted.send_signal(signal.SIGINT)
    interrupted.communicate(timeout=2 * LIMIT_S)
    assert interrupted.returncode == 130
    assert current(host) == before
    assert not armed(host)
    assert Disk.of(host).seen["lock"] is None
    cli("status", host.name)

    killed = cli.start("sweep", host.name, "--budgets", "8", *QUICK)
    until(lambda: armed(host), "it has begun")
    killed.kill()
    killed.communicate(timeout=LIMIT_S)
    assert Disk.of(host).instance("main")["current"] is not None
    assert armed(host), "the host will take it back by itself"
    assert "sweep main" in str(Disk.of(host).seen["lock"])
    cli("deploy", host.name, timeout=300)
    assert current(host) == before
    assert not armed(host)
