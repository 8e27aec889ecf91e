"""Everything that reads a server, on what a real one said: answers, metrics and logs captured on an H200."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import captured
import pytest

from benchmarks.engine.client import Client, ServerError
from benchmarks.engine.measure import Arm, provenance
from ddtree_ops.connection import parse_completion
from ddtree_ops.drain import busy_of
from ddtree_ops.facts.journal import Phase, progress, reason
from ddtree_ops.facts.memory import Reported, compare, parse_memory_log
from ddtree_ops.facts.server import Served, parse_metrics, parse_server_info, weight_version
from ddtree_ops.facts.unit import UnitState
from ddtree_ops.gates import attest
from ddtree_ops.gates.result import Verdict
from ddtree_ops.health import Completion, Observation
from ddtree_ops.hostside import doctor, load, observe
from ddtree_ops.model import Mode, Settings
from ddtree_ops.planner import GIB, MIB, Ask, MemoryPlan, plan_memory
from ddtree_ops.shapes import parse_drafter, parse_model

SETTINGS = Settings(
    instance="pair", mode=Mode.TREE, gpus=(0,), port=31300, model="patches/selftest-pair/target",
    drafter="patches/selftest-pair/drafter", budget=16, topk_cap=8, states="snapshots", allow_hybrid_unsafe=True,
    unsafe_reason="captured", max_running_requests=8, mem_fraction_static=0.8,
    extra_args=(
        "--attention-backend", "triton", "--sampling-backend", "pytorch", "--grammar-backend", "none",
        "--page-size", "1", "--max-total-tokens", "24000", "--disable-radix-cache", "--disable-prefill-cuda-graph",
        "--random-seed", "7", "--speculative-draft-attention-backend", "triton",
    ),
)  # fmt: skip
TOKENS = [
    262, 224, 394, 667, 396, 268, 701, 526, 268, 701, 371, 262, 224, 29, 1089, 1050, 29, 519, 701, 338, 383, 1780, 372,
    302,
]  # fmt: skip


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with captured.replayed() as port:
        yield port


# -- answers


def test_metrics() -> None:
    """Six requests, of which two were streamed: a counter with a label more is summed."""
    served = parse_metrics(captured.body("metrics"))
    assert served == Served(accept_length=2.2, tokens_per_s=0.0, running=0, queued=0, requests_total=6.0)
    assert busy_of(Observation(UnitState(), served=served)) == 0


@pytest.mark.parametrize("name", ["server-info", "server-info-after"])
def test_server_info(name: str) -> None:
    seen = parse_server_info(captured.body(name))
    assert (seen.algorithm, seen.mode, seen.budget, seen.topk_cap) == ("DDTREE", Mode.TREE, 16, 8)
    assert (seen.version, seen.stand_in) == ("0.5.17", False)


@pytest.mark.parametrize("name", ["model-info", "get-model-info"])
def test_release(name: str) -> None:
    assert weight_version(captured.body(name)) == "default"


def test_a_completion() -> None:
    there = captured.exchanges()["generate"]
    found = parse_completion({"status": there["status"], "body": there["body"], "ms": 180.0})
    assert found == Completion(24, "default", seconds=0.18)


def test_what_a_measurement_reads() -> None:
    assert load.read(captured.answer("generate")) == {"tokens": TOKENS, "accept_length": 3.0}


def test_the_helper_asks(port: int) -> None:
    at = {"port": port}
    assert observe.ask(at, "GET", "/health", 5.0)["status"] == 200
    wrong = {"text": "def read_config(path):\n", "sampling_params": {"temperature": -1}}
    with closing(observe.connect(at, 5.0)) as connection:
        refused = load.post(connection, {"path": "/generate"}, wrong)
    said = '{"error":{"message":"temperature must be a non-negative finite number, got -1."}}'
    assert refused == {"error": f"HTTP 400: {said}"}


def test_the_benchmarks_client_reads_the_stream(port: int) -> None:
    greedy = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
    with closing(Client(f"http://127.0.0.1:{port}")) as client:
        reply = client.generate("def read_config(path):\n", greedy)
        assert list(reply.tokens) == TOKENS
        assert (reply.rounds, reply.histogram, reply.first_tokens) == (8, (0, 3, 3, 2), 1)
        with pytest.raises(ServerError, match="answered 404"):
            client.get("/no_such_path")


def test_provenance_of_a_benchmark(port: int) -> None:
    found = provenance(Arm("tree-16", f"http://127.0.0.1:{port}"))
    assert found["server"] == {
        "version": "0.5.17", "model_path": "patches/selftest-pair/target", "dtype": "auto",
        "attention_backend": "triton", "speculative_algorithm": "DDTREE", "speculative_num_draft_tokens": 17,
        "speculative_draft_model_path": "patches/selftest-pair/drafter", "disable_overlap_schedule": False,
        "disable_cuda_graph": False, "max_running_requests": 8, "cuda_graph_max_bs_decode": 8,
        "disable_radix_cache": True, "tp_size": 1,
    }  # fmt: skip
    assert found["ddtree"]["verify_rows"] == 17
    assert found["ddtree"]["counters"]["trees"] in (7, 61)  # of the two captures of one path the last is replayed


# -- attest


def judged(settings: Settings) -> list[str]:
    result = attest.judge(settings, "default", captured.answer("server-info"), captured.log(captured.LOG).splitlines())
    assert (result.verdict is Verdict.PASSED) == (not result.findings)
    assert result.evidence["version"] == "0.5.17"
    return list(result.findings)


def test_the_server_resolved_what_it_was_asked() -> None:
    assert judged(SETTINGS) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"budget": 32}, ["budget: asked for 32, resolved 16", "verify-rows: asked for 33, resolved 17"]),
        ({"states": "records"}, ["states: asked for records, resolved snapshots"]),
        ({"mem_fraction_static": 0.9}, ["mem-fraction-static: asked for 0.9, resolved 0.8"]),
        ({"mode": Mode.LINEAR}, ["mode: asked for linear, resolved tree"]),
        ({"port": 30000}, ["port: asked for 30000, resolved 31300"]),
    ],
)
def test_another_wish_is_not_what_it_resolved(change: dict[str, Any], said: list[str]) -> None:
    found = judged(SETTINGS.model_copy(update=change))
    assert found == said


# -- the log of a start


@pytest.mark.parametrize("name", [captured.LOG, captured.LOG_OF_RECORDS])
def test_progress_of_a_start(name: str) -> None:
    """Each phase as the log reached it; two models load, and two graphs are captured."""
    lines = captured.log(name).splitlines()
    shown = list(dict.fromkeys((n, str(progress(lines[:n]))) for n in range(len(lines) + 1)))
    phases = [said for (_, said), (_, before) in zip(shown, [(0, ""), *shown], strict=False) if said != before]
    loading = ["loading weights", "loading weights (0%)", "loading weights (100%)", "allocating caches"]
    sizes = [f"capturing graphs (bs={size})" for size in range(8, 0, -1)]
    assert phases == [
        "starting", *loading, *loading, "capturing graphs (target verify)", *sizes,
        "capturing graphs (draft verify)", *sizes, "warming up", "ready",
    ]  # fmt: skip
    assert reason(lines) == ""


def test_a_progress_bar_as_the_journal_keeps_it() -> None:
    """One line, whose states are parted by carriage returns: the last one counts."""
    lines = captured.log(captured.LOG).splitlines()
    bar = [line for line in lines if line.startswith("Capturing batches")][:9]
    found = progress(["\r".join(bar)])
    assert (found.phase, found.detail) == (Phase.CAPTURING, re.findall(r"bs=\d", bar[-1])[0])
    assert found.detail != "bs=8"


# -- memory: the plan beside the log


def plan(budget: int, states: Any) -> MemoryPlan:
    def shape(name: str) -> str:
        return (captured.PAIR / name / "config.json").read_text()

    def size(name: str) -> int:
        return (captured.PAIR / name / "model.safetensors").stat().st_size

    return plan_memory(
        Ask(
            target=parse_model(shape("target"), "target"), weights=size("target"), gpu_bytes=143771 * MIB,
            mode=Mode.TREE, drafter=parse_drafter(shape("drafter"), "drafter"), drafter_weights=size("drafter"),
            budget=budget, running=8, context=4096, radix="off", mem_fraction=0.8, tokens_given=24000, states=states,
        )
    )  # fmt: skip


PLANS = {captured.LOG: (16, "snapshots"), captured.LOG_OF_RECORDS: (32, "records")}
# The log's own figures; a size of 0.00 is the convolution's, which has 324 KiB here.
LOGGED = {
    captured.LOG: {
        "drafter weights": 0.01, "recurrent states": 0.01, "convolution states": 0.0, "state snapshots": 0.22,
        "convolution snapshots": 0.01, "KV cache": 0.04, "KV cache of the drafter": 0.12,
    },
    captured.LOG_OF_RECORDS: {
        "target weights": 0.02, "drafter weights": 0.01, "recurrent states": 0.01, "convolution states": 0.0,
        "state records": 0.01, "KV cache": 0.04, "KV cache of the drafter": 0.12,
    },
}  # fmt: skip
# Lines that name gigabytes and that no plan of one server can foretell: what all processes on the GPU leave free, and
# what differences of that make of models and graphs. On this GPU eight servers came and went.
OF_THE_WHOLE_GPU = (
    "avail mem=", "avail_mem=", "Init torch distributed ends", "available_gpu_mem=", "up to 1024 MiB",
)  # fmt: skip


@pytest.mark.parametrize("name", [captured.LOG, captured.LOG_OF_RECORDS])
def test_memory_that_a_server_logged(name: str) -> None:
    """In the first log the target's weights are -8.18 GB: another process ended while they were loaded."""
    found = parse_memory_log(captured.log(name))
    assert {item: round(size / GIB, 2) for item, size in found.sizes.items()} == LOGGED[name]
    assert replace(found, sizes={}) == Reported({}, slots=8, tokens=24000, cached=24000)


@pytest.mark.parametrize("name", [captured.LOG, captured.LOG_OF_RECORDS])
def test_the_helper_fetches_every_line_that_is_read(name: str) -> None:
    lines = captured.log(name).splitlines()
    fetched = "\n".join(line for line in lines if re.search(doctor.MEMORY, line))
    assert parse_memory_log(fetched) == parse_memory_log("\n".join(lines))


@pytest.mark.parametrize("name", [captured.LOG, captured.LOG_OF_RECORDS])
def test_the_plan_is_what_the_server_took(name: str) -> None:
    """Within five percent, or half of the log's last decimal, where the log is no finer."""
    made = plan(*PLANS[name])
    rows = {row.name: row for row in compare(made, parse_memory_log(captured.log(name)))}
    assert rows.keys() == {*LOGGED[name], "KV cache tokens"}
    assert [row for row in rows.values() if not row.close] == []
    assert {item.name for item in made.items} - rows.keys() <= {"target weights"}
    off = compare(plan(255, PLANS[name][1]), parse_memory_log(captured.log(name)))
    kept = ["state snapshots", "convolution snapshots"] if name == captured.LOG else ["state records"]
    assert [row.name for row in off if not row.close] == kept


def test_every_line_of_memory_is_planned_or_of_the_whole_gpu() -> None:
    for name in LOGGED:
        lines = [line for line in captured.log(name).splitlines() if "ServerArgs" not in line]
        sized = [line for line in lines if re.search(r"\d ?(?:GB|GiB|MiB)\b|gpu_mem=", line)]
        read = [line for line in sized if re.search(doctor.MEMORY, line)]
        assert len(read) == (6 if name == captured.LOG else 7)
        assert [x for x in sized if x not in read and not any(known in x for known in OF_THE_WHOLE_GPU)] == []


def test_sizes_to_the_byte() -> None:
    """/metrics has the target's KV cache unrounded; the plugin's line says what snapshots would have taken."""
    value = re.search(r"^sglang:kv_cache_memory_usage_gb\{.*\} (\S+)$", captured.body("metrics"), re.M)
    assert value
    assert plan(16, "snapshots").pools(24000)[0].bytes == float(value[1]) * GIB
    said = re.search(r"take ([\d.]+) GiB; snapshots would take ([\d.]+) GiB", captured.log(captured.LOG_OF_RECORDS))
    assert said
    planned = [
        sum(item.bytes for item in plan(32, states).items if "records" in item.name or "snapshots" in item.name) / GIB
        for states in ("records", "snapshots")
    ]
    assert [f"{size:.2f}" for size in planned] == list(said.groups())


def test_what_is_left_between_two_lines() -> None:
    """What is left falls by what was planned, in the log of the server beside which no other came or went."""
    text = captured.log(captured.LOG_OF_RECORDS)
    loaded = [float(x) for x in re.findall(r"Load weight end\..*avail mem=([\d.]+)", text)]
    pooled = [float(x) for x in re.findall(r"Memory pool end\. avail mem=([\d.]+)", text)]
    made = plan(32, "records")
    pools = [item.bytes / GIB for item in made.pools(24000)]
    states = sum(item.bytes for item in made.items if "states" in item.name or "records" in item.name) / GIB
    assert loaded[-1] - pooled[0] == pytest.approx(states + pools[0], abs=0.011)
    assert pooled[0] - pooled[1] == pytest.approx(pools[1], abs=0.011)


def test_ranks_of_one_model_are_one() -> None:
    """With several GPUs every rank logs its own; a plan is for one."""
    text = captured.log(captured.LOG_OF_RECORDS)
    both = [line.replace("] ", f" TP{rank}] ", 1) for line in text.splitlines() for rank in (0, 1)]
    assert parse_memory_log("\n".join(both)) == parse_memory_log(text)


def test_the_exchanges_are_whole() -> None:
    """A capture taken anew has to have what these tests read."""
    assert {"metrics", "server-info", "generate", "generate-stream"} <= captured.exchanges().keys()
    assert json.loads(captured.body("generate"))["meta_info"]["completion_tokens"] == 24
