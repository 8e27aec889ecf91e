"""A sweep: every arm started and measured, what ran before put back however it ends, and what is recommended."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from fakehost import FakeHost, deployer, host_of, settings

from ddtree_ops.drain import Drain
from ddtree_ops.errors import DdtreeError, ExitCode, NotRolledBackError, RefusedError, UnreachableError, UsageError
from ddtree_ops.gates.attest import asked_flags
from ddtree_ops.gates.measure import Measurement, parse_run
from ddtree_ops.interrupt import Interrupted, Token
from ddtree_ops.measuring import Load, Swept, arms
from ddtree_ops.model import GateSettings, Mode, Settings
from ddtree_ops.outcome import Status
from ddtree_ops.plan import Options
from ddtree_ops.render import server_argv
from ddtree_ops.sweep import Result, Sweep, Verdict, compared, recommend
from ddtree_ops.targets import Overrides

LINEAR = settings()
BEFORE = settings(max_running_requests=4)
TREES = [settings(mode=Mode.TREE, budget=budget) for budget in (8, 32)]
ARMS = [LINEAR, *TREES]
GATES = GateSettings(concurrencies=(1, 4), prompts=8, tokens=16)
SPEED = {"linear": 100.0, 8: 90.0, 32: 124.0}


@dataclass
class Measured(FakeHost):
    """A host whose server says what it resolved, and answers a load at a speed that its settings decide."""

    differs: set[int] = field(default_factory=set)
    errors: set[int] = field(default_factory=set)

    def _of_server(self) -> Settings:
        server = self._ready("a")
        assert server is not None
        return Settings.model_validate_json(json.dumps(self.releases["a"][server.release]["settings"]), strict=False)

    def op_observe(self, args: dict[str, Any], payload: Any) -> dict[str, Any]:
        seen = super().op_observe(args, payload)
        server = self._ready("a")
        if server is not None:
            asked = self._of_server()
            told: dict[str, Any] = {
                name: int(value) if str(value).isdigit() else value
                for name, value in asked_flags(server_argv(asked, server.release)).items()
            }
            block = {"mode": asked.mode.value, "budget": asked.budget, "topk_cap": asked.topk_cap}
            told["internal_states"] = [{"ddtree": block}]
            seen["http"].append({"path": "/server_info", "status": 200, "body": json.dumps(told)})
        return seen

    def op_load(self, args: dict[str, Any], _payload: Any) -> dict[str, Any]:
        asked = self._of_server()
        which: Any = asked.budget if asked.mode is Mode.TREE else asked.mode.value
        self.clock.sleep(10)
        replies = [
            {
                "body": body,
                "round": turn,
                "seconds": (1 + body / 10) * 16 / SPEED[which],
                "tokens": [token + (which in self.differs) for token in range(16)],
                "accept_length": 4.0,
                **({"error": "HTTP 500"} if which in self.errors else {}),
            }
            for turn in range(args["rounds"])
            for body in range(len(args["bodies"]))
        ]
        return {"concurrency": args["concurrency"], "wall_s": 1.0, "replies": replies}


@pytest.fixture
def fake(tmp_path: Path) -> Measured:
    """A host that runs a proven release."""
    made = Measured()
    assert deployer(made, tmp=tmp_path).run([(host_of(BEFORE), [BEFORE])])[0].status is Status.DEPLOYED
    made.ops.clear()
    return made


def sweep_of(fake: Measured, tmp: Path, token: Token | None = None) -> Sweep:
    options = Options(arm=True, gates=("measure",), prove=True)
    run = deployer(fake, tmp=tmp, token=token, options=options, draining=Drain)
    return Sweep(run, run.connect(host_of(BEFORE)), GATES)


def as_before(fake: Measured, before: str | None) -> None:
    fake.invariants()
    assert fake.runs() == fake.current["a"] == fake.states["a"]["proven"] == before
    assert fake.armed == {}
    assert fake.held is None


def test_every_arm_is_measured_and_what_ran_is_back(fake: Measured, tmp_path: Path) -> None:
    before = fake.current["a"]
    results = compared(sweep_of(fake, tmp_path).all(ARMS), GATES)
    assert [(each.name, each.verdict) for each in results] == [
        ("linear", Verdict.MEASURED),
        ("tree 8 top-8", Verdict.MEASURED),
        ("tree 32 top-8", Verdict.MEASURED),
    ]
    assert [round(each.speedup, 2) for each in results[1:]] == [0.90, 1.24]
    best, why = recommend(results)
    assert best is results[2]
    assert "1.24 times linear" in why
    as_before(fake, before)
    assert fake.states["a"]["taken_back"] == {}
    assert "record" not in fake.ops


def test_no_release_of_a_sweep_is_ever_confirmed(fake: Measured, tmp_path: Path) -> None:
    before, seen = fake.current["a"], []

    def hook(op: str) -> None:
        if op == "load":
            seen.append(fake.armed["a"]["to"])
            assert fake.token is not None
            assert fake.armed["a"]["deadline"] > fake.clock.time() + 200, "it is moved ahead"
        if op == "confirm":
            assert fake.current["a"] == before

    fake.hook = hook
    many = [settings(mode=Mode.TREE, budget=32, topk_cap=cap) for cap in range(1, 17)]
    sweep_of(fake, tmp_path).all([LINEAR, *many])
    assert set(seen) == {before}


def test_a_tree_that_does_not_start_is_a_result(fake: Measured, tmp_path: Path) -> None:
    before = fake.current["a"]
    fake.faults["tree"] = "crash"
    results = compared(sweep_of(fake, tmp_path).all(ARMS), GATES)
    assert [each.verdict for each in results] == [Verdict.MEASURED, Verdict.FAILED, Verdict.FAILED]
    assert "the budget is not for this GPU" in results[1].line
    assert recommend(results) == (None, "no tree was measured")
    as_before(fake, before)


def test_a_tree_with_other_answers_is_not_recommended(fake: Measured, tmp_path: Path) -> None:
    fake.differs = {32}
    results = compared(sweep_of(fake, tmp_path).all(ARMS), GATES)
    assert results[2].verdict is Verdict.WRONG
    best, why = recommend(results)
    assert best is results[0]
    assert "no tree is surely" in why


def test_requests_that_fail_are_the_arms_failure(fake: Measured, tmp_path: Path) -> None:
    before = fake.current["a"]
    fake.errors = {8}
    results = sweep_of(fake, tmp_path).all(ARMS)
    assert [each.verdict for each in results] == [Verdict.MEASURED, Verdict.FAILED, Verdict.MEASURED]
    assert "HTTP 500" in results[1].line
    as_before(fake, before)


@pytest.mark.parametrize("step", ["stage_release", "systemctl stop", "switch", "systemctl restart", "load", "observe"])
def test_ctrl_c_at_any_step_puts_back_what_ran(fake: Measured, tmp_path: Path, step: str) -> None:
    before, token, met = fake.current["a"], Token(), [0]

    def hook(op: str) -> None:
        met[0] += op == step
        if met[0] == 2:
            token.set("SIGINT")

    fake.hook = hook
    with pytest.raises(Interrupted):
        sweep_of(fake, tmp_path, token).all(ARMS)
    as_before(fake, before)


def test_a_host_that_falls_silent_takes_back_by_itself(fake: Measured, tmp_path: Path) -> None:
    before = fake.current["a"]

    def hook(op: str) -> None:
        if op == "load":
            fake.reachable = False

    fake.hook = hook
    with pytest.raises(NotRolledBackError) as stuck:
        sweep_of(fake, tmp_path).all(ARMS)
    assert "will" in stuck.value.why
    fake.clock.sleep(400)
    fake.expire("a")
    fake.clock.sleep(10)
    assert fake.runs() == fake.current["a"] == before


def test_a_release_that_does_not_come_back_is_said(fake: Measured, tmp_path: Path) -> None:
    loads = [0]

    def hook(op: str) -> None:
        loads[0] += op == "load"
        if op == "take_back":
            fake.faults["linear"] = "crash"

    fake.hook = hook
    with pytest.raises(NotRolledBackError, match="could not be put back") as stuck:
        sweep_of(fake, tmp_path).all([TREES[0]])
    assert stuck.value.exit_code == ExitCode.NOT_ROLLED_BACK
    assert "--to" in stuck.value.next
    assert fake.armed, "the host tries again"


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda fake: fake.server.clear(), "does not run"),
        (lambda fake: fake.states["a"].update(proven="0" * 64), "was never proven"),
        (lambda fake: fake.current.update(a=None), "nothing is deployed"),
    ],
    ids=["down", "unproven", "nothing"],
)
def test_a_sweep_needs_something_to_return_to(fake: Measured, tmp_path: Path, change: Any, found: str) -> None:
    change(fake)
    with pytest.raises(RefusedError, match=found):
        sweep_of(fake, tmp_path).all(ARMS)
    assert fake.held is None
    assert fake.armed == {}


def test_a_link_that_is_down_from_the_start(fake: Measured, tmp_path: Path) -> None:
    fake.reachable = False
    with pytest.raises(UnreachableError):
        sweep_of(fake, tmp_path).all(ARMS)


# -- what is swept, and what is recommended


def measurement(speed: float) -> Measurement:
    replies = [{"body": body, "seconds": 16 / speed, "tokens": list(range(16))} for body in range(8)] * 2
    return Measurement((parse_run({"concurrency": 1, "wall_s": 1.0, "replies": replies}, 16),))


ONE = GateSettings(prompts=8, tokens=16)


def test_without_linear_nothing_is_recommended() -> None:
    tree = Result(TREES[0], Verdict.MEASURED, "", "r", measurement(100))
    results = compared([Result(LINEAR, Verdict.FAILED, "out of memory"), tree], ONE)
    assert results[1].runs[0]["tokens_per_s"] == 256.0
    assert recommend(results)[0] is None


def test_a_wanted_speedup_that_no_tree_reaches() -> None:
    both = [
        Result(LINEAR, Verdict.MEASURED, "", "r", measurement(100)),
        Result(TREES[0], Verdict.MEASURED, "", "s", measurement(110)),
    ]
    results = compared(both, ONE)
    assert recommend(results, 1.05)[0] is results[1]
    assert recommend(results, 1.2)[0] is results[0]


def test_nothing_measured_is_an_exit_code() -> None:
    failed = Result(LINEAR, Verdict.FAILED, "no")
    assert Swept("h:a", (failed,), None, "").code == ExitCode.ROLLED_BACK
    assert Swept("h:a", (failed, Result(TREES[0], Verdict.MEASURED, runs=({"x": 1},))), None, "").code == ExitCode.DONE


def fleet_of(_names: Any) -> Any:
    from ddtree_ops.model import Fleet

    host = host_of(settings(topk_cap=6))
    return Fleet(path="f.toml", hosts={"h1": host})


def test_linear_comes_first_and_equal_arms_once() -> None:
    wanted, found = arms(fleet_of, "h1", [4, 16, 16], [8, 5], Overrides())
    assert [(each.mode, each.budget, each.topk_cap) for each in found] == [
        (Mode.LINEAR, 16, 6),
        (Mode.TREE, 4, 4),
        (Mode.TREE, 16, 8),
        (Mode.TREE, 16, 5),
    ]
    assert wanted.targets[0].name == "h1:a"
    assert any("capped at 4" in notice for notice in wanted.notices)


def test_the_instances_own_cap_where_none_is_given() -> None:
    assert [each.topk_cap for each in arms(fleet_of, "h1", [16], [], Overrides())[1]] == [6, 6]


@pytest.mark.parametrize(
    ("budgets", "caps", "found"), [([0], [], "budget 0"), ([16], [17], "topk_cap 17"), ([], [], "no budget")]
)
def test_sizes_that_cannot_be(budgets: list[int], caps: list[int], found: str) -> None:
    with pytest.raises(UsageError, match=found) as error:
        arms(fleet_of, "h1", budgets, caps, Overrides())
    assert error.value.next


def test_a_load_is_the_instances_own_but_for_what_is_given() -> None:
    host = host_of(settings(), gates={"a": GateSettings(concurrencies=(2, 8), tokens=64)})
    assert Load().gates(host, "a") == host.gates["a"]
    assert Load((4, 4, 1), rounds=3).gates(host, "a").model_dump(include={"concurrencies", "rounds", "tokens"}) == {
        "concurrencies": (4, 1),
        "rounds": 3,
        "tokens": 64,
    }
    with pytest.raises(DdtreeError, match="tokens 3 must be at least 16"):
        Load(tokens=3).gates(host, "a")


def test_what_a_person_sees(capsys: pytest.CaptureFixture[str]) -> None:
    from ddtree_ops.ui import Output
    from ddtree_ops.ui.measure import show_sweep

    both = [
        Result(LINEAR, Verdict.MEASURED, "", "r", measurement(100)),
        Result(TREES[0], Verdict.MEASURED, "", "s", measurement(120)),
        Result(TREES[1], Verdict.FAILED, "out of memory", "t"),
    ]
    results = compared(both, ONE)
    show_sweep(Output(), Swept("h1:a", tuple(results), *recommend(results)))
    assert capsys.readouterr().out.splitlines() == [
        "ARM\tRESULT\tSTREAMS\tTOK/S\tACCEPT\tSPEEDUP\t95 %",
        "linear\tmeasured\t1\t256.0\t-\t-\t-",
        "tree 8 top-8\tmeasured\t1\t256.0\t-\t1.20\t1.20 to 1.20",
        "tree 32 top-8\tfailed\t-\t-\t-\t-\t-",
        "tree 32 top-8  out of memory",
        "recommended: tree 8 top-8 (1.20 times linear, with 95 % confidence at least 1.20 times)",
        "    next: ddtree-ops deploy h1:a --mode tree --budget 8 --topk-cap 8",
    ]
