"""A deploy from start to end on hosts in memory: every step, every way back, every interrupt."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from fakehost import ENGINE, FakeHost, deployer, host_of, settings

from ddtree_ops.errors import DdtreeError, ExitCode, RefusedError, UnreachableError
from ddtree_ops.events import Event, Kind
from ddtree_ops.interrupt import Token
from ddtree_ops.model import Mode, Settings
from ddtree_ops.outcome import Outcome, Status, worst
from ddtree_ops.plan import Effect, Options, make_plan, require_unmoved
from ddtree_ops.steps import Work

LINEAR = settings()
TREE = settings(mode=Mode.TREE, budget=32)
# Every operation of a mode change, in order; a first deploy also stages the engine and enables the unit.
CHANGE = [
    "facts",
    "lock",
    "facts",
    "stage_release",
    "switch",
    "write_unit",
    "systemctl daemon-reload",
    "systemctl reset-failed",
    "systemctl restart",
]


def deploy(fake: FakeHost, wanted: Settings, tmp: Path, **options: object) -> Outcome:
    return deployer(fake, tmp=tmp, **options).run([(host_of(wanted), [wanted])])[0]


@pytest.fixture
def on_linear(tmp_path: Path) -> FakeHost:
    """A host that runs a proven linear release."""
    fake = FakeHost()
    assert deploy(fake, LINEAR, tmp_path).status is Status.DEPLOYED
    fake.ops.clear()
    return fake


def test_first_deploy_ends_proven(tmp_path: Path) -> None:
    fake, events = FakeHost(), []
    outcome = deploy(fake, LINEAR, tmp_path, events=events)
    assert (outcome.status, outcome.code, outcome.effect) == (Status.DEPLOYED, ExitCode.DONE, "reload + restart")
    assert fake.runs() == fake.current["a"] == fake.states["a"]["proven"] == outcome.release
    assert fake.enabled == {"a"}
    assert fake.engines == {ENGINE}
    assert fake.held is None
    steps = [event.step for event in events if event.kind is Kind.OK]
    assert steps == [
        "check",
        "stage engine",
        "stage release",
        "switch",
        "write unit",
        "daemon-reload",
        "reset-failed",
        "restart",
        "health",
        "record",
    ]


def test_second_deploy_changes_nothing_and_takes_no_lock(on_linear: FakeHost, tmp_path: Path) -> None:
    outcome = deploy(on_linear, LINEAR, tmp_path)
    assert (outcome.status, outcome.code) == (Status.UNCHANGED, ExitCode.DONE)
    assert on_linear.ops == ["facts", "observe", "complete"]


def test_mode_change_takes_the_steps_in_order(on_linear: FakeHost, tmp_path: Path) -> None:
    before = on_linear.current["a"]
    outcome = deploy(on_linear, TREE, tmp_path)
    assert outcome.status is Status.DEPLOYED
    assert outcome.before == before
    assert [op for op in on_linear.ops if op not in ("observe", "complete", "renew")] == [*CHANGE, "record", "unlock"]


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("crash", "ValueError: the budget is not for this GPU"),
        ("dies-after:3", "ValueError: the budget is not for this GPU"),
        ("hang", "not healthy after 60 s; last seen: loading weights"),
        ("hung-completion", "a completion failed: TimeoutError: timed out"),
        ("wrong-release", "the server that answers is release ffffffffffff"),
    ],
)
def test_failed_change_is_taken_back(on_linear: FakeHost, tmp_path: Path, fault: str, said: str) -> None:
    before = on_linear.current["a"]
    on_linear.faults["tree"] = fault
    outcome = deploy(on_linear, TREE, tmp_path)
    assert (outcome.status, outcome.code) == (Status.ROLLED_BACK, ExitCode.ROLLED_BACK)
    assert outcome.error is not None
    assert said in outcome.error.found
    assert "runs again" in outcome.error.why
    assert on_linear.runs() == on_linear.current["a"] == before
    assert on_linear.states["a"]["proven"] == before
    assert outcome.release in on_linear.states["a"]["taken_back"]
    assert on_linear.held is None
    assert (tmp_path / "evidence-a.tar.gz").read_bytes() == b"evidence"


def test_failed_first_deploy_leaves_nothing(tmp_path: Path) -> None:
    fake = FakeHost(faults={"linear": "crash"})
    outcome = deploy(fake, LINEAR, tmp_path)
    assert outcome.code is ExitCode.ROLLED_BACK
    assert fake.current["a"] is None
    assert fake.units == {}
    assert fake.runs() is None


def test_what_was_down_is_down_again(on_linear: FakeHost, tmp_path: Path) -> None:
    on_linear.server["a"] = None
    on_linear.faults["tree"] = "crash"
    outcome = deploy(on_linear, TREE, tmp_path)
    assert outcome.code is ExitCode.ROLLED_BACK
    assert outcome.error is not None
    assert "down as it was" in outcome.error.why
    assert on_linear.runs() is None


def test_way_back_that_does_not_come_up_needs_a_person(on_linear: FakeHost, tmp_path: Path) -> None:
    on_linear.faults = {"tree": "crash", "linear": "crash"}
    on_linear.server["a"].fault = ""  # type: ignore[union-attr]  # the one that runs is fine
    outcome = deploy(on_linear, TREE, tmp_path)
    assert outcome.code is ExitCode.NOT_ROLLED_BACK
    assert outcome.error is not None
    assert "does not come up" in outcome.error.found
    assert outcome.error.next.startswith("ddtree-ops rollback h1:a --to")


AFTER_SWITCH = ["write_unit", "systemctl daemon-reload", "systemctl reset-failed", "systemctl restart", "record"]


@pytest.mark.parametrize("op", AFTER_SWITCH)
def test_error_of_any_step_is_taken_back(on_linear: FakeHost, tmp_path: Path, op: str) -> None:
    before = on_linear.current["a"]
    on_linear.fail[op] = RefusedError("the disk is full")
    outcome = deploy(on_linear, TREE, tmp_path)
    assert outcome.code is ExitCode.ROLLED_BACK
    assert on_linear.runs() == on_linear.current["a"] == before
    on_linear.invariants()
    on_linear.fail.clear()
    assert deploy(on_linear, TREE, tmp_path).status is Status.DEPLOYED


@pytest.mark.parametrize("op", ["stage_release"])
def test_error_before_the_switch_touches_nothing(on_linear: FakeHost, tmp_path: Path, op: str) -> None:
    on_linear.fail[op] = RefusedError("no space left")
    outcome = deploy(on_linear, TREE, tmp_path)
    assert (outcome.status, outcome.code) == (Status.REFUSED, ExitCode.REFUSED)
    assert on_linear.starts == 1
    assert "take_back" not in on_linear.ops


@pytest.mark.parametrize("op", [*CHANGE[1:], "observe", "complete"])
def test_interrupt_at_any_step_leaves_the_host_as_it_was(on_linear: FakeHost, tmp_path: Path, op: str) -> None:
    before, token = on_linear.current["a"], Token()
    on_linear.hook = lambda begun: token.set("SIGINT") if begun == op else None
    outcome = deploy(on_linear, TREE, tmp_path, token=token)
    assert (outcome.status, outcome.code) == (Status.INTERRUPTED, ExitCode.INTERRUPTED)
    assert on_linear.runs() == on_linear.current["a"] == before
    assert on_linear.held is None
    on_linear.invariants()
    on_linear.hook = lambda _op: None
    assert deploy(on_linear, TREE, tmp_path).status is Status.DEPLOYED


@pytest.mark.parametrize("op", [*CHANGE[3:], "observe", "complete", "record"])
def test_link_cut_for_a_moment_at_any_step_is_no_failure(on_linear: FakeHost, tmp_path: Path, op: str) -> None:
    cut_at: list[float] = []

    def cut(begun: str) -> None:
        if begun == op and not cut_at:
            cut_at.append(on_linear.clock.now)
        on_linear.reachable = not cut_at or on_linear.clock.now - cut_at[0] > 10

    on_linear.hook = cut
    assert deploy(on_linear, TREE, tmp_path).status is Status.DEPLOYED
    assert cut_at


@pytest.mark.parametrize("op", CHANGE[4:])
def test_link_cut_for_good_says_that_a_person_is_needed(on_linear: FakeHost, tmp_path: Path, op: str) -> None:
    def cut(begun: str) -> None:
        on_linear.reachable = on_linear.reachable and begun != op

    on_linear.hook = cut
    outcome = deploy(on_linear, TREE, tmp_path)
    assert outcome.code is ExitCode.NOT_ROLLED_BACK
    assert outcome.error is not None
    assert "nobody watches it" in outcome.error.why
    on_linear.invariants()
    on_linear.hook, on_linear.reachable = lambda _op: None, True
    assert deploy(on_linear, TREE, tmp_path).status in (Status.DEPLOYED, Status.UNCHANGED)


def test_client_that_vanished_after_the_restart_leaves_a_release_that_the_next_deploy_proves(
    on_linear: FakeHost, tmp_path: Path
) -> None:
    class Killed(BaseException):
        """Nothing after it reaches the host: not even the way back."""

    def kill(begun: str) -> None:
        if begun == "observe" or "observe" in on_linear.ops[:-1]:
            raise Killed

    on_linear.hook = kill
    with pytest.raises(Killed):
        deploy(on_linear, TREE, tmp_path)
    assert on_linear.runs() == on_linear.current["a"] != on_linear.states["a"]["proven"]
    on_linear.hook, on_linear.held = lambda _op: None, None
    on_linear.invariants()
    outcome = deploy(on_linear, TREE, tmp_path)
    assert outcome.status in (Status.DEPLOYED, Status.UNCHANGED)
    assert on_linear.states["a"]["proven"] == on_linear.runs() == outcome.release


def test_unproven_release_that_turns_out_sick_goes_back_to_the_last_good_one(
    on_linear: FakeHost, tmp_path: Path
) -> None:
    good = on_linear.current["a"]
    on_linear.faults["tree"] = "hung-completion"
    on_linear.fail["take_back"] = UnreachableError("gone", "h1")
    assert deploy(on_linear, TREE, tmp_path).code is ExitCode.NOT_ROLLED_BACK
    on_linear.fail.clear()
    outcome = deploy(on_linear, TREE, tmp_path)
    assert outcome.code is ExitCode.ROLLED_BACK
    assert on_linear.runs() == on_linear.current["a"] == good


def test_locked_host_says_who_or_is_waited_for(on_linear: FakeHost, tmp_path: Path) -> None:
    on_linear.held = {"owner": "eve@laptop", "purpose": "deploy a"}
    outcome = deploy(on_linear, TREE, tmp_path)
    assert (outcome.status, outcome.code) == (Status.LOCKED, ExitCode.LOCKED)
    assert outcome.error is not None
    assert "eve@laptop" in outcome.error.found

    def free(begun: str) -> None:
        if on_linear.clock.now > 100 and begun == "lock":
            on_linear.held = None

    on_linear.hook, on_linear.clock.now = free, 95.0
    assert deploy(on_linear, TREE, tmp_path, lock_wait_s=30.0).status is Status.DEPLOYED


def test_second_terminal_finds_the_work_done(on_linear: FakeHost, tmp_path: Path) -> None:
    """While it waits for the lock, the other one deploys the same release."""
    first = deployer(on_linear, tmp=tmp_path)
    done: list[Outcome] = []

    def other(begun: str) -> None:
        if begun == "lock" and not done:
            done.append(Outcome("h1", "a", Status.NOT_BEGUN))
            done[0] = first.run([(host_of(TREE), [TREE])])[0]

    on_linear.hook = other
    outcome = deploy(on_linear, TREE, tmp_path)
    assert done[0].status is Status.DEPLOYED
    assert outcome.status is Status.UNCHANGED
    assert on_linear.starts == 2


def test_port_of_a_stranger_is_refused_before_anything_is_touched(tmp_path: Path) -> None:
    fake = FakeHost(strangers={30000: "nginx"})
    outcome = deploy(fake, LINEAR, tmp_path)
    assert outcome.code is ExitCode.REFUSED
    assert outcome.error is not None
    assert outcome.error.found == "port 30000 is taken by nginx (pid 7)"
    assert fake.ops == ["facts"]


def test_what_a_look_at_the_host_refuses_is_never_begun(on_linear: FakeHost, tmp_path: Path) -> None:
    """The doctor's red finding before a restart: nothing is locked, nothing changed; a no-op deploy is not examined."""

    def red(_connection: object, settings: Settings) -> list[str]:
        raise RefusedError(f"GPU of {settings.instance} does not work", "here:tree", "it hangs", "nvidia-smi")

    outcome = deploy(on_linear, TREE, tmp_path, examine=red)
    assert outcome.code is ExitCode.REFUSED
    assert on_linear.ops == ["facts"]
    assert deploy(on_linear, LINEAR, tmp_path, examine=red).status is Status.UNCHANGED


def test_one_host_that_is_gone_does_not_hide_another(tmp_path: Path) -> None:
    one, two = FakeHost("h1"), FakeHost("h2", reachable=False)
    hosts = [(host_of(LINEAR, name=name), [LINEAR]) for name in ("h1", "h2")]
    outcomes = deployer(one, two, tmp=tmp_path).run(hosts)
    assert [outcome.status for outcome in outcomes] == [Status.DEPLOYED, Status.UNREACHABLE]
    assert worst(outcomes) is ExitCode.UNREACHABLE
    assert two.clock.slept == []  # a host that never answered is not waited for


def test_instances_of_one_host_are_deployed_in_sequence(tmp_path: Path) -> None:
    fake = FakeHost(faults={"tree": "crash"})
    a, b = settings("a"), settings("b", mode=Mode.TREE, gpus=(1,), port=30001)
    host = host_of(a, b)
    outcomes = deployer(fake, tmp=tmp_path).run([(host, [b, a])])
    assert [outcome.status for outcome in outcomes] == [Status.ROLLED_BACK, Status.DEPLOYED]
    assert fake.current == {"a": outcomes[1].release, "b": None}


def test_bug_on_one_host_is_its_own_result(tmp_path: Path) -> None:
    fake = FakeHost(fail={"facts": ZeroDivisionError("oops")})
    outcome = deploy(fake, LINEAR, tmp_path)
    assert outcome.code is ExitCode.BUG
    assert outcome.error is not None
    assert "ZeroDivisionError" in outcome.error.found


def test_kept_plan_is_refused_on_a_host_that_moved(on_linear: FakeHost, tmp_path: Path) -> None:
    run = deployer(on_linear, tmp=tmp_path)
    connection = run.connect(host_of(TREE))
    _, _, kept = run.look(connection, TREE)
    assert kept.effect is Effect.RELOAD_RESTART
    assert "+ExecStart=tree" in kept.unit_diff
    assert [change.setting for change in kept.settings_diff] == ["mode", "budget"]
    other = settings(mode=Mode.TREE, budget=8)
    assert deploy(on_linear, other, tmp_path).status is Status.DEPLOYED
    outcome = deploy(on_linear, TREE, tmp_path, kept={"h1:a": kept})
    assert outcome.code is ExitCode.MOVED
    assert outcome.error is not None
    assert "changed since the plan was made" in outcome.error.found


def test_kept_plan_is_carried_out_on_a_host_that_did_not(on_linear: FakeHost, tmp_path: Path) -> None:
    run = deployer(on_linear, tmp=tmp_path)
    facts, release, kept = run.look(run.connect(host_of(TREE)), TREE)
    require_unmoved(kept, make_plan(release, facts, engine_size=0))
    assert deploy(on_linear, TREE, tmp_path, kept={"h1:a": kept}).status is Status.DEPLOYED


def test_sick_server_that_is_already_the_wanted_one_is_no_success(on_linear: FakeHost, tmp_path: Path) -> None:
    on_linear.server["a"].fault = "hung-completion"  # type: ignore[union-attr]
    outcome = deploy(on_linear, LINEAR, tmp_path)
    assert outcome.code is ExitCode.NOT_ROLLED_BACK
    assert outcome.error is not None
    assert outcome.error.next == "ddtree-ops deploy h1:a --restart"
    assert on_linear.starts == 1


def test_phase_and_time_left_are_shown_while_it_loads(tmp_path: Path) -> None:
    events: list[Event] = []
    deploy(FakeHost(), LINEAR, tmp_path, events=events)
    shown = [event for event in events if event.kind is Kind.PROGRESS and event.step == "health"]
    assert shown[0].line == "loading weights"
    assert 55 < (shown[0].left_s or 0) <= 60


def test_long_load_keeps_the_lock(tmp_path: Path) -> None:
    fake, wanted = FakeHost(faults={"linear": "hang"}), settings(start_timeout_s=300)
    deploy(fake, wanted, tmp_path)
    assert fake.ops.count("renew") >= 6


def test_errors_name_a_next_command(on_linear: FakeHost, tmp_path: Path) -> None:
    for fault in ("crash", "hang"):
        on_linear.faults["tree"] = fault
        error = deploy(on_linear, TREE, tmp_path).error
        assert isinstance(error, DdtreeError)
        assert error.found
        assert error.why
        assert error.next
        assert error.host == "h1:a"


ARMED = Options(arm=True)


def test_host_is_armed_before_anything_changes_and_disarmed_before_it_is_proven(
    on_linear: FakeHost, tmp_path: Path
) -> None:
    assert deploy(on_linear, TREE, tmp_path, options=ARMED).status is Status.DEPLOYED
    ops = on_linear.ops
    assert ops.index("arm") < ops.index("switch") < ops.index("complete") < ops.index("confirm") < ops.index("record")
    assert on_linear.armed == {}


@pytest.mark.parametrize("fault", ["crash", "hang"])
def test_a_deploy_that_we_take_back_disarms_the_host(on_linear: FakeHost, tmp_path: Path, fault: str) -> None:
    on_linear.faults["tree"] = fault
    assert deploy(on_linear, TREE, tmp_path, options=ARMED).code is ExitCode.ROLLED_BACK
    assert on_linear.armed == {}
    assert on_linear.ops.index("take_back") < on_linear.ops.index("confirm")


HELD = Options(arm=True, hold=True, restart=True)


def test_a_switch_that_is_held_outlasts_the_deploy_and_goes_off_with_the_way_back(
    on_linear: FakeHost, tmp_path: Path
) -> None:
    before = on_linear.current["a"]
    assert deploy(on_linear, TREE, tmp_path, options=HELD).status is Status.DEPLOYED
    assert on_linear.armed["a"]["to"] == before
    assert deploy(on_linear, LINEAR, tmp_path, options=ARMED).status is Status.DEPLOYED
    assert on_linear.current["a"] == before
    assert on_linear.armed == {}


def test_a_switch_that_is_held_goes_off_when_the_deploy_itself_goes_all_the_way_back(
    on_linear: FakeHost, tmp_path: Path
) -> None:
    on_linear.faults["tree"] = "crash"
    assert deploy(on_linear, TREE, tmp_path, options=HELD).code is ExitCode.ROLLED_BACK
    assert on_linear.armed == {}


def test_a_switch_that_is_held_stays_when_the_deploy_goes_back_a_part_of_the_way(
    on_linear: FakeHost, tmp_path: Path
) -> None:
    """As after a baseline: the host still returns to what was there before that."""
    before = on_linear.current["a"]
    first = settings(context_length=1024)
    assert deploy(on_linear, first, tmp_path, options=HELD).status is Status.DEPLOYED
    between = on_linear.current["a"]
    on_linear.faults["tree"] = "crash"
    assert deploy(on_linear, TREE, tmp_path, options=HELD).code is ExitCode.ROLLED_BACK
    assert on_linear.current["a"] == between != before
    assert on_linear.armed["a"]["to"] == before


def test_a_long_load_moves_the_deadline_ahead(tmp_path: Path) -> None:
    fake, wanted = FakeHost(faults={"linear": "hang"}), settings(start_timeout_s=300)
    deploy(fake, wanted, tmp_path, options=ARMED, dead_man_s=60.0)
    assert fake.ops.count("arm") >= 10


@pytest.mark.parametrize("away_s", [200, 30])
def test_host_that_takes_back_by_itself_while_we_cannot_reach_it(
    on_linear: FakeHost, tmp_path: Path, away_s: int
) -> None:
    """Away for longer than the switch waits: the host is back on its own, and the deploy says so with exit code 5."""
    before, cut = on_linear.current["a"], []

    def away(begun: str) -> None:
        if begun == "observe" and not cut:
            cut.append(on_linear.clock.now)
        on_linear.reachable = not cut or on_linear.clock.now > cut[0] + away_s
        armed = on_linear.armed.get("a")
        if armed and on_linear.clock.time() > armed["deadline"]:
            on_linear.expire("a")

    on_linear.hook = away
    on_linear.faults["tree"] = "hang"
    outcome = deploy(on_linear, TREE, tmp_path, options=ARMED, dead_man_s=20.0, lock_wait_s=0.0)
    assert on_linear.runs() == on_linear.current["a"] == before
    if away_s == 30:
        assert outcome.code is ExitCode.ROLLED_BACK
        assert outcome.error is not None
        assert "the host took it back by itself" in outcome.error.found
    else:  # still away when our patience ends: what we know is said, and where to look
        assert outcome.code is ExitCode.NOT_ROLLED_BACK
        assert outcome.error is not None
        assert "take the release back by itself" in outcome.error.why
        assert outcome.error.next == "ddtree-ops status h1:a"


def test_every_outcome_reaches_the_operators_log(on_linear: FakeHost, tmp_path: Path) -> None:
    on_linear.faults["tree"] = "crash"
    kept: list[Outcome] = []
    run = deployer(on_linear, tmp=tmp_path, audit=kept.append)
    for wanted in (LINEAR, TREE):
        run.run([(host_of(wanted), [wanted])])
    on_linear.reachable = False
    run.run([(host_of(LINEAR), [LINEAR])])
    assert [outcome.status for outcome in kept] == [Status.UNCHANGED, Status.ROLLED_BACK, Status.UNREACHABLE]


@dataclass
class Asking:
    """A way to stop and start that looks for an interruption while it waits, as a router's does."""

    work: Work
    undone: list[str]

    def do(self) -> str:
        return ""

    def undo(self) -> str:
        self.work.alive()
        self.undone.append("drain")
        return ""

    def put_in(self) -> str:
        return ""

    def take_out(self) -> str:
        return ""


def test_the_way_back_of_an_interrupted_deploy_is_not_interrupted(on_linear: FakeHost, tmp_path: Path) -> None:
    before, token, undone = on_linear.current["a"], Token(), list[str]()

    def interrupt(op: str) -> None:
        if op == "systemctl restart":
            token.set("SIGINT")

    on_linear.hook = interrupt
    run = deployer(
        on_linear,
        tmp=tmp_path,
        token=token,
        draining=lambda work: Asking(work, undone),
        options=Options(arm=True),
    )
    outcome = run.run([(host_of(TREE), [TREE])])[0]
    assert (outcome.status, undone) == (Status.INTERRUPTED, ["drain"])
    assert on_linear.armed == {}
    assert on_linear.runs() == before
