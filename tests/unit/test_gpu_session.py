"""The GPU session: which stage runs when, what a run leaves, and that nothing outlives it. No GPU is needed here."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import __main__ as command
from benchmarks.gpu import host, planner, processes
from benchmarks.gpu.judge import Outcome, Verdict
from benchmarks.gpu.planner import Stage
from benchmarks.gpu.run import Session, WallClock
from benchmarks.gpu.stages import Setting, stages

ROOT = Path(__file__).parents[2]


def stage(name: str, takes: float = 10.0, **more: Any) -> Stage:
    values = {"limit_s": 100.0, "estimate_s": takes, "least_s": 5.0, **more}
    return Stage(name, f"why {name}", (name, "{limit}", "{cores}"), **values)


A, B, TIMED, LAST = stage("a"), stage("b", 20), stage("timed", alone=True), stage("last")


def names(found: Sequence[Stage]) -> list[str]:
    return [one.name for one in found]


@pytest.mark.parametrize(
    ("running", "left", "cores", "begun"),
    [
        ([], 100, 2, ["a", "b"]),
        ([], 100, 1, ["a"]),  # one core: one stage at a time
        ([A], 100, 1, []),
        ([TIMED], 100, 8, []),  # nothing beside a stage that times the GPU
        ([], 4, 8, []),  # too little time for any
    ],
)
def test_what_begins(running: list[Stage], left: float, cores: int, begun: list[str]) -> None:
    assert names(planner.startable([A, B, TIMED, LAST], running, left, cores)) == begun


def test_nothing_overtakes_a_stage_that_waits_to_be_alone() -> None:
    assert names(planner.startable([TIMED, LAST], [A], 100, 8)) == []
    assert names(planner.startable([TIMED, LAST], [], 100, 8)) == ["timed"]
    needy = replace(TIMED, least_s=200)  # for which there is too little time: others go on
    assert names(planner.startable([needy, LAST], [A], 100, 8)) == ["last"]


def test_a_stage_that_wants_more_cores_than_there_are_runs_by_itself() -> None:
    wide = stage("wide", cores=16)
    assert names(planner.startable([wide, A], [], 100, 4)) == ["wide"]
    assert names(planner.startable([wide], [A], 100, 4)) == []
    assert planner.free_cores(stage("x", cores=2), [A, B], 8) == 6
    assert planner.free_cores(wide, [], 4) == 16


def test_names_are_checked() -> None:
    assert names(planner.chosen([A, B, LAST], ["b", "last"], ["last"])) == ["b"]
    with pytest.raises(ValueError, match="no stage is called c; there are a, b"):
        planner.chosen([A, B], [], ["c"])


def test_only_judged_stages_of_the_same_sources_are_finished() -> None:
    records = {
        "a": {"status": "green", "sources": "x"}, "b": {"status": "red", "sources": "x"},
        "c": {"status": "cut", "sources": "x"}, "d": {"status": "green", "sources": "old"},
    }  # fmt: skip
    assert planner.finished(records, "x", []) == {"a", "b"}
    assert planner.finished(records, "x", ["b"]) == {"a"}


@dataclass
class Clock:
    at: float = 0.0

    def now(self) -> float:
        return self.at

    def sleep(self, seconds: float) -> None:
        self.at += seconds
        assert self.at < 5000, "the run does not end"


@dataclass
class Fake:
    """A process that ends after ``takes`` seconds of the clock; None: it hangs."""

    clock: Clock
    takes: float | None
    status: int = 0
    stopped: bool = False
    began: float = field(init=False)

    def __post_init__(self) -> None:
        self.began = self.clock.now()

    def poll(self) -> int | None:
        if self.stopped:
            return -15
        return self.status if self.takes is not None and self.clock.now() >= self.began + self.takes else None

    def stop(self) -> None:
        self.stopped = True


@dataclass
class Rig:
    out: Path
    takes: dict[str, float | None] = field(default_factory=dict)
    statuses: dict[str, int] = field(default_factory=dict)
    sources: str = "x"
    clock: Clock = field(default_factory=Clock)
    started: list[tuple[float, list[str]]] = field(default_factory=list)
    running: list[Fake] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    gpus: int = 1

    def session(self) -> Session:
        return Session(self.out, self.out / "work", self.sources, 4, self.start, clock=self.clock,
                       say=self.said.append, judged=self.judged, stamp=lambda: "now", gpus=self.gpus)  # fmt: skip

    def start(self, argv: Sequence[str], folder: Path) -> Fake:
        assert folder.parent == self.out / "work"
        self.started.append((self.clock.now(), list(argv)))
        self.running.append(Fake(self.clock, self.takes.get(argv[0], 10.0), self.statuses.get(argv[0], 0)))
        return self.running[-1]

    @staticmethod
    def judged(name: str, outcome: Outcome) -> Verdict:
        if outcome.late:
            return Verdict("cut", ["late"])
        return Verdict("red" if outcome.status else "green", ["it broke"] * outcome.status, {"of": name})

    def report(self) -> dict[str, Any]:
        return json.loads((self.out / "report.json").read_text())  # type: ignore[no-any-return]

    def statuses_found(self) -> dict[str, str]:
        return {name: record["status"] for name, record in self.report()["stages"].items()}

    def order(self) -> list[str]:
        return [argv[0] for _at, argv in self.started]


def test_a_run_is_in_order_beside_and_alone(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.session().run([A, B, TIMED, LAST], 300)
    began = {argv[0]: at for at, argv in rig.started}
    assert rig.order() == ["a", "b", "timed", "last"]
    assert began["a"] == began["b"] == 0
    assert 10 <= began["timed"] < 12  # when both have ended
    assert began["last"] >= began["timed"] + 10
    assert set(rig.statuses_found().values()) == {"green"}
    assert rig.report()["stages"]["b"]["result"] == {"of": "b"}


def test_limits_and_cores_are_filled_in(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.session().run([A, B], 60)
    assert [argv for _at, argv in rig.started] == [["a", "40", "3"], ["b", "40", "3"]]


def test_a_crash_and_a_hang_stop_no_other_stage(tmp_path: Path) -> None:
    rig = Rig(tmp_path, takes={"b": None}, statuses={"a": 1})
    rig.session().run([A, replace(B, limit_s=30), TIMED, LAST], 300)
    assert rig.statuses_found() == {"a": "red", "b": "cut", "timed": "green", "last": "green"}
    assert rig.report()["stages"]["a"]["reasons"] == ["it broke"]
    assert all(fake.stopped == (fake.takes is None) for fake in rig.running)
    assert 30 <= rig.report()["stages"]["b"]["seconds"] < 32


def test_the_total_limit_ends_what_runs_and_says_what_was_left_out(tmp_path: Path) -> None:
    rig = Rig(tmp_path, takes={"a": 10.0, "timed": None})
    rig.session().run([A, TIMED, replace(LAST, least_s=50)], 40)
    assert rig.clock.now() < 42
    assert rig.statuses_found() == {"a": "green", "timed": "cut", "last": "not run"}
    assert "it needs 50" in rig.report()["stages"]["last"]["reasons"][0]


def test_a_second_run_goes_on_where_the_first_stopped(tmp_path: Path) -> None:
    first = Rig(tmp_path, takes={"timed": None}, statuses={"b": 1})
    first.session().run([A, B, TIMED, LAST], 40)
    second = Rig(tmp_path)
    second.session().run([A, B, TIMED, LAST], 300)
    assert second.order() == ["timed", "last"]
    assert second.statuses_found() == {"a": "green", "b": "red", "timed": "green", "last": "green"}
    again = Rig(tmp_path)
    again.session().run([A, B, TIMED, LAST], 300, again=["b"])
    assert again.order() == ["b"]
    changed = Rig(tmp_path, sources="y")
    changed.session().run([A, B], 300)
    assert changed.order() == ["a", "b"]


def test_what_an_earlier_run_had_of_a_stage_stays_when_there_is_no_time(tmp_path: Path) -> None:
    Rig(tmp_path, takes={"a": None}).session().run([A], 30)
    rig = Rig(tmp_path)
    rig.session().run([A], 3)
    assert rig.statuses_found() == {"a": "cut"}


@pytest.mark.parametrize(("gpus", "seen"), [(0, "none"), (1, "1"), (2, None)])
def test_what_needs_two_gpus_is_left_out_on_a_host_with_one(tmp_path: Path, gpus: int, seen: str | None) -> None:
    rig = Rig(tmp_path, gpus=gpus)
    wide = replace(TIMED, name="wide", argv=("wide", "{limit}"), gpus=2)
    rig.session().run([wide, A, LAST], 300)
    if seen is None:
        assert rig.statuses_found() == {"wide": "green", "a": "green", "last": "green"}
        return
    assert rig.statuses_found() == {"wide": "not run", "a": "green", "last": "green"}
    assert rig.report()["stages"]["wide"]["reasons"] == [f"needs two GPUs, and {seen} is visible here"]
    assert {argv[0]: at for at, argv in rig.started} == {"a": 0, "last": 0}  # nothing waits for it
    later = Rig(tmp_path, gpus=2)
    later.session().run([wide, A, LAST], 300)
    assert later.order() == ["wide"]
    again = Rig(tmp_path, gpus=gpus)
    again.session().run([wide, A, LAST], 300)
    assert again.statuses_found()["wide"] == "green"  # what a host with two has shown stays


@pytest.mark.parametrize(
    ("statuses", "gpus", "wanted"),
    [
        ({"a": "green", "wide": "not run"}, 1, 0),
        ({"a": "green", "wide": "not run"}, 2, 3),
        ({"a": "green", "wide": "red"}, 2, 1),
        ({"a": "cut", "wide": "not run"}, 1, 3),
    ],
)
def test_the_exit_status_is_about_what_the_host_can_run(
    tmp_path: Path, statuses: dict[str, str], gpus: int, wanted: int
) -> None:
    session, wide = Rig(tmp_path, gpus=gpus).session(), replace(TIMED, name="wide", gpus=2)
    session.report["stages"] = {name: {"status": status} for name, status in statuses.items()}
    assert command.status(session, [A, wide]) == wanted
    assert command.status(session, [wide]) == {"green": 0, "red": 1, "not run": 3}[statuses["wide"]]


def test_an_interruption_ends_what_runs_and_keeps_what_ended(tmp_path: Path) -> None:
    rig = Rig(tmp_path, takes={"b": None})

    class Interrupted(Clock):
        def sleep(self, seconds: float) -> None:
            super().sleep(seconds)
            if self.at > 20:
                raise SystemExit(143)

    rig.clock = Interrupted()
    with pytest.raises(SystemExit):
        rig.session().run([A, B], 300)
    assert rig.statuses_found() == {"a": "green", "b": "cut"}
    assert [fake.stopped for fake in rig.running] == [False, True]


def test_a_damaged_report_is_set_aside(tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text('{"schema": 1, "sta')
    rig = Rig(tmp_path)
    rig.session().run([A], 100)
    assert rig.statuses_found() == {"a": "green"}
    assert (tmp_path / "report.damaged").exists()


def test_five_calls_of_ten_minutes_bring_all_that_matters() -> None:
    """By the estimates; each call keeps something back for the archives."""
    waiting, left_out = stages(Setting("python", Path("/w"), 16)), ["costs-of-eight", "suite-tests"]
    waiting = [one for one in waiting if one.gpus == 1]
    for _call in range(5):
        planned = planner.foresee(waiting, 560 - command.PACK_S, 16)
        ran = {
            one.name for one, begins, ends in planned if ends and begins is not None and ends - begins >= one.estimate_s
        }
        waiting = [one for one in waiting if one.name not in ran]
    assert set(names(waiting)) <= {*left_out, "parity-rest", "parity-long"}


def test_all_of_two_gpus_fits_one_call_of_ten_minutes() -> None:
    """By the estimates, and by the limits as well: the table still has its time when all before it are late."""
    cores, limit_s = 32, 560 - command.PACK_S
    wide = [one for one in stages(Setting("python", Path("/w"), cores)) if one.gpus == 2 or one.name == "host"]
    assert names(wide) == ["host", "parity-two", "selftest-two", "selftest-two-records", "pair-two"]
    for one, begins, ends in planner.foresee(wide, limit_s, cores):
        assert begins is not None
        assert ends is not None
        assert ends - begins == one.estimate_s
    *before, table = wide
    assert table.alone
    assert sum(one.cores for one in before) <= cores  # all at once
    assert max(one.limit_s for one in before) + table.estimate_s <= limit_s


def test_every_stage_of_two_gpus_shares_models_and_sums_by_nccl() -> None:
    for one in (one for one in stages(Setting("python", Path("/w"), 32)) if one.gpus == 2):
        if one.name != "pair-two":  # whose arms are spread by itself
            assert " ".join(one.argv).count("--tp 2 --nccl-only") == 1


def test_no_stage_uses_multicast_whatever_the_caller_has(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, off in command.NO_MULTICAST.items():
        monkeypatch.setenv(name, str(1 - int(off)))
    assert command.NO_MULTICAST.items() <= command.environment(Path("/w/site")).items()
    page = (ROOT / "docs/engine.md").read_text()
    assert all(f"`{name}={off}`" in page for name, off in command.NO_MULTICAST.items())


@pytest.mark.parametrize(
    ("named", "count"), [(None, 2), ("0", 1), ("1,0", 2), ("", 0), ("0,-1,1", 1), ("0,1,2,3", 2), ("GPU-a, GPU-b", 2)]
)
def test_gpus_are_those_that_are_listed_and_visible(named: str | None, count: int) -> None:
    environ = {} if named is None else {"CUDA_VISIBLE_DEVICES": named}
    assert host.gpu_count(environ, ["NVIDIA H200, 580", "NVIDIA H200, 580"]) == count
    assert host.gpu_count(environ, []) == 0


def test_a_tool_that_is_missing_or_fails_lists_nothing() -> None:
    assert host.smi(("no-such-tool-here",)) == []
    assert host.smi((sys.executable, "-c", "raise SystemExit(1)")) == []
    assert host.smi((sys.executable, "-c", "print(' GPU 0 ')")) == ["GPU 0"]


def test_every_stage_has_a_judge_and_a_place_of_its_own() -> None:
    from benchmarks.gpu.judge import JUDGES

    found = stages(Setting("python", Path("/w"), 16))
    assert {one.name for one in found} == set(JUDGES)
    assert all(one.least_s <= one.estimate_s <= one.limit_s for one in found)
    for one in found:
        files = [word for word in one.argv if word.endswith(".py")]
        assert all((ROOT / file).is_file() for file in files)
        assert any(word.startswith((f"/w/{one.name}", f"--junitxml=/w/{one.name}/")) for word in one.argv)


def test_the_documentation_lists_every_stage() -> None:
    text = (ROOT / "docs/engine.md").read_text().split("### What is not shown yet")[1].split("\n### ")[0]
    cells = [line.split(" | ")[0] for line in text.splitlines() if line.startswith("| `")]
    listed = [name for cell in cells for name in re.findall(r"`([a-z-]+)`", cell)]
    known = names(stages(Setting("python", Path("/w"), 16)))
    assert sorted(listed) == sorted(known)


HANGS = """
import os, subprocess, sys, time
# a grandchild in a session of its own, as servers and arms are
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
open(sys.argv[1], "w").write(str(child.pid))
print("working", flush=True)
time.sleep(600)
"""


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False


class UntilWorking(WallClock):
    """Real time, and far more of it as soon as ``log`` says that its stage works: how fast that comes is no matter."""

    def __init__(self, log: Path) -> None:
        self._log = log

    def now(self) -> float:
        working = self._log.exists() and "working" in self._log.read_text()
        return super().now() + 10_000.0 * working


def real(tmp_path: Path, programs: dict[str, str], clock: WallClock) -> Session:
    """A session on real processes; a stage is a small program, of which ``hangs`` has an hour and others have a day."""

    def start(argv: Sequence[str], folder: Path) -> processes.Process:
        program = programs[argv[0]]
        return processes.start([sys.executable, "-c", program, str(tmp_path / "pid")], folder, os.environ, tmp_path)

    said: list[str] = []
    session = Session(tmp_path, tmp_path / "work", "x", 4, start, clock=clock, say=said.append, judged=Rig.judged)
    limits = {name: 3600.0 if name == "hangs" else 86400.0 for name in programs}
    session.run([stage(name, limit_s=limit, least_s=0.1) for name, limit in limits.items()], 200_000)
    return session


def test_a_hanging_stage_is_ended_with_all_it_started_and_a_crash_is_told(tmp_path: Path) -> None:
    programs = {"hangs": HANGS, "crashes": "raise SystemExit('Boom')", "works": "print(1)"}
    session = real(tmp_path, programs, UntilWorking(tmp_path / "work/hangs/log"))
    found = {name: record["status"] for name, record in session.report["stages"].items()}
    assert found == {"hangs": "cut", "crashes": "red", "works": "green"}
    assert "Boom" in (tmp_path / "work/crashes/log").read_text()
    assert "working" in (tmp_path / "work/hangs/log").read_text()
    assert not alive(int((tmp_path / "pid").read_text()))


def test_what_a_stage_leaves_behind_is_ended(tmp_path: Path) -> None:
    leaves = HANGS.replace('print("working", flush=True)\ntime.sleep(600)', "")
    session = real(tmp_path, {"leaves": leaves}, WallClock())
    assert session.report["stages"]["leaves"]["status"] == "green"
    assert not alive(int((tmp_path / "pid").read_text()))


def test_a_dry_run_shows_the_stages_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert (
        command.main(["--out", str(out), "--dry-run", "--cores", "16", "--limit-s", "540", "--skip", "sanitizer"]) == 0
    )
    shown = capsys.readouterr().out
    assert "parity " in shown
    assert "alone" in shown
    assert "sanitizer" not in shown
    assert not out.exists()


@pytest.mark.parametrize("gpus", ["1", "2"])
def test_one_option_runs_what_needs_two_gpus(tmp_path: Path, capsys: pytest.CaptureFixture[str], gpus: str) -> None:
    argv = [
        "--out",
        str(tmp_path / "out"),
        "--dry-run",
        "--two-gpus",
        "--gpus",
        gpus,
        "--cores",
        "32",
        "--limit-s",
        "560",
    ]
    assert command.main(argv) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.startswith("stage ")
    begins = {line.split()[0]: line.split()[2] for line in lines}
    assert list(begins) == ["host", "parity-two", "selftest-two", "selftest-two-records", "pair-two"]
    assert all((at == "-") == (gpus == "1") for name, at in begins.items() if name != "host")
    assert ("needs two GPUs, and 1 is visible here" in lines[-1]) == (gpus == "1")


def test_a_wrong_name_and_a_host_without_sglang_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert command.main(["--out", str(tmp_path), "--only", "speed"]) == 2
    assert "no stage is called speed; there are host" in capsys.readouterr().err
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    assert command.main(["--out", str(tmp_path), "--only", "host"]) == 2
    assert "this Python has no sglang" in capsys.readouterr().err


def test_stages_see_the_overlay_first_and_this_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/opt/host")
    found = command.environment(Path("/w/site"))
    first, *_, last = found["PYTHONPATH"].split(os.pathsep)
    assert (first, last) == ("/w/site", "/opt/host")
    assert found["PATH"].split(os.pathsep)[0] == str(Path(sys.executable).parent)


def test_the_digest_follows_the_sources(tmp_path: Path) -> None:
    for folder in command.SOURCES:
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "patches/a.py").write_text("1")
    first = command.digest(tmp_path)
    (tmp_path / "patches/a.md").write_text("words")
    assert command.digest(tmp_path) == first
    (tmp_path / "patches/a.py").write_text("2")
    assert command.digest(tmp_path) != first
