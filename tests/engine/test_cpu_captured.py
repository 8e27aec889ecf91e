"""The CPU engine answers as the real server did: the very requests of benchmarks/gpu/capture.py, answer by answer.

A difference that is meant is listed here with its reason; one that is listed and gone fails as well.
"""

from __future__ import annotations

import ast
import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import captured
import numpy as np
import pytest
from cpu_pair import ROOT, pair, tokenizer
from prometheus_client.parser import text_string_to_metric_families
from sglang_ddtree.cpu import args
from sglang_ddtree.cpu.asks import PARAMETERS
from sglang_ddtree.cpu.decode import Sampling
from sglang_ddtree.cpu.http import State, serve
from sglang_ddtree.cpu.serving import Engine

from benchmarks.gpu.capture import QUESTIONS, Question, ask
from ddtree_ops.facts.server import parse_metrics

# Times of SGLang's several processes, which one process has not.
TIMES = {
    f".meta_info.{name} is absent"
    for name in (
        "forward_entry_time", "prefill_finished_time", "queue_time", "request_received_ts", "request_finished_ts",
        "api_server_dispatch_finish_ts", "decode_throughput", "response_sent_to_client_ts",
    )
}  # fmt: skip
# What SGLang resolves for a GPU, or by itself after it has parsed its flags; here they are as they were given.
UNRESOLVED = (
    "chunked_prefill_size", "cuda_graph_config", "custom_weight_loader", "dsa_prefill_cp_mode",
    "enable_dsa_prefill_context_parallel", "enable_flashinfer_allreduce_fusion", "enable_prefill_context_parallel",
    "encoder_register_urls", "encoder_transfer_backend", "encoder_urls", "expert_distribution_recorder_buffer_size",
    "kv_canary_real_data", "mm_feature_transport", "mm_process_config", "prefill_cp_mode",
    "speculative_draft_model_revision", "speculative_moe_runner_backend", "speculative_ngram_capacity",
    "uvicorn_access_log_exclude_prefixes",
)  # fmt: skip
# No flags, or SGLang's own notes about its arguments, its memory and the plugin's inner settings.
INNER = (
    "_cuda_graph_config_locked", "_ddtree", "_declarations_materialized", "_mx_config_cache",
    "_quantization_explicitly_unset", "_resolved_overrides", "grpc_worker_threads", "max_speculative_num_draft_tokens",
    "memory_usage", "startup_time", "stat_loggers", "uses_mamba_radix_cache",
)  # fmt: skip
OF_A_SCHEDULER = ("max_mamba_cache_size", "pp_max_micro_batch_size")  # as many as there are requests; here unlimited
CAPTURES_SPLIT = ("cuda_graph", "kv_cache_allocation", "scheduler_e2e", "tokenizer_e2e")  # there is nothing to time
NOT_SGLANG = {".stand_in is new", ".launch_command is new"}  # it never passes for what it is not
BEFORE_ITS_FIRST_TREE = {".internal_states[].ddtree.counters.acceptance_by_depth[] is NoneType, not float"}
EMBEDDING = {".embedding is absent"}  # what an embedding model would be; nothing reads it


def unresolved(at: str, found: dict[str, Any]) -> set[str]:
    return {f"{at}.{name} is NoneType, not {type(found[name]).__name__}" for name in UNRESOLVED}


def of_server_info() -> set[str]:
    real = captured.answer("server-info")
    inner = real["internal_states"][0]
    at = ".internal_states[]"
    return (
        {f"{at}.{name} is absent" for name in INNER}
        | {f"{at}.{name} is NoneType, not int" for name in OF_A_SCHEDULER}
        | {f".{name} is absent" for name in ("custom_sigquit_handler", "stat_loggers", "uses_mamba_radix_cache")}
        | {f".startup_time.{name} is absent" for name in CAPTURES_SPLIT}
        | {*unresolved("", real), *unresolved(at, inner), *NOT_SGLANG}
    )


MEANT: dict[str, set[str]] = {
    "model-info": EMBEDDING, "get-model-info": EMBEDDING, "server-info": of_server_info() | BEFORE_ITS_FIRST_TREE,
    "server-info-after": of_server_info(), "generate": TIMES, "generate-seeded": TIMES,
}  # fmt: skip
# A stream begins before there is anything to tell of its end.
AT_THE_END = ("request_received_ts", "request_finished_ts", "api_server_dispatch_finish_ts", "decode_throughput")
EARLY = {line for line in TIMES if line.split()[0].rpartition(".")[2] not in AT_THE_END}
SENT = {line for line in TIMES if "response_sent_to_client_ts" in line}


@pytest.fixture(scope="module")
def ours() -> Iterator[dict[str, dict[str, Any]]]:
    """Every question asked of the CPU engine, started with the real server's own arguments, in the same order."""
    with contextlib.chdir(ROOT):
        launch = args.resolve(list(captured.ARGV))
    state = State(Engine(launch, pair(np.float32), tokenizer()), ["test"])
    state.life = "up"
    with captured.serving(serve("127.0.0.1", 0, state)) as port:
        yield {question.name: ask(port, question) for question in QUESTIONS}


def kind(name: str) -> str:
    return str(captured.exchanges()[name]["type"]).partition(";")[0]


JSON = [question.name for question in QUESTIONS if kind(question.name) == "application/json"]


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: question.name)
def test_status_and_type(ours: dict[str, dict[str, Any]], question: Question) -> None:
    real, found = captured.exchanges()[question.name], ours[question.name]
    assert found["request"] == real["request"], "what was captured is not what is asked any more"
    assert (found["status"], found["type"]) == (real["status"], real["type"])


@pytest.mark.parametrize("name", JSON)
def test_names_and_types(ours: dict[str, dict[str, Any]], name: str) -> None:
    found = captured.differences(captured.answer(name), json.loads(ours[name]["body"]))
    assert found == MEANT.get(name, set())


@pytest.mark.parametrize("name", ["error-logprob", "error-sampling", "error-unknown-parameter", "error-too-long",
                                  "error-no-such-path", "health"])  # fmt: skip
def test_bodies_to_the_byte(ours: dict[str, dict[str, Any]], name: str) -> None:
    assert ours[name]["body"] == captured.body(name)


def test_a_body_that_is_no_json(ours: dict[str, dict[str, Any]]) -> None:
    """What is wrong with it is told in the parser's words; SGLang adds where its own handler lies."""
    real, found = captured.answer("error-no-json"), json.loads(ours["error-no-json"]["body"])
    assert {**found, "message": ""} == {**real, "message": ""}
    assert all("1 validation error" in each["message"] and "JSON decode error" in each["message"]
               for each in (real, found))  # fmt: skip


def test_arguments_and_settings(ours: dict[str, dict[str, Any]]) -> None:
    """Whatever has the same type has the same value, the plugin's block too."""
    real, found = captured.answer("server-info"), json.loads(ours["server-info"]["body"])
    same = [name for name in found if type(found[name]) is type(real.get(name))]
    other = {name: found[name] for name in same if found[name] != real[name]}
    assert other.keys() == {"startup_time", "internal_states", "device", "load_balance_method"}
    assert (real["load_balance_method"], found["load_balance_method"]) == ("round_robin", "auto")  # not resolved here
    block, ours_block = (each["internal_states"][0]["ddtree"] for each in (real, found))
    assert ours_block == block | {"hybrid_verdict": "the reference itself", "counters": ours_block["counters"]}
    assert len(ours_block["counters"]["acceptance_by_depth"]) == len(block["counters"]["acceptance_by_depth"]) == 15


@pytest.mark.parametrize("name", ["generate", "generate-seeded"])
def test_figures_of_an_answer(ours: dict[str, dict[str, Any]], name: str) -> None:
    """They are made in the same way of other rounds: bfloat16 and float32 part at near ties."""
    real = captured.answer(name)
    for found in (real, json.loads(ours[name]["body"])):
        meta = found["meta_info"]
        assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (7, 24, 0)
        assert meta["finish_reason"] == {"type": "length", "length": 24}
        assert len(found["output_ids"]) == 24
        rounds, taken = meta["spec_verify_ct"], meta["spec_num_correct_drafts"]
        assert meta["spec_num_proposed_drafts"] == rounds * 16
        assert meta["spec_accept_rate"] == taken / (rounds * 16)
        assert meta["spec_accept_length"] == 24 / rounds
        counts = meta["spec_correct_drafts_histogram"]
        assert (sum(counts), sum(n * count for n, count in enumerate(counts))) == (rounds, taken)
        assert counts == meta["spec_accept_histogram"]
        assert (meta["spec_accepted_drafts"], meta["spec_proposed_drafts"]) == (taken, rounds * 16)
        assert 1 + rounds + taken >= 24


def test_completions(ours: dict[str, dict[str, Any]]) -> None:
    real, found = captured.answer("completion"), json.loads(ours["completion"]["body"])
    changing = {"id": "", "created": 0, "choices": []}
    assert found | changing == real | changing
    assert found["choices"][0] | {"text": ""} == real["choices"][0] | {"text": ""}


# -- streams


def test_a_stream_of_generate(ours: dict[str, dict[str, Any]]) -> None:
    """First, between, last: text and tokens so far; figures of the rounds with the last alone."""
    real, found = (captured.events(text) for text in
                   (captured.body("generate-stream"), ours["generate-stream"]["body"]))  # fmt: skip
    assert captured.differences(real[0], found[0]) == EARLY
    for event in found[1:-1]:
        assert captured.differences(real[1], event) == EARLY - SENT
    assert captured.differences(real[-1], found[-1]) == TIMES
    for stream in (real, found):
        counts = [event["meta_info"]["completion_tokens"] for event in stream]
        assert counts == [len(event["output_ids"]) for event in stream]
        assert (counts[0], counts[-1]) == (1, 24)
        assert counts == sorted(set(counts))
        assert [event["meta_info"]["finish_reason"] for event in stream[:-1]] == [None] * (len(stream) - 1)


def test_a_stream_of_completions(ours: dict[str, dict[str, Any]]) -> None:
    real, found = (captured.events(text) for text in
                   (captured.body("completion-stream"), ours["completion-stream"]["body"]))  # fmt: skip
    for event in found:
        assert captured.differences(real[0], event) <= {".choices[].finish_reason is str, not NoneType"}
    for stream, whole in ((real, captured.answer("completion")), (found, json.loads(ours["completion"]["body"]))):
        assert "".join(event["choices"][0]["text"] for event in stream) == whole["choices"][0]["text"]
        reasons = [event["choices"][0]["finish_reason"] for event in stream]
        assert reasons == [None] * (len(stream) - 1) + ["length"]


@pytest.mark.parametrize("name", ["generate-stream", "completion-stream", "generate", "models"])
def test_json_is_written_alike(ours: dict[str, dict[str, Any]], name: str) -> None:
    for text in (captured.body(name), ours[name]["body"]):
        assert '": ' not in text.replace("data: ", "").partition('"text"')[0]
        assert "\\u" not in text


# -- metrics

READ = {"sglang:spec_accept_length", "sglang:gen_throughput", "sglang:num_running_reqs", "sglang:num_queue_reqs",
        "sglang:num_requests"}  # fmt: skip
NOT_CAPTURED = {"sglang:num_aborted_requests"}  # SGLang shows a counter once it counted something


def families(text: str) -> dict[str, tuple[str, set[tuple[str, ...]]]]:
    """Every metric's type and the names of its labels."""
    found = list(text_string_to_metric_families(text))
    return {f.name: (f.type, {tuple(sorted(sample.labels)) for sample in f.samples}) for f in found}


def test_metrics(ours: dict[str, dict[str, Any]]) -> None:
    text = ours["metrics"]["body"]
    real, found = families(captured.body("metrics")), families(text)
    assert found.keys() & real.keys() >= READ
    assert found.keys() - real.keys() == NOT_CAPTURED
    # declared at the start; what was captured set them at every thousandth round only
    trees = {name for name in found if "ddtree" in name}
    assert {name: real[name] for name in trees} == dict.fromkeys(trees, ("gauge", set()))
    rest = found.keys() - trees - NOT_CAPTURED
    assert {name: found[name] for name in rest} == {name: real[name] for name in rest}
    for metric in (text, captured.body("metrics")):
        lines = metric.splitlines()
        helped, typed = (
            {line.split()[2] for line in lines if line.startswith(f"# {word} ")} for word in ("HELP", "TYPE")
        )
        assert helped == typed
        values = parse_metrics(metric)
        assert (values.running, values.queued, values.tokens_per_s) == (0, 0, 0.0)
        assert values.accept_length is not None
    # five completions were asked for, and the real server's warm-up counts as one
    assert parse_metrics(text).requests_total == 5
    assert "sglang:spec_num_draft_tokens{" in text
    shown = [line.split()[-1] for line in text.splitlines() if line.startswith("sglang:spec_num_draft_tokens")]
    assert shown == ["16.0"]  # the drafter's block, not the rows: what SGLang shows of the plugin's worker


# -- what SGLang's own code says


def test_sampling_parameters_are_sglangs(sglang_src: Path) -> None:
    tree = ast.parse((sglang_src / "sglang/srt/sampling/sampling_params.py").read_text())
    (params,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "SamplingParams"]
    assert {node.target.id for node in params.body if isinstance(node, ast.AnnAssign)
            and isinstance(node.target, ast.Name)} == PARAMETERS  # fmt: skip


# -- the tokens


def logits(name: str) -> Iterator[tuple[int, int, np.ndarray]]:
    """(the real server's token, its position's index, the float64 target's logits there), its own tokens before it."""
    prompt, out = tokenizer().encode("def read_config(path):\n").ids, captured.answer(name)["output_ids"]
    target, caches = pair().target, pair().target.new_caches()
    row, _ = target.prefill(np.array(prompt), caches)
    for index, token in enumerate(out):
        yield token, len(prompt) + index - 1, row
        caches = target.new_caches()
        row, _ = target.prefill(np.array([*prompt, *out[: index + 1]]), caches)


def test_greedy_tokens_of_the_real_server() -> None:
    """In bfloat16 it chose the best of the float64 law, or one that is a fiftieth of a nat behind it: three times."""
    behind = [float(row.max() - row[token]) for token, _, row in logits("generate")]
    assert max(behind) < 0.02
    assert sum(gap > 0 for gap in behind) == 3
    assert tokenizer().decode(captured.answer("generate")["output_ids"]) == captured.answer("generate")["text"]


def test_sampled_tokens_of_the_real_server() -> None:
    """With the same seed the reference draws what the GPU drew, but for one token of 24."""
    sampling = Sampling(temperature=1.0, seed=7)
    drawn = [sampling.choose(row, position) == token for token, position, row in logits("generate-seeded")]
    assert [index for index, same in enumerate(drawn) if not same] == [3]
