"""Real hosts for the tests of this folder: booted once a session, as good as new for every test, gone at the end.

    def test_x(host):           one host, freshly installed
    def test_y(hosts):          hosts(3): three of them
    def test_z(cli, host):      cli("status", "lab1", "--json") runs ddtree-ops with the lab's inventory

A lab is named after the processes that test, so that runs beside each other never meet; what a killed run left is
taken down by the next one.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from ddtree_ops.lab import owned
from ddtree_ops.lab.lab import Lab
from ddtree_ops.lab.machine import Machine

HERE = Path(__file__).parent
STARTED: list[subprocess.Popen[str]] = []
ROOT = HERE.parents[1]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.lab)


@pytest.fixture(scope="session")
def lab() -> Iterator[Lab]:
    """The session's lab with two running hosts."""
    if os.geteuid() != 0:
        pytest.skip("the lab needs root: run `make test` as root, or only the other tests: pytest -m 'not lab'")
    owned.take_down("test")
    owner = os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else None
    made = Lab(owned.owned_lab("test", owner))
    try:
        made.up(2)
        yield made
    finally:
        made.down()


@dataclass
class Fleet:
    """Hands out hosts that no test has touched since their disk was new."""

    lab: Lab
    untouched: set[str] = field(default_factory=set)

    def __call__(self, count: int) -> list[Machine]:
        before = {machine.name for machine in self.lab.machines()}
        machines = self.lab.up(count)
        for machine in machines:
            if machine.name in before and machine.name not in self.untouched:
                self.lab.renew(machine)
            self.untouched.discard(machine.name)
        return machines


@pytest.fixture(scope="session")
def fleet(lab: Lab) -> Fleet:
    return Fleet(lab, {machine.name for machine in lab.machines()})


@pytest.fixture
def hosts(fleet: Fleet) -> Callable[[int], list[Machine]]:
    """``hosts(n)``: the first n hosts, each as if freshly installed."""
    return fleet


@pytest.fixture
def host(hosts: Callable[[int], list[Machine]]) -> Machine:
    """One host, as if freshly installed."""
    return hosts(1)[0]


@dataclass
class Cli:
    """Runs ddtree-ops as a person would: a process of its own, the lab's inventory, no configuration of the tester."""

    inventory: Path
    home: Path

    def _environment(self) -> dict[str, str]:
        folders = {f"XDG_{name}_HOME": str(self.home / name.lower()) for name in ("CONFIG", "STATE", "DATA")}
        fixed = {"DDTREE_INVENTORY": str(self.inventory), "PYTHONPATH": str(ROOT), "NO_COLOR": "1", "COLUMNS": "200"}
        return {**os.environ, **folders, **fixed}

    def argv(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "ddtree_ops", *words]

    def __call__(
        self, *words: str, expect: int | Sequence[int] = 0, timeout: float = 300
    ) -> subprocess.CompletedProcess[str]:
        """Run to the end; an exit code other than ``expect`` fails the test with what the command said."""
        done = subprocess.run(
            self.argv(*words), env=self._environment(), stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=timeout, check=False,
        )  # fmt: skip
        wanted = [expect] if isinstance(expect, int) else expect
        said = f"ddtree-ops {' '.join(words)} ended with {done.returncode}\n{done.stdout}{done.stderr}"
        assert done.returncode in wanted, said
        return done

    def start(self, *words: str) -> subprocess.Popen[str]:
        """Start it in a process group of its own and return at once; what still runs when the test ends is killed."""
        STARTED.append(subprocess.Popen(
            self.argv(*words), env=self._environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, start_new_session=True,
        ))  # fmt: skip
        return STARTED[-1]


@pytest.fixture(autouse=True)
def nothing_outlives_a_test() -> Iterator[None]:
    """A test that fails half way leaves the commands that it started."""
    yield
    while STARTED:
        left = STARTED.pop()
        if left.poll() is None:
            os.killpg(left.pid, signal.SIGKILL)
            left.wait()
        if left.stdout is not None:
            left.stdout.close()


@pytest.fixture(scope="session")
def cli_for() -> type[Cli]:
    """``cli_for(inventory, home)``: a runner for an inventory of the test's own."""
    return Cli


@pytest.fixture
def cli(lab: Lab, tmp_path: Path) -> Cli:
    return Cli(lab.names.inventory, tmp_path)
