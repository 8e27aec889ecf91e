"""The stand-in answers in the form of the real server: the requests of benchmarks/gpu/capture.py, answer by answer.

It decodes nothing and so judges no request; whatever else differs on purpose is listed here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import captured
import pytest
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.gpu.capture import QUESTIONS, ask
from ddtree_ops.facts.server import parse_metrics, parse_server_info
from ddtree_ops.lab.standin.decoding import Engine
from ddtree_ops.lab.standin.faults import Faults
from ddtree_ops.lab.standin.server import State, serve
from ddtree_ops.lab.standin.settings import Settings

SERVED = ("error-sampling", "error-unknown-parameter", "error-too-long")  # refused by whoever decodes
NOT_ASKED = {question.name for question in QUESTIONS if question.name in SERVED}
ASKED = [question for question in QUESTIONS if question.name not in NOT_ASKED]
OF_REAL_ROUNDS = (
    "spec_accept_rate", "spec_num_correct_drafts", "spec_num_proposed_drafts", "spec_accepted_drafts",
    "spec_proposed_drafts", "spec_correct_drafts_histogram", "spec_accept_histogram",
)  # fmt: skip
TIMES = (
    "forward_entry_time", "prefill_finished_time", "queue_time", "request_received_ts", "request_finished_ts",
    "api_server_dispatch_finish_ts", "decode_throughput", "response_sent_to_client_ts",
)  # fmt: skip
META = {f".meta_info.{name} is absent" for name in (*OF_REAL_ROUNDS, *TIMES)}
INNER = {
    f".internal_states[].{name} is absent"
    for name in (
        "_cuda_graph_config_locked", "_ddtree", "_declarations_materialized", "_mx_config_cache", "startup_time",
        "_quantization_explicitly_unset", "_resolved_overrides", "grpc_worker_threads", "memory_usage",
        "max_speculative_num_draft_tokens", "ddtree.counters",
    )
}  # fmt: skip
UNLIMITED = {f".internal_states[].{name} is NoneType, not int" for name in
             ("max_mamba_cache_size", "pp_max_micro_batch_size")}  # fmt: skip
PHASES = {f".startup_time.{name} is absent" for name in
          ("cuda_graph", "kv_cache_allocation", "scheduler_e2e", "tokenizer_e2e")}  # fmt: skip
INFO = INNER | UNLIMITED | PHASES | {".stand_in is new", ".launch_command is new"}
GIVEN = {".internal_states[].custom_sigquit_handler is new"}  # its arguments are given to it as the real one shows them
EMBEDDING = {".embedding is absent"}
MEANT: dict[str, set[str]] = {
    "model-info": EMBEDDING, "get-model-info": EMBEDDING, "server-info": INFO | GIVEN,
    "server-info-after": INFO | GIVEN, "generate": META, "generate-seeded": META,
}  # fmt: skip
SHOWN_BY_THE_SERVER = {"status", "max_total_num_tokens", "max_req_input_len", "startup_time", "internal_states",
                       "version", "kv_events"}  # fmt: skip


@pytest.fixture(scope="module")
def ours() -> Iterator[dict[str, dict[str, Any]]]:
    info = captured.answer("server-info")
    block = {name: value for name, value in info["internal_states"][0]["ddtree"].items() if name != "counters"}
    given = {name: value for name, value in info.items() if name not in SHOWN_BY_THE_SERVER}
    model = json.loads((captured.PAIR / "target/config.json").read_text())
    settings = Settings(given, "tree", 16, 8, 16, model, block)
    fast = Faults(tok_s=dict.fromkeys(("ar", "linear", "shadow-linear", "tree", "auto"), 4000.0))
    state = State(Engine(settings, fast), "0.5.17", ["test"], ())
    state.life = "up"
    with captured.serving(serve("127.0.0.1", 0, state)) as port:
        yield {question.name: ask(port, question) for question in ASKED}


@pytest.mark.parametrize("name", [question.name for question in ASKED])
def test_status_type_names_and_types(ours: dict[str, dict[str, Any]], name: str) -> None:
    real, found = captured.exchanges()[name], ours[name]
    assert (found["request"], found["status"], found["type"]) == (real["request"], real["status"], real["type"])
    if real["type"] == "application/json":
        assert captured.differences(json.loads(real["body"]), json.loads(found["body"])) == MEANT.get(name, set())


@pytest.mark.parametrize("name", ["error-logprob", "error-no-such-path", "health"])
def test_bodies_to_the_byte(ours: dict[str, dict[str, Any]], name: str) -> None:
    assert ours[name]["body"] == captured.body(name)


def test_streams(ours: dict[str, dict[str, Any]]) -> None:
    """The last event has text and the reason of the end; figures of the rounds come with it alone."""
    for name, reason in (("generate-stream", "meta_info"), ("completion-stream", "choices")):
        real, found = captured.events(captured.body(name)), captured.events(ours[name]["body"])
        for first, second in ((real[0], found[0]), (real[-1], found[-1])):
            lacking = captured.differences(first, second)
            assert lacking <= META if reason == "meta_info" else lacking == set()
        for event in (*real[:-1], *found[:-1]):
            where = event["meta_info"] if reason == "meta_info" else event["choices"][0]
            assert where["finish_reason"] is None
            assert "spec_verify_ct" not in where
        assert "spec_verify_ct" in (found[-1]["meta_info"] if reason == "meta_info" else {"spec_verify_ct": 0})
    counts = [event["meta_info"]["completion_tokens"] for event in captured.events(ours["generate-stream"]["body"])]
    assert counts == sorted(set(counts))
    assert counts[-1] == 24


def test_metrics(ours: dict[str, dict[str, Any]]) -> None:
    def kinds(text: str) -> dict[str, tuple[str, set[tuple[str, ...]]]]:
        found = list(text_string_to_metric_families(text))
        return {each.name: (each.type, {tuple(sorted(sample.labels)) for sample in each.samples}) for each in found}

    real, found = kinds(captured.body("metrics")), kinds(ours["metrics"]["body"])
    assert found.keys() - real.keys() == {"sglang:num_aborted_requests"}  # SGLang shows it once one was
    assert {name: real[name] for name in found if name in real} == {
        name: kind for name, kind in found.items() if name in real
    }
    served = parse_metrics(ours["metrics"]["body"])
    assert (served.running, served.queued, served.tokens_per_s, served.requests_total) == (0, 0, 0.0, 5.0)
    assert served.accept_length is not None


def test_it_says_that_it_is_none(ours: dict[str, dict[str, Any]]) -> None:
    assert parse_server_info(ours["server-info"]["body"]).stand_in
    assert not parse_server_info(captured.body("server-info")).stand_in
