"""What each gate concludes from measured data."""

from __future__ import annotations

import random
from typing import Any

import pytest

from ddtree_ops.gates import attest, baseline, lossless, measure, soak, throughput
from ddtree_ops.gates.attest import asked_flags
from ddtree_ops.gates.measure import Measurement, Run, Sample
from ddtree_ops.gates.prompts import prompt_set, prompts
from ddtree_ops.gates.result import Verdict
from ddtree_ops.gates.stats import more_often, speedup_bounds
from ddtree_ops.model import GateSettings, Mode, Settings
from ddtree_ops.render import server_argv

RELEASE = "0123456789abcdef"
SETTINGS = Settings(
    instance="a", mode=Mode.TREE, gpus=(0,), port=30000, model="/m", drafter="/d", budget=32, topk_cap=4
)
TOKENS = tuple(range(64))


def run(concurrency: int, seconds: list[float], tokens: Any = TOKENS, gaps: Any = None, rounds: int = 2) -> Run:
    samples = tuple(
        Sample(prompt, value, tokens(prompt, turn) if callable(tokens) else tokens, 3.0, gaps)
        for turn in range(rounds)
        for prompt, value in enumerate(seconds)
    )
    return Run(concurrency, sum(seconds) * rounds / concurrency, samples)


# -- statistics


def test_bounds_hold_the_truth_as_often_as_promised() -> None:
    """True speedup 1.1 under noise: the one-sided 95 % lower bound lies above it in about one experiment of twenty."""
    dice = random.Random(1)
    above = 0
    for _ in range(200):
        hard = [dice.uniform(0.5, 2.0) for _ in range(16)]
        base = [value * dice.gauss(1, 0.05) for value in hard]
        new = [value / 1.1 * dice.gauss(1, 0.05) for value in hard]
        above += speedup_bounds(base, new)[0] > 1.1
    assert 2 <= above <= 24


def test_bounds_of_unequal_arms_are_refused() -> None:
    with pytest.raises(ValueError):
        speedup_bounds([1.0], [1.0, 2.0])


@pytest.mark.parametrize(
    ("table", "p"),
    [((3, 16, 3, 16), 0.6668), ((16, 16, 0, 16), 1.66e-9), ((0, 16, 0, 16), 1.0), ((11, 16, 3, 16), 0.0056)],
)
def test_fisher_agrees_with_tables(table: tuple[int, int, int, int], p: float) -> None:
    assert more_often(*table) == pytest.approx(p, rel=0.05)


# -- throughput


def linear() -> Measurement:
    return Measurement((run(1, [1.0, 1.5, 2.0, 1.2] * 4), run(8, [2.0, 3.0, 4.0, 2.4] * 4)))


def tree(one: float, eight: float) -> Measurement:
    dice = random.Random(2)

    def times(factor: float, base: list[float]) -> list[float]:
        return [value / factor * dice.gauss(1, 0.03) for value in base * 4]

    return Measurement((run(1, times(one, [1.0, 1.5, 2.0, 1.2])), run(8, times(eight, [2.0, 3.0, 4.0, 2.4]))))


GATES = GateSettings(concurrencies=(1, 8), tokens=64)


def test_a_faster_tree_passes_with_its_figures() -> None:
    result = throughput.judge(GATES, linear(), tree(1.3, 1.2))
    assert result.verdict is Verdict.PASSED
    first, second = result.evidence["runs"]
    assert 1.25 < first["lower"] < first["speedup"] < first["upper"] < 1.35
    assert second["concurrency"] == 8
    assert "times linear at 1 stream" in result.line


def test_faster_alone_and_slower_together_fails_and_says_where() -> None:
    result = throughput.judge(GATES, linear(), tree(1.3, 0.8))
    assert result.verdict is Verdict.FAILED
    assert result.line.startswith("slower than linear at 8 streams: 0.8")


def test_equal_speed_is_not_surely_faster() -> None:
    result = throughput.judge(GATES, linear(), tree(1.0, 1.0))
    assert result.verdict is Verdict.FAILED
    assert "not surely 1.00 times linear" in result.line


def test_a_demanded_speedup_counts() -> None:
    wanted = GateSettings(concurrencies=(1,), min_speedup=1.25)
    assert throughput.judge(wanted, linear(), tree(1.4, 1)).verdict is Verdict.PASSED
    assert throughput.judge(wanted, linear(), tree(1.2, 1)).verdict is Verdict.FAILED


def test_failed_requests_fail_the_gate() -> None:
    broken = Measurement((Run(1, 1.0, (), ("prompt 3: HTTP 500",)), run(8, [1.0] * 4)))
    assert throughput.judge(GATES, linear(), broken).line == "prompt 3: HTTP 500"


def test_a_concurrency_without_a_baseline_could_not_run() -> None:
    result = throughput.judge(GateSettings(concurrencies=(2,)), linear(), tree(2, 2))
    assert result.verdict is Verdict.COULD_NOT_RUN
    assert result.line == "the baseline was not measured at 2 streams"


# -- lossless


def answers(parting: dict[int, int]) -> Any:
    """Tokens of prompt p, which differ from the reference from ``parting[p]`` on."""

    def tokens(prompt: int, _turn: int) -> tuple[int, ...]:
        at = parting.get(prompt, len(TOKENS))
        return (*TOKENS[:at], *(token + 1000 for token in TOKENS[at:]))

    return tokens


def measured(parting: dict[int, int], gaps: Any = None, concurrency: int = 1) -> Run:
    return run(concurrency, [1.0] * 16, answers(parting), gaps)


def calibration(other: dict[int, int], gaps: Any = None, ar: Measurement | None = None) -> lossless.Calibration:
    return lossless.calibrate(Measurement((measured({}, gaps), measured(other, gaps, 4))), ar)


def test_equal_answers_pass() -> None:
    result = lossless.judge(calibration({}), Measurement((measured({}),)))
    assert result.verdict is Verdict.PASSED
    assert result.line == "16 prompts answered as linear did"


def test_parting_as_often_as_linear_does_passes() -> None:
    result = lossless.judge(calibration({1: 20, 2: 30, 3: 40}), Measurement((measured({4: 9, 5: 50, 1: 20, 9: 9}),)))
    assert result.verdict is Verdict.PASSED
    assert result.line.endswith("; 4 part, no more often than linear from itself")


def test_parting_far_more_often_fails_without_any_gap() -> None:
    result = lossless.judge(calibration({1: 20}), Measurement((measured(dict.fromkeys(range(12), 5)),)))
    assert result.verdict is Verdict.FAILED
    assert "12 of 16 prompts part from linear's, which parts from itself on 1 of 16" in result.line


def test_parting_where_the_reference_was_sure_fails_at_once() -> None:
    gaps = (3.0,) * 64
    result = lossless.judge(calibration({}, gaps), Measurement((measured({7: 11}),)))
    assert result.verdict is Verdict.FAILED
    assert result.line == "prompt 7 parts from linear's answer at token 11, where the gap was 3.00"


def test_the_tie_gap_is_calibrated_by_linear_itself() -> None:
    gaps = (0.4,) * 64  # wider than rounding explains, but linear parts from itself there
    assert lossless.judge(calibration({}, gaps), Measurement((measured({7: 11}),))).verdict is Verdict.FAILED
    within = lossless.judge(calibration({3: 8}, gaps), Measurement((measured({7: 11}),)))
    assert within.verdict is Verdict.PASSED
    assert within.line.endswith("; 1 part, at near ties")


def test_gaps_of_an_autoregressive_run_are_used_up_to_where_it_parts() -> None:
    ar = Measurement((measured({7: 20}, (5.0,) * 64),))
    sure = lossless.judge(calibration({}, ar=ar), Measurement((measured({7: 11}),)))
    assert sure.verdict is Verdict.FAILED
    later = lossless.judge(calibration({}, ar=ar), Measurement((measured({7: 40}),)))
    assert later.verdict is Verdict.PASSED  # no gap is known behind token 20, and one parting is not too many


def test_the_fewest_prompts_allowed_can_still_show_a_difference() -> None:
    fewest = 8
    with pytest.raises(ValueError):
        GateSettings(prompts=fewest - 1)
    assert more_often(fewest, fewest, 0, fewest) < lossless.P_VALUE / 10


def test_nothing_to_compare_with_could_not_run() -> None:
    once = lossless.calibrate(Measurement((run(1, [1.0] * 4, rounds=1),)))
    assert lossless.judge(once, Measurement((measured({}),))).verdict is Verdict.COULD_NOT_RUN


# -- attest


KEPT = SETTINGS.model_copy(update={"states": "snapshots"})


def info(**changes: Any) -> dict[str, Any]:
    """What a server says that resolved everything as asked."""
    told: dict[str, Any] = {"version": "0.5.17", "disable_overlap_schedule": False, "disable_cuda_graph": False}
    for name, value in asked_flags(server_argv(SETTINGS, RELEASE)[3:]).items():
        if not name.startswith("speculative_ddtree"):
            told[name] = int(value) if str(value).isdigit() else value
    block = {"mode": "tree", "budget": 32, "topk_cap": 4, "allow_hybrid_unsafe": False, "verify_rows": 33,
             "states": "snapshots"}  # fmt: skip
    told["internal_states"] = [{"ddtree": block, "effective_max_running_requests_per_dp": 16}]
    for key, value in changes.items():
        place = told["internal_states"][0] if key == "effective_max_running_requests_per_dp" else told
        place = block if key in block else place
        place[key] = value
    return told


def test_a_server_that_did_as_asked_passes() -> None:
    result = attest.judge(SETTINGS, RELEASE, info(), ["Load weight end.", "Capture cuda graph begin."])
    assert (result.verdict, result.findings) == (Verdict.PASSED, ())


def test_mode_auto_is_attested_by_its_widths() -> None:
    settings = SETTINGS.model_copy(update={"mode": Mode.AUTO, "widths": (8, 32)})
    block = {"mode": "auto", "budget": 32, "topk_cap": 4, "allow_hybrid_unsafe": False, "verify_rows": 33,
             "states": "snapshots", "widths": ["8", "32", "chain"]}  # fmt: skip
    told = info()
    told["internal_states"][0]["ddtree"] = block
    assert attest.judge(settings, RELEASE, told, []).findings == ()
    kept = settings.model_copy(update={"states": "records"})
    (found,) = attest.judge(kept, RELEASE, told, []).findings
    assert found == "states: asked for records, resolved snapshots"
    block["widths"] = ["8", "16", "chain"]
    (found,) = attest.judge(settings, RELEASE, told, []).findings
    assert found == "widths: asked for ['8', '32', 'chain'], resolved ['8', '16', 'chain']"


@pytest.mark.parametrize(
    ("changes", "finding"),
    [
        ({"budget": 16}, "budget: asked for 32, resolved 16"),
        ({"mode": "linear"}, "mode: asked for tree, resolved linear"),
        ({"topk_cap": 8}, "topk-cap: asked for 4, resolved 8"),
        ({"verify_rows": 16}, "verify-rows: asked for 33, resolved 16"),
        ({"states": "records"}, "states: asked for snapshots, resolved records"),
        ({"speculative_algorithm": "DFLASH"}, "speculative-algorithm: asked for DDTREE, resolved DFLASH"),
        ({"model_path": "/other"}, "model-path: asked for /m, resolved /other"),
        ({"weight_version": "default"}, f"weight-version: asked for {RELEASE}, resolved default"),
        ({"effective_max_running_requests_per_dp": 2}, "max-running-requests: asked for 16, serves 2"),
        ({"disable_overlap_schedule": True}, "overlap: the overlap scheduler is off"),
        ({"disable_cuda_graph": True}, "cuda-graph: CUDA graphs of decoding are off"),
        ({"cuda_graph_config": {"decode": {"backend": "disabled"}}}, "cuda-graph: CUDA graphs of decoding are off"),
        ({"enable_metrics": False}, "enable-metrics: asked for True, resolved False"),
    ],
)
def test_every_value_that_was_not_kept_is_named(changes: dict[str, Any], finding: str) -> None:
    result = attest.judge(KEPT, RELEASE, info(**changes), [])
    assert result.verdict is Verdict.FAILED
    assert finding in result.findings


@pytest.mark.parametrize("states", ["snapshots", "records"])
def test_how_states_are_kept_is_the_engines_choice_where_nobody_said_it(states: str) -> None:
    result = attest.judge(SETTINGS, RELEASE, info(states=states), [])
    assert (result.verdict, result.findings) == (Verdict.PASSED, ())
    assert result.evidence["ddtree"]["states"] == states


LINES = {
    "max-running-requests": "max_running_requests is capped to 2 by the mamba state pool",
    "block-size": "Failed to infer DFLASH block_size from draft model config; defaulting to 16. Error: x",
    "num-steps": "DFLASH only supports speculative_num_steps == 1; overriding speculative_num_steps=3 to 1.",
    "draft-backend": "DFLASH draft worker only supports attention_backend in (...). Falling back to 'flashinfer'.",
    "cuda-graph": "Cuda graph is disabled because of using torch native attention backend",
    "overlap": "Overlap scheduler is disabled because of using something",
}


@pytest.mark.parametrize("name", LINES)
def test_every_concession_in_the_log_is_named(name: str) -> None:
    result = attest.judge(SETTINGS, RELEASE, info(), ["x", LINES[name]])
    assert result.verdict is Verdict.FAILED
    assert result.findings[0].startswith(f"{name}: ")


NOTES = {
    "mixed-chunk": "Mixed chunked prefill is disabled because of using dflash speculative decoding.",
    "states": "DDTREE: recurrent states are kept as snapshots: records need head sizes that are powers of two from 16.",
    "jit-kernel": "[2026-11-30 07:05:30] Failed to load JIT QK-Norm kernel: ninja exited with status 2",
}


@pytest.mark.parametrize("name", NOTES)
def test_a_concession_that_changes_no_value_is_a_note(name: str) -> None:
    result = attest.judge(SETTINGS, RELEASE, info(), [NOTES[name]])
    assert result.verdict is Verdict.PASSED
    assert result.findings == (f"{name}: {NOTES[name]}",)
    assert result.line == "the server resolved what was asked; 1 note"


def test_a_hub_name_may_resolve_to_a_snapshot() -> None:
    named = SETTINGS.model_copy(update={"model": "Qwen/Qwen3.6-27B"})
    assert attest.judge(named, RELEASE, info(model_path="/root/.cache/x"), []).verdict is Verdict.PASSED


def test_without_the_plugin_the_gate_fails() -> None:
    told = info()
    told["internal_states"] = [{}]
    assert "the plugin is not loaded" in attest.judge(SETTINGS, RELEASE, told, []).line


def test_a_server_that_says_nothing_could_not_be_attested() -> None:
    assert attest.judge(SETTINGS, RELEASE, {}, []).verdict is Verdict.COULD_NOT_RUN


def test_flags_by_field() -> None:
    argv = ["--tensor-parallel-size", "2", "--x=y=z", "--flag", "--list", "a", "b", "--x", "last"]
    assert asked_flags(argv) == {"tp_size": "2", "x": "last", "flag": True, "list": "a b"}


# -- soak


HEALTHY: dict[str, Any] = {"healthy": True, "line": "ok", "restarts": 0, "invocation": "i", "accept_length": 3.0}


def look(at_s: float, **changes: Any) -> soak.Look:
    return soak.Look(at_s=at_s, **HEALTHY | changes)


SOAK = GateSettings(soak_s=10)


@pytest.mark.parametrize(
    ("looks", "verdict", "line"),
    [
        ([look(0), look(10)], Verdict.PASSED, "healthy for 10 s, accept length 3.00"),
        ([look(0), look(5)], Verdict.COULD_NOT_RUN, "watched for 5 s of 10 s"),
        ([], Verdict.COULD_NOT_RUN, "watched for 0 s of 10 s"),
        ([look(0), look(5, restarts=1), look(10, restarts=1)], Verdict.FAILED, "the server was restarted after 5 s"),
        ([look(0), look(10, invocation="j")], Verdict.FAILED, "the server was restarted after 10 s"),
        ([look(0), look(10, healthy=False, line="the unit failed")], Verdict.FAILED, "after 10 s: the unit failed"),
        ([look(0), look(10, error="HTTP 500")], Verdict.FAILED, "after 10 s a request failed: HTTP 500"),
        ([look(0, accept_length=1.0), look(10, accept_length=1.0)], Verdict.FAILED, "accept length 1.00 is below"),
        ([look(0, accept_length=None), look(10, accept_length=None)], Verdict.FAILED, "the drafter may be dead"),
    ],
)
def test_soak(looks: list[soak.Look], verdict: Verdict, line: str) -> None:
    result = soak.judge(SOAK, Mode.TREE, looks)
    assert result.verdict is verdict
    assert line in result.line


def test_soak_of_ar_needs_no_accept_length() -> None:
    looks = [look(0, accept_length=None), look(10, accept_length=None)]
    assert soak.judge(SOAK, Mode.AR, looks).verdict is Verdict.PASSED


# -- baselines


def test_a_baseline_round_trips_and_must_cover_what_is_declared() -> None:
    kept = baseline.pack(linear(), {}, RELEASE, 0.0)
    assert baseline.unpack(kept, GATES) == linear()
    assert baseline.unpack(kept, GateSettings(concurrencies=(1, 2), tokens=64)) is None
    assert baseline.unpack(None, GATES) is None


def test_the_key_is_that_of_engine_and_model_and_not_of_the_mode() -> None:
    def key(engine: str = "e", gates: GateSettings = GATES, **changes: Any) -> str:
        settings = Settings.model_validate(SETTINGS.model_dump() | changes)
        return baseline.baseline_key(settings, engine, gates, Mode.LINEAR)

    assert key() == key(mode=Mode.LINEAR) == key(budget=8) == key(port=1, gpus=(3,), instance="b")
    others = {key("f"), key(model="/x"), key(drafter="/x"), key(gpus=(0, 1)), key(gates=GateSettings(tokens=32))}
    assert len(others | {key()}) == 6


def test_one_declared_concurrency_gets_another_shape_in_its_baseline() -> None:
    assert baseline.baseline_concurrencies(GateSettings(concurrencies=(1,))) == (1, 4)
    assert baseline.baseline_concurrencies(GateSettings(concurrencies=(8, 1))) == (1, 8)


def test_prompts_are_distinct_and_named_by_content() -> None:
    assert len(set(prompts(64))) == 64
    assert prompt_set(16, 128) != prompt_set(16, 64)
    assert [body["text"] for body in measure.load_request(GATES, 1)["bodies"]] == prompts(16)
