"""A deploy interrupted after every single step, three ways, on real hosts side by side: one host a step.

The client is killed with -9, the cable is cut, or the host loses power as the step begins. At that instant and ever
after the layout is whole; then the host is back on the release before (its own dead-man switch sees to that) or has
the new one complete; and the next deploy succeeds.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from fleet import Cli, Disk, main_pid, outcomes, running, two_instances

from ddtree_ops.errors import UnreachableError
from ddtree_ops.lab.lab import Lab
from ddtree_ops.lab.machine import Machine

STEPS = (
    "stage release",
    "arm",
    "drain",
    "switch",
    "write unit",
    "daemon-reload",
    "reset-failed",
    "restart",
    "health",
    "gates",
    "confirm",
    "record",
)
STAYS = "record"  # the release was confirmed before this step began
EITHER = "confirm"  # the request may have been on its way already
NEIGHBOURS = ("switch", "restart", "health")  # on these steps' hosts another instance runs, and must not notice
DEAD_MAN_S = 15


@dataclass
class Fleet:
    """The hosts, one a step, and the runner whose inventory names them."""

    lab: Lab
    cli: Cli
    machines: dict[str, Machine]
    before: dict[str, str] = field(default_factory=dict)

    def deploy(self, budget: int) -> None:
        """The same release on every host."""
        found = outcomes(self.cli, "deploy", "main", "--mode", "tree", "--budget", str(budget), "--parallel", "12")
        for step, machine in self.machines.items():
            assert found[f"{machine.name}:main"]["status"] in ("deployed", "unchanged"), (step, found)
            self.before[step] = found[f"{machine.name}:main"]["release"]

    def each(self, do: Callable[[str, Machine], Any]) -> dict[str, Any]:
        with ThreadPoolExecutor(max_workers=len(self.machines)) as pool:
            done = {step: pool.submit(do, step, machine) for step, machine in self.machines.items()}
            return {step: each.result() for step, each in done.items()}


@pytest.fixture(scope="module")
def interrupted_fleet(lab: Lab, fleet: Any, cli_for: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A host for each step, on a proven release, three with a second instance; the surplus goes at the end."""
    machines = dict(zip(STEPS, fleet(len(STEPS)), strict=True))
    folder: Path = tmp_path_factory.mktemp("interrupts")
    neighbours = [machines[step].name for step in NEIGHBOURS]
    inventory = two_instances(lab, list(machines.values()), folder, neighbours)
    runner: Cli = cli_for(inventory, folder)
    made = Fleet(lab, runner, machines)
    made.deploy(32)
    outcomes(runner, "deploy", "neighbours", "--parallel", "12")
    yield made
    for machine in list(machines.values())[2:]:
        machine.destroy()


def change(fleet: Fleet, budget: int, step: str, machine: Machine, act: Callable[[Any], None]) -> None:
    """Start a deploy to another budget and act as ``step`` begins."""
    words = ("--mode", "tree", "--budget", str(budget), "--dead-man", str(DEAD_MAN_S), "--patience", "2")
    client = fleet.cli.start("deploy", f"{machine.name}:main", *words, "--health-timeout", "30")
    assert client.stdout is not None
    said = []
    for line in client.stdout:
        said.append(line)
        if f"  {step}: " in line:
            act(client)
            break
    else:
        raise AssertionError(f"{step} was never begun: {''.join(said)}")
    client.communicate(timeout=180)
    assert client.returncode != 0, step


def settle(step: str, machine: Machine) -> str:
    """Wait until nothing of the interrupted deploy is pending on the host; returns what runs then."""
    end = time.monotonic() + 120
    while True:
        disk = Disk.of(machine)
        disk.invariants()
        there = disk.instance("main")
        up = running(machine, "main")
        if not there["armed"] and up is not None and up == there["current"]:
            return up
        assert time.monotonic() < end, (step, there, up)
        time.sleep(0.5)


def judge(fleet: Fleet, ends: dict[str, str]) -> None:
    """Before the confirmation the old release is back; after it the new one stays."""
    for step, up in ends.items():
        if step != EITHER:
            assert (up != fleet.before[step]) == (step == STAYS), (step, up, fleet.before[step])


def neighbours(fleet: Fleet) -> dict[str, tuple[int, str | None]]:
    return {
        step: (main_pid(fleet.machines[step], "other"), running(fleet.machines[step], "other")) for step in NEIGHBOURS
    }


def test_client_killed(interrupted_fleet: Fleet) -> None:
    fleet = interrupted_fleet
    others = neighbours(fleet)

    def one(step: str, machine: Machine) -> str:
        def kill(client: Any) -> None:
            os.killpg(client.pid, signal.SIGKILL)
            Disk.of(machine).invariants()

        change(fleet, 40, step, machine, kill)
        return settle(step, machine)

    judge(fleet, fleet.each(one))
    assert neighbours(fleet) == others
    fleet.deploy(40)


def test_cable_cut(interrupted_fleet: Fleet) -> None:
    fleet = interrupted_fleet
    others = neighbours(fleet)

    def one(step: str, machine: Machine) -> str:
        def cut(_client: Any) -> None:
            machine.cut()
            Disk.of(machine).invariants()

        try:
            change(fleet, 48, step, machine, cut)
            return settle(step, machine)
        finally:
            machine.heal()

    judge(fleet, fleet.each(one))
    assert neighbours(fleet) == others
    fleet.deploy(48)


def power_on(lab: Lab, machine: Machine) -> None:
    """Hosts that boot at once may get in each other's way (nspawn's propagation folders); then one boots again."""
    try:
        lab.power_on(machine)
    except UnreachableError:
        machine.kill()
        lab.power_on(machine)


def test_power_lost(interrupted_fleet: Fleet) -> None:
    fleet = interrupted_fleet

    def one(step: str, machine: Machine) -> str:
        change(fleet, 56, step, machine, lambda _client: machine.powercut())
        power_on(fleet.lab, machine)
        return settle(step, machine)

    judge(fleet, fleet.each(one))
    assert all(release for _, release in neighbours(fleet).values())
    fleet.deploy(56)
