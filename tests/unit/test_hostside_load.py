"""The helper's load on a real loopback server."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from helperhost import HelperHost, helper_host
from waiting import LIMIT_S

from ddtree_ops.gates.measure import load_request, parse_run
from ddtree_ops.model import GateSettings


class Generate(BaseHTTPRequestHandler):
    """Answers /generate with as many tokens as asked, after 20 ms; keeps who came and how many at once.

    Nobody is answered before ``together`` clients wait at the same time: how fast the machine is does not matter.
    """

    protocol_version = "HTTP/1.1"
    lock = threading.Condition()
    running = most = requests = together = 0
    keys: set[str | None] = set()  # noqa: RUF012

    def do_POST(self) -> None:
        kind = type(self)
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with kind.lock:
            kind.requests += 1
            kind.running += 1
            kind.most = max(kind.most, kind.running)
            kind.keys.add(self.headers.get("Authorization"))
            kind.lock.notify_all()
            kind.lock.wait_for(lambda: kind.most >= kind.together, LIMIT_S)
        time.sleep(0.02)
        with kind.lock:
            kind.running -= 1
        count = body["sampling_params"]["max_new_tokens"]
        meta: dict[str, Any] = {"completion_tokens": count, "spec_accept_length": 3.5}
        if body.get("return_logprob"):
            meta["output_top_logprobs"] = [[[-0.1, 7, None], [-2.1, 8, None]]] * count
        status, answer = (500, {"error": "no"}) if "sky" in body["text"] else (200, {"meta_info": meta})
        answer["output_ids"] = list(range(count))
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Quiet."""


@pytest.fixture
def server() -> Iterator[tuple[int, type[Generate]]]:
    kind = type("Fresh", (Generate,), {"lock": threading.Condition(), "keys": set()})
    with ThreadingHTTPServer(("127.0.0.1", 0), kind) as made:
        thread = threading.Thread(target=made.serve_forever, daemon=True)
        thread.start()
        yield made.server_address[1], kind
        made.shutdown()
        thread.join()


@pytest.fixture
def host(tmp_path: Path) -> Iterator[HelperHost]:
    made = helper_host(tmp_path)
    with made.agent.locked("test"):
        yield made


GATES = GateSettings(prompts=8, tokens=16, rounds=3)


def test_a_load_is_measured_prompt_by_prompt(host: HelperHost, server: tuple[int, type[Generate]]) -> None:
    port, seen = server
    seen.together = 4
    answer = host.do("load", port=port, headers={"Authorization": "Bearer x"}, **load_request(GATES, 4, gaps=True))
    run = parse_run(answer, GATES.tokens)
    assert (seen.most, seen.requests, seen.keys) == (4, 8 * 3 + 4, {"Bearer x"})  # 4 warm up
    assert (run.concurrency, len(run.samples), len(run.errors)) == (4, 7 * 3, 3)
    assert "HTTP 500" in run.errors[0]
    sample = run.samples[0]
    assert (sample.tokens, sample.accept_length, sample.gaps) == (tuple(range(16)), 3.5, (2.0,) * 16)
    assert 0.02 <= sample.seconds <= answer["wall_s"]
    assert run.tokens_per_s > 0


def test_a_server_that_is_not_there_is_an_error_of_each_request(host: HelperHost) -> None:
    with socket.socket() as taken:  # nobody else gets the port, and nobody listens on it
        taken.bind(("127.0.0.1", 0))
        answer = host.do("load", port=taken.getsockname()[1], **load_request(GATES, 2))
    run = parse_run(answer, GATES.tokens)
    assert len(run.errors) == 24
    assert "ConnectionRefusedError" in run.errors[0]


def test_a_baseline_is_kept_by_its_key(host: HelperHost) -> None:
    assert host.do("baseline", key="0" * 16) == {"value": None}
    host.do("keep_baseline", key="0" * 16, value={"runs": []})
    assert host.do("baseline", key="0" * 16) == {"value": {"runs": []}}
