"""Draining: nothing new, what runs may finish, the limit holds, what it cut off is counted, GPUs are free."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fakehost import FakeHost, deployer, host_of, settings

from ddtree_ops.drain import Drain
from ddtree_ops.errors import ExitCode, RefusedError
from ddtree_ops.model import Mode, RouterSettings, Settings
from ddtree_ops.outcome import Outcome, Status
from ddtree_ops.steps import Work

LINEAR, TREE = settings(drain_timeout_s=20), settings(mode=Mode.TREE, budget=32, drain_timeout_s=20)


class Gateway:
    """A router that remembers what it was asked; ``refuse`` makes it refuse to let go."""

    def __init__(self, *, refuse: bool = False) -> None:
        self.refuse, self.was_in, self.asked = refuse, False, list[str]()

    def take_out(self) -> str:
        self.asked.append("out")
        if self.refuse:
            raise RefusedError("the router would keep 0 healthy workers without it, 1 must remain")
        self.was_in = True
        return "out of the router"

    def gone(self) -> None:
        self.asked.append("gone")

    def put_in(self) -> str:
        self.asked.append("in")
        self.was_in = False
        return "in the router again"


def deploy(fake: FakeHost, wanted: Settings, tmp: Path, gateway: Gateway | None = None, **more: Any) -> Outcome:
    def draining(work: Work) -> Drain:
        return Drain(work, gateway)  # type: ignore[arg-type]

    routers = {"a": RouterSettings(url="http://gw")} if gateway is not None else {}
    host = host_of(wanted, routers=routers)
    return deployer(fake, tmp=tmp, draining=draining, **more).run([(host, [wanted])])[0]


@pytest.fixture
def on_linear(tmp_path: Path) -> FakeHost:
    fake = FakeHost()
    assert deploy(fake, LINEAR, tmp_path).status is Status.DEPLOYED
    fake.ops.clear()
    return fake


def test_server_is_stopped_before_the_switch_and_started_after_it(on_linear: FakeHost, tmp_path: Path) -> None:
    assert deploy(on_linear, TREE, tmp_path).status is Status.DEPLOYED
    ops = on_linear.ops
    assert ops.index("systemctl stop") < ops.index("switch") < ops.index("systemctl restart")
    assert "systemctl kill" not in ops


def test_first_deploy_has_nothing_to_drain(tmp_path: Path) -> None:
    fake = FakeHost()
    deploy(fake, LINEAR, tmp_path)
    assert "systemctl stop" not in fake.ops


def test_requests_that_do_not_finish_are_cut_off_at_the_limit_and_counted(on_linear: FakeHost, tmp_path: Path) -> None:
    on_linear.busy, on_linear.drains = 3, False
    began = on_linear.clock.now
    outcome = deploy(on_linear, TREE, tmp_path)
    assert outcome.status is Status.DEPLOYED
    assert outcome.notes == ("3 requests cut off after 20 s",)
    assert "systemctl kill" in on_linear.ops
    assert 20 <= on_linear.clock.now - began < 60
    assert on_linear.releases["a"][str(outcome.release)]["gates"]["cut_off"] == 3


def test_process_that_does_not_die_is_named(on_linear: FakeHost, tmp_path: Path) -> None:
    before = on_linear.current["a"]
    on_linear.drains = on_linear.dies = False
    outcome = deploy(on_linear, TREE, tmp_path)
    assert outcome.error is not None
    assert "did not end, not even by SIGKILL" in outcome.error.found
    assert "sglang.launch_server (pid 101)" in outcome.error.found
    assert on_linear.current["a"] == before


def test_gpu_that_is_not_free_names_who_holds_it_and_the_old_server_is_started_again(
    on_linear: FakeHost, tmp_path: Path
) -> None:
    before = on_linear.runs()
    on_linear.strays = {0: "left-behind"}
    outcome = deploy(on_linear, TREE, tmp_path)
    assert outcome.code is ExitCode.ROLLED_BACK
    assert outcome.error is not None
    assert "its GPU still holds memory of left-behind (pid 66)" in outcome.error.found
    assert on_linear.runs() == before
    assert "switch" not in on_linear.ops


def test_router_lets_go_before_the_stop_and_gets_it_back_when_it_is_proven(on_linear: FakeHost, tmp_path: Path) -> None:
    gateway, order = Gateway(), list[str]()
    on_linear.hook = lambda op: order.extend(
        [*gateway.asked[len([o for o in order if o in ("out", "gone", "in")]) :], op]
    )
    assert deploy(on_linear, TREE, tmp_path, gateway).status is Status.DEPLOYED
    assert gateway.asked == ["out", "gone", "in"]
    assert order.index("out") < order.index("systemctl stop") < order.index("gone") < order.index("switch")
    assert order.index("complete") < order.index("in") < order.index("record")


def test_router_that_would_run_empty_is_a_refusal_that_touches_nothing(on_linear: FakeHost, tmp_path: Path) -> None:
    outcome = deploy(on_linear, TREE, tmp_path, Gateway(refuse=True))
    assert (outcome.status, outcome.code) == (Status.REFUSED, ExitCode.REFUSED)
    assert on_linear.starts == 1
    assert "systemctl stop" not in on_linear.ops


@pytest.mark.parametrize("fault", ["crash", "hang", "hung-completion"])
def test_what_is_taken_back_is_put_back_into_the_router(on_linear: FakeHost, tmp_path: Path, fault: str) -> None:
    before, gateway = on_linear.runs(), Gateway()
    on_linear.faults["tree"] = fault
    assert deploy(on_linear, TREE, tmp_path, gateway).code is ExitCode.ROLLED_BACK
    assert on_linear.runs() == before
    assert gateway.asked == ["out", "gone", "in"]


def test_first_deploy_goes_into_the_router(tmp_path: Path) -> None:
    fake, gateway = FakeHost(), Gateway()
    assert deploy(fake, LINEAR, tmp_path, gateway).status is Status.DEPLOYED
    assert gateway.asked == ["in"]
