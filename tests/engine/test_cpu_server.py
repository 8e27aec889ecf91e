"""The CPU engine answers like SGLang: paths, bodies, status codes, metrics, streams, life."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from cpu_pair import FOLDER, pair, prompts, tokenizer
from sglang_ddtree.cpu import NOTICE, args
from sglang_ddtree.cpu.decode import Mode, Sampling, Session
from sglang_ddtree.cpu.http import State, serve
from sglang_ddtree.cpu.serving import Engine

from ddtree_ops.facts.server import parse_metrics, parse_server_info, weight_version

MODEL = ["--model-path", str(FOLDER / "target"), "--weight-version", "r1", "--enable-metrics"]
TREE = [
    "--speculative-draft-model-path", str(FOLDER / "drafter"), "--speculative-algorithm", "DDTREE",
    "--speculative-ddtree-mode", "tree", "--speculative-ddtree-budget", "16",
]  # fmt: skip
TEXT = "def read_config(path):\n"


def client(argv: list[str]) -> Iterator[httpx.Client]:
    launch = args.resolve(argv)
    state = State(Engine(launch, pair(np.float32), tokenizer()), ["test"])
    server = serve("127.0.0.1", 0, state)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    state.life = "up"
    with httpx.Client(base_url=f"http://127.0.0.1:{server.server_port}", timeout=60) as http:
        yield http
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def tree() -> Iterator[httpx.Client]:
    yield from client([*MODEL, *TREE])


@pytest.fixture(scope="module")
def plain() -> Iterator[httpx.Client]:
    yield from client(MODEL)


def ask(http: httpx.Client, **body: Any) -> dict[str, Any]:
    body.setdefault("text", TEXT)
    body.setdefault("sampling_params", {"temperature": 0, "max_new_tokens": 24})
    answer = http.post("/generate", json=body)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert isinstance(found, dict)
    return found


def events(http: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    with http.stream("POST", path, json=body) as answer:
        lines = [line[6:] for line in answer.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_it_says_what_it_is(tree: httpx.Client) -> None:
    assert tree.get("/health").status_code == 200
    assert tree.get("/model_info").headers["X-Stand-In"] == NOTICE
    info = parse_server_info(tree.get("/server_info").text)
    assert (info.algorithm, info.mode, info.budget, info.topk_cap) == ("DDTREE", "tree", 16, 8)
    assert info.version == "0.5.17"
    assert info.stand_in
    assert weight_version(tree.get("/model_info").text) == "r1"
    assert tree.get("/v1/models").json()["data"][0]["max_model_len"] == 4096
    assert tree.get("/nothing").status_code == 404


def test_trees_and_plain_decoding_answer_alike(tree: httpx.Client, plain: httpx.Client) -> None:
    with_tree, without = ask(tree), ask(plain)
    assert with_tree["output_ids"] == without["output_ids"]
    assert with_tree["text"] == without["text"]
    assert with_tree["text"] == tokenizer().decode(with_tree["output_ids"])
    meta = with_tree["meta_info"]
    assert meta["finish_reason"] == {"type": "length", "length": 24}
    assert meta["completion_tokens"] == 24
    assert meta["prompt_tokens"] == len(tokenizer().encode(TEXT).ids)
    assert meta["spec_accept_length"] == pytest.approx(24 / meta["spec_verify_ct"])
    assert sum(meta["spec_correct_drafts_histogram"]) == meta["spec_verify_ct"]
    assert "spec_verify_ct" not in without["meta_info"]


def test_sampling_is_seeded(tree: httpx.Client, plain: httpx.Client) -> None:
    sampling = {"temperature": 0.9, "top_p": 0.95, "max_new_tokens": 16, "sampling_seed": 11}
    one, two = (ask(http, sampling_params=sampling)["output_ids"] for http in (tree, plain))
    assert one == two
    other = ask(plain, sampling_params={**sampling, "sampling_seed": 12})["output_ids"]
    assert other != one


def test_a_stream_grows_to_the_same_answer(tree: httpx.Client) -> None:
    body = {"text": TEXT, "sampling_params": {"temperature": 0, "max_new_tokens": 24}}
    parts = events(tree, "/generate", {**body, "stream": True})
    assert parts[-1]["text"] == ask(tree)["text"]
    assert len(parts) > 2
    assert all(b["text"].startswith(a["text"]) for a, b in itertools.pairwise(parts))
    assert [p["meta_info"]["finish_reason"] is None for p in parts] == [True] * (len(parts) - 1) + [False]


def test_openai_completions_whole_and_streamed(tree: httpx.Client) -> None:
    body = {"prompt": TEXT, "max_tokens": 20, "temperature": 0}
    whole = tree.post("/v1/completions", json=body).json()
    assert whole["usage"]["completion_tokens"] == 20
    assert whole["choices"][0]["finish_reason"] == "length"
    parts = events(tree, "/v1/completions", {**body, "stream": True, "stream_options": {"include_usage": True}})
    text = "".join(choice["text"] for part in parts for choice in part["choices"])
    assert text == whole["choices"][0]["text"]
    assert parts[-1]["usage"] == whole["usage"]


def test_stop_strings_and_tokens_end_an_answer(plain: httpx.Client) -> None:
    free = ask(plain)
    stop = free["text"].strip()[4:9]
    cut = ask(plain, sampling_params={"temperature": 0, "max_new_tokens": 24, "stop": stop})
    assert cut["text"] == free["text"].split(stop)[0]
    assert cut["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    token = free["output_ids"][5]
    first = free["output_ids"].index(token)
    by_id = ask(plain, sampling_params={"temperature": 0, "max_new_tokens": 24, "stop_token_ids": [token]})
    assert by_id["output_ids"] == free["output_ids"][: first + 1]
    assert by_id["meta_info"]["finish_reason"] == {"type": "stop", "matched": token}


def test_log_probabilities_without_speculation_only(plain: httpx.Client, tree: httpx.Client) -> None:
    meta = ask(plain, return_logprob=True, top_logprobs_num=2)["meta_info"]
    assert len(meta["output_token_logprobs"]) == 24
    for (logp, token, _), best in zip(meta["output_token_logprobs"], meta["output_top_logprobs"], strict=True):
        assert best[0][:2] == [logp, token]
        assert best[0][0] >= best[1][0]
    refused = tree.post("/generate", json={"text": TEXT, "return_logprob": True})
    assert refused.status_code == 400
    assert "return_logprob" in refused.json()["error"]["message"]
    (streamed,) = events(tree, "/generate", {"text": TEXT, "return_logprob": True, "stream": True})
    assert streamed["error"]["message"] == refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("/generate", {}, "Either text, input_ids"),
        ("/generate", {"input_ids": [1, 99999]}, "outside the vocabulary"),
        ("/generate", {"text": "a", "sampling_params": {"repetition_penalty": 1.2}}, "repetition_penalty"),
        ("/generate", {"text": "a", "sampling_params": {"temperature": -1}}, "temperature"),
        ("/generate", {"input_ids": [5] * 5000}, "context length"),
        ("/v1/completions", {"prompt": ""}, "Prompt cannot be empty"),
    ],
)
def test_wrong_requests_are_refused(plain: httpx.Client, path: str, body: dict[str, Any], says: str) -> None:
    answer = plain.post(path, json=body)
    assert answer.status_code == 400
    assert says in answer.text


def test_requests_side_by_side_do_not_disturb_each_other(tree: httpx.Client) -> None:
    texts = [tokenizer().decode(ids) for ids in prompts()[:3]]
    alone = [ask(tree, text=text)["output_ids"] for text in texts]
    together: dict[int, list[int]] = {}

    def one(number: int) -> None:
        together[number] = ask(tree, text=texts[number])["output_ids"]

    threads = [threading.Thread(target=one, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [together[number] for number in range(3)] == alone


def test_an_abort_ends_a_request(plain: httpx.Client) -> None:
    body = {
        "text": TEXT,
        "rid": "long-1",
        "stream": True,
        "sampling_params": {"temperature": 0, "max_new_tokens": 4000},
    }
    with plain.stream("POST", "/generate", json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        plain.post("/abort_request", json={"rid": "long-1"})
        last = [line for line in lines if line.startswith("data: {")][-1]
    assert json.loads(last[6:])["meta_info"]["finish_reason"]["type"] == "abort"


def test_metrics_are_sglangs(tree: httpx.Client) -> None:
    ask(tree)
    served = parse_metrics(tree.get("/metrics").text)
    assert served.accept_length is not None
    assert served.accept_length > 1.5
    assert served.running == 0
    shown = tree.get("/server_info").json()["internal_states"][0]["ddtree"]["counters"]
    assert shown["nodes_per_tree"] == 16
    assert shown["accepted_per_tree"] == pytest.approx(served.accept_length - 1, abs=0.001)
    assert len(shown["acceptance_by_depth"]) == 15


def test_half_a_character_waits_for_the_rest(plain: httpx.Client) -> None:
    sampling = {"temperature": 1.3, "max_new_tokens": 40, "sampling_seed": 2}
    body = {"text": "# na\u00efve caf\u00e9 \u2014 ", "stream": True, "sampling_params": sampling}
    parts = events(plain, "/generate", body)
    assert all("\ufffd" not in part["text"] for part in parts[:-1])


def test_an_api_key_is_asked_for() -> None:
    for http in client([*MODEL, "--api-key", "k"]):
        assert http.get("/health").status_code == 200
        assert http.get("/model_info").status_code == 401
        assert http.get("/model_info", headers={"Authorization": "Bearer k"}).status_code == 200
        shown = http.get("/server_info", headers={"Authorization": "Bearer k"}).json()
        assert shown["api_key"] == shown["internal_states"][0]["api_key"] == "***"


def test_the_process_starts_serves_and_drains(tmp_path: Path) -> None:
    source = Path(args.__file__).parents[2]
    argv = [*MODEL, *TREE, "--port", "0", "--mem-fraction-static", "0.8"]
    process = subprocess.Popen(
        [sys.executable, "-m", "sglang_ddtree.cpu.server", *argv],
        stdout=subprocess.PIPE, text=True, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(source)},
    )  # fmt: skip
    try:
        assert process.stdout is not None
        seen, port = "", None
        for line in process.stdout:
            seen += line
            if found := re.search(r"running on http://127.0.0.1:(\d+)", line):
                port = int(found[1])
            if "ready to roll" in line:
                break
        assert port, seen
        assert NOTICE in seen
        assert "Without effect on a CPU: --mem-fraction-static" in seen
        body = {"text": TEXT, "sampling_params": {"temperature": 0, "max_new_tokens": 8}}
        answer = httpx.post(f"http://127.0.0.1:{port}/generate", json=body, timeout=60)
        session = Session(pair(np.float32), Mode("ar"), tokenizer().encode(TEXT).ids, Sampling())
        assert answer.json()["output_ids"] == session.generate(8)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=120) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
