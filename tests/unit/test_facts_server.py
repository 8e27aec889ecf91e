"""/model_info, /server_info and /metrics, read by pure functions."""

from __future__ import annotations

import json

import pytest

from ddtree_ops.facts.server import Served, parse_metrics, parse_server_info, weight_version
from ddtree_ops.model import Mode

METRICS = """\
# HELP sglang:num_running_reqs The number of running requests.
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{engine_type="unified",model_name="m",pp_rank="0",tp_rank="0"} 3.0
sglang:num_running_reqs{engine_type="unified",model_name="m",pp_rank="0",tp_rank="1"} 3.0
# HELP sglang:gen_throughput The generation throughput (token/s).
# TYPE sglang:gen_throughput gauge
sglang:gen_throughput{model_name="m",tp_rank="0"} 141.5
# HELP sglang:spec_accept_length Mean acceptance length of speculative decoding.
# TYPE sglang:spec_accept_length gauge
sglang:spec_accept_length{model_name="m",tp_rank="0"} 6.25
# HELP sglang:num_requests_total Number of requests processed.
# TYPE sglang:num_requests_total counter
sglang:num_requests_total{model_name="m"} 12.0
"""


def test_metrics() -> None:
    served = parse_metrics(METRICS)
    assert served == Served(accept_length=6.25, tokens_per_s=141.5, running=3, queued=None, requests_total=12.0)


def test_metrics_of_a_server_that_has_done_nothing() -> None:
    assert parse_metrics("") == Served()
    assert parse_metrics('sglang:spec_accept_length{tp_rank="0"} 0.0\n').accept_length is None


@pytest.mark.parametrize("body", ["", "not json", "[]", "{}", '{"weight_version": 3}'])
def test_a_server_that_names_no_release(body: str) -> None:
    assert weight_version(body) is None


def test_release_of_a_server() -> None:
    assert weight_version('{"model_path": "/m", "weight_version": "abc"}') == "abc"


@pytest.mark.parametrize(
    ("info", "mode"),
    [
        ({"speculative_algorithm": None, "version": "0.5.17"}, Mode.AR),
        ({"speculative_algorithm": "DFLASH"}, Mode.LINEAR),
        ({"speculative_algorithm": "DDTREE", "internal_states": [{"ddtree": {"mode": "tree"}}]}, Mode.TREE),
        ({"speculative_algorithm": "DDTREE", "internal_states": [{"ddtree": {"mode": "linear"}}]}, Mode.LINEAR),
        ({"speculative_algorithm": "DDTREE"}, None),
        ({"speculative_algorithm": "EAGLE"}, None),
        ({}, None),
    ],
)
def test_mode_that_the_server_resolved(info: dict[str, object], mode: Mode | None) -> None:
    assert parse_server_info(json.dumps(info)).mode is mode


def test_settings_that_the_server_resolved() -> None:
    shown = {"mode": "tree", "budget": 32, "topk_cap": 8, "verify_rows": 33}
    body = {"speculative_algorithm": "DDTREE", "version": "0.5.17", "internal_states": [{"ddtree": shown}]}
    resolved = parse_server_info(json.dumps(body))
    assert (resolved.budget, resolved.topk_cap, resolved.version, resolved.stand_in) == (32, 8, "0.5.17", False)
    assert parse_server_info('{"stand_in": "not SGLang", "internal_states": 3}').stand_in
