"""Taking an instance through its gates: order, what is measured how often, what is kept, what a failure says."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from ddtree_ops.clock import FakeClock
from ddtree_ops.errors import ExitCode, UsageError
from ddtree_ops.facts.server import parse_server_info
from ddtree_ops.facts.unit import UnitState
from ddtree_ops.gates.attest import asked_flags
from ddtree_ops.gates.result import NAMES, GateError, Verdict
from ddtree_ops.gates.run import Subject, checked_skips, prove
from ddtree_ops.health import Completion, Listener, Observation
from ddtree_ops.model import GateSettings, Mode, Settings
from ddtree_ops.render import server_argv

RELEASE = "0123456789abcdef"
GATES = GateSettings(concurrencies=(1, 8), prompts=8, tokens=16)
SPEED = {Mode.AR: 50.0, Mode.LINEAR: 100.0, Mode.SHADOW_LINEAR: 95.0, Mode.TREE: 125.0}


@dataclass
class Server:
    """A server and its host, as the gates see them: both the probe and the helper."""

    settings: Settings
    clock: FakeClock
    baselines: dict[str, Any] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    speed: Mapping[Mode, float] = field(default_factory=lambda: SPEED)
    shift: int = 0
    restarts: int = 0
    fails_after: float = float("inf")
    accept: float = 4.0

    def observe(self) -> Observation:
        told = {
            k: int(v) if str(v).isdigit() else v for k, v in asked_flags(server_argv(self.settings, RELEASE)).items()
        }
        block = {"mode": self.settings.mode.value, "budget": self.settings.budget, "topk_cap": self.settings.topk_cap}
        told["internal_states"] = [{"ddtree": block} if self.settings.mode.speculates else {}]
        if not self.settings.mode.speculates:
            told["speculative_algorithm"] = None

        up = self.clock.now < self.fails_after
        return Observation(
            unit=UnitState(active="active" if up else "failed", sub="running" if up else "failed", invocation="i"),
            listener=Listener(7, "python", True),
            ready=200,
            release=RELEASE,
            resolved=parse_server_info(json.dumps(told)),
        )

    def complete(self, tokens: int, deadline_s: float) -> Completion:
        self.asked.append("complete")
        assert deadline_s > 0
        return Completion(tokens, RELEASE, seconds=0.1)

    def call(
        self, op: str, args: Mapping[str, Any] | None = None, *, deadline_s: float = 30.0, on_event: Any = None
    ) -> dict[str, Any]:
        args = dict(args or {})
        if op == "baseline":
            return {"value": self.baselines.get(args["key"])}
        if op == "keep_baseline":
            self.baselines[args["key"]] = args["value"]
            return {}
        assert op == "load"
        assert deadline_s > 60
        on_event({"event": "progress", "done": 3, "of": 16})
        gaps = "return_logprob" in args["bodies"][0]
        count = len(args["bodies"])
        self.asked.append(f"load {count} x {args['concurrency']}{' with gaps' if gaps else ''}")
        return {"concurrency": args["concurrency"], "wall_s": 1.0, "replies": [
            {"body": body, "round": turn, "seconds": (1 + body / 10) * 16 / self.speed[self.settings.mode],
             "tokens": [token + self.shift for token in range(16)], "accept_length": self.accept,
             **({"gaps": [2.0] * 16} if gaps else {})}
            for turn in range(args["rounds"]) for body in range(count)
        ]}  # fmt: skip


def server(mode: Mode, baselines: dict[str, Any] | None = None, **changes: Any) -> Server:
    settings = Settings(
        instance="a", mode=mode, gpus=(0,), port=1, model="/m", drafter="/d" if mode.speculates else None
    )
    return Server(settings, FakeClock(), baselines if baselines is not None else {}, **changes)


def subject(made: Server, gates: GateSettings | None = GATES, **changes: Any) -> Subject:
    return Subject(
        target="h:a", settings=made.settings, release=RELEASE, engine="e", gates=gates, probe=made, call=made.call,
        clock=made.clock, check=lambda: None, say=lambda _line: None, **changes,
    )  # fmt: skip


def verdicts(made: Server, gates: GateSettings | None = GATES, **changes: Any) -> list[str]:
    return [str(result.verdict) for result in prove(subject(made, gates, **changes)).values()]


def linear_baseline() -> dict[str, Any]:
    made = server(Mode.LINEAR)
    prove(subject(made))
    return made.baselines


def test_without_declared_gates_nothing_is_measured() -> None:
    made = server(Mode.TREE)
    assert verdicts(made, None) == ["passed"] * 3 + ["skipped"] * 3
    assert made.asked == ["complete"]


def test_linear_is_measured_and_kept() -> None:
    made = server(Mode.LINEAR)
    results = prove(subject(made))
    assert list(results) == list(NAMES)
    assert [str(result.verdict) for result in results.values()] == ["passed"] * 3 + ["skipped"] * 3
    assert made.asked == ["complete", "load 8 x 1", "load 8 x 8"]
    [kept] = made.baselines.values()
    assert kept["facts"]["kind"] == "linear"
    assert [run["concurrency"] for run in kept["runs"]] == [1, 8]


def test_a_tree_is_measured_once_for_both_gates() -> None:
    made = server(Mode.TREE, linear_baseline())
    assert verdicts(made) == ["passed"] * 5 + ["skipped"]
    assert made.asked == ["complete", "load 8 x 1", "load 8 x 8"]
    assert len(made.baselines) == 1  # a tree is never a baseline


def test_shadow_linear_is_compared_in_answers_only() -> None:
    assert verdicts(server(Mode.SHADOW_LINEAR, linear_baseline())) == ["passed"] * 4 + ["skipped"] * 2


def test_ar_is_kept_with_its_gaps_which_make_a_single_parting_a_failure() -> None:
    baselines = linear_baseline()
    ar = server(Mode.AR, baselines)
    prove(subject(ar))
    assert ar.asked[-1] == "load 8 x 1 with gaps"
    assert len(baselines) == 2
    with pytest.raises(GateError, match=r"where the gap was 2\.00"):
        prove(subject(server(Mode.TREE, baselines, shift=1)))


def failure(made: Server, gates: GateSettings = GATES) -> GateError:
    with pytest.raises(GateError) as caught:
        prove(subject(made, gates))
    assert caught.value.host == "h:a"
    assert "--skip-gate" in caught.value.next
    return caught.value


def test_a_failure_names_its_gate_and_keeps_what_was_shown() -> None:
    error = failure(server(Mode.TREE, linear_baseline(), speed=SPEED | {Mode.TREE: 80.0}))
    assert error.data["gate"] == "throughput"
    assert error.found.startswith("gate throughput failed: slower than linear at 1 stream: 0.80 times")
    assert list(error.data["gates"]) == ["identity", "attest", "completion", "lossless", "throughput"]


def test_no_baseline_is_no_proof() -> None:
    error = failure(server(Mode.TREE))
    assert error.found.startswith("gate lossless could-not-run: no linear baseline")


def test_a_baseline_of_another_engine_does_not_count() -> None:
    made = server(Mode.TREE, linear_baseline())
    with pytest.raises(GateError, match="no linear baseline"):
        prove(Subject(**{**vars(subject(made)), "engine": "other"}))


def test_a_failed_gate_keeps_no_baseline() -> None:
    made = server(Mode.LINEAR, accept=1.0)
    failure(made, GATES.model_copy(update={"soak_s": 10}))
    assert made.baselines == {}


def test_soak_lasts_as_long_as_it_should_and_ends_at_the_first_trouble() -> None:
    soaking = GATES.model_copy(update={"soak_s": 12})
    made = server(Mode.TREE, linear_baseline())
    assert prove(subject(made, soaking))["soak"].line == "healthy for 12 s, accept length 4.00"
    assert made.clock.slept == [5.0, 5.0, 2.0]
    dying = server(Mode.TREE, linear_baseline(), fails_after=4.0)
    assert "after 5 s" in failure(dying, soaking).found
    assert dying.clock.slept == [5.0]


class Interrupted(Exception):
    pass


def test_a_measurement_tells_how_far_it_is_and_can_be_interrupted() -> None:
    lines: list[str] = []
    made = server(Mode.TREE, linear_baseline())
    prove(Subject(**{**vars(subject(made)), "say": lines.append}))
    assert "measuring with 1 stream: 3 of 16 answers" in lines

    def check() -> None:
        if made.asked.count("complete") > 1:
            raise Interrupted

    with pytest.raises(Interrupted):
        prove(Subject(**{**vars(subject(made)), "check": check}))
    assert made.asked.count("load 8 x 1") == 1


def test_skipped_gates_are_not_run() -> None:
    made = server(Mode.TREE)
    skips = checked_skips(["lossless", "throughput"], "measured by hand")
    results = prove(subject(made, skips=skips))
    assert results["throughput"].verdict is Verdict.SKIPPED
    assert results["throughput"].line == "skipped: measured by hand"
    assert made.asked == ["complete"]


@pytest.mark.parametrize(
    ("names", "reason", "found"),
    [
        (["thruput"], "x", "unknown gate 'thruput'. Did you mean 'throughput'?"),
        (["soak"], None, "a gate is skipped without a reason"),
        (["soak"], " ", "a gate is skipped without a reason"),
    ],
)
def test_bad_skips(names: list[str], reason: str | None, found: str) -> None:
    with pytest.raises(UsageError) as caught:
        checked_skips(names, reason)
    assert caught.value.found == found
    assert caught.value.exit_code == ExitCode.USAGE
