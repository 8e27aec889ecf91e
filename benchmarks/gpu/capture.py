"""What a real server says: `python -m benchmarks.gpu.capture --out DIR` starts one arm of a benchmark's file, asks it
everything that ddtree-ops asks, and writes the answers and the log of the start without this host's paths and names.

    DIR/exchanges.json   [{"name", "request": {"method", "path", "body"}, "status", "type", "body"}]
    DIR/startup.log      what it logged until it was healthy
    DIR/summary.json     the lines about memory, what was asked, and what is wrong
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.engine import launch

ROOT = Path(__file__).parents[2]
ARMS = ROOT / "benchmarks/engine/h200.toml"
MORE = ("--log-level", "info", "--enable-metrics")
UP_S, ASK_S = 240.0, 60.0
TEXT = "def read_config(path):\n"
MEMORY = ("mem usage", "avail mem", "memory", "GB", "#tokens", "max_total_num_tokens", "mamba", "KV Cache", "ssm")


@dataclass(frozen=True)
class Question:
    """One request and what its answer must have. ok: whether it is to be served or refused, None if either will do."""

    name: str
    method: str
    path: str
    body: Any = None
    ok: bool | None = True
    holds: tuple[str, ...] = ()


def generate(**more: Any) -> dict[str, Any]:
    return {"text": TEXT, "sampling_params": {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}, **more}


def completion(**more: Any) -> dict[str, Any]:
    return {"model": "default", "prompt": TEXT, "max_tokens": 24, "temperature": 0, **more}


QUESTIONS = (
    Question("health", "GET", "/health"),
    Question("health-generate", "GET", "/health_generate"),
    Question("model-info", "GET", "/model_info", holds=("model_path",)),
    Question("get-model-info", "GET", "/get_model_info", holds=("model_path",)),
    Question("server-info", "GET", "/server_info", holds=("internal_states", '"ddtree"', "speculative_algorithm")),
    Question("models", "GET", "/v1/models", holds=('"data"',)),
    Question("generate", "POST", "/generate", generate(), holds=("output_ids", "spec_verify_ct")),
    Question("generate-stream", "POST", "/generate", generate(stream=True), holds=("data: {", "data: [DONE]")),
    Question("generate-seeded", "POST", "/generate",
             generate(sampling_params={"temperature": 1, "max_new_tokens": 24, "sampling_seed": 7})),
    Question("completion", "POST", "/v1/completions", completion(), holds=('"usage"',)),
    Question("completion-stream", "POST", "/v1/completions", completion(stream=True), holds=("data: [DONE]",)),
    Question("metrics", "GET", "/metrics", holds=("sglang:",)),
    Question("server-info-after", "GET", "/server_info", holds=('"ddtree"',)),
    Question("error-logprob", "POST", "/generate", generate(return_logprob=True), ok=False),
    Question("error-sampling", "POST", "/generate", generate(sampling_params={"temperature": -1}), ok=False),
    Question("error-unknown-parameter", "POST", "/generate", generate(sampling_params={"no_such": 1}), ok=None),
    Question("error-too-long", "POST", "/generate", {"input_ids": [5] * 200_000, "sampling_params": {}}, ok=False),
    Question("error-no-json", "POST", "/generate", "{", ok=False),
    Question("error-no-such-path", "GET", "/no_such_path", ok=False),
    Question("health-at-the-end", "GET", "/health"),
)  # fmt: skip


def ask(port: int, question: Question, timeout_s: float = ASK_S) -> dict[str, Any]:
    """The answer as it came, whatever its status; status 0 where none came."""
    body = question.body if isinstance(question.body, str) else json.dumps(question.body)
    sent = None if question.body is None else body.encode()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
    try:
        connection.request(question.method, question.path, sent, {"Content-Type": "application/json"})
        response = connection.getresponse()
        status, kind, text = response.status, response.getheader("Content-Type", ""), response.read().decode()
    except (OSError, http.client.HTTPException) as error:
        status, kind, text = 0, "", f"{type(error).__name__}: {error}"
    finally:
        connection.close()
    shown = question.body if len(body) < 4000 else f"{len(body)} bytes"
    request = {"method": question.method, "path": question.path, "body": shown}
    return {"name": question.name, "request": request, "status": status, "type": kind, "body": text}


def wrong(question: Question, answer: Mapping[str, Any]) -> list[str]:
    """What is missing in an answer."""
    served = 200 <= answer["status"] < 300
    if answer["status"] == 0 or question.ok not in (None, served):
        return [f"{question.name}: status {answer['status']}: {answer['body'][:200]}"]
    return [f"{question.name}: no {text} in the answer" for text in question.holds if text not in answer["body"]]


def scrub(text: str, names: Mapping[str, str]) -> str:
    """Without this host's paths and names; the longest first, since some lie within others."""
    for name in sorted(names, key=len, reverse=True):
        text = text.replace(name, names[name])
    return text


def own_names() -> dict[str, str]:
    """What must not leave this host, and what is written instead."""
    site = {path: "<site>" for path in (*sys.path, sys.prefix, sys.base_prefix) if len(path) > 5}
    names = {**site, str(Path.home()): "<home>", str(ROOT): "<repository>", socket.gethostname(): "<host>"}
    return {name: shown for name, shown in names.items() if len(name) > 3}


def memory_lines(log: str) -> list[str]:
    return [line for line in log.splitlines() if any(word in line for word in MEMORY) and "ServerArgs(" not in line]


@contextlib.contextmanager
def server(argv: list[str], environment: Mapping[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A server in a session of its own, ended with all it started."""
    with log.open("wb") as out:
        process = subprocess.Popen(argv, stdout=out, stderr=subprocess.STDOUT, env=dict(environment), cwd=ROOT,
                                   start_new_session=True)  # fmt: skip
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait(process: subprocess.Popen[bytes], port: int) -> bool:
    until = time.monotonic() + UP_S
    while time.monotonic() < until and process.poll() is None:
        if ask(port, QUESTIONS[0], 30)["status"] == 200:
            return True
        time.sleep(0.5)
    return False


def capture(argv: list[str], environment: Mapping[str, str], port: int, out: Path) -> list[str]:
    """Write the three files; returns what is wrong."""
    names = own_names() | {str(out.resolve()): "<out>"}
    raw = out / "server.log"
    answers: list[dict[str, Any]] = []
    found: list[str] = []
    with server(argv, environment, raw) as process:
        up = wait(process, port)
        started = raw.read_text(errors="replace")
        if not up:
            last = [line for line in started.splitlines() if line.strip()][-3:]
            found = ["the server did not become healthy", *last]
        for question in QUESTIONS if up else ():
            answers.append(ask(port, question))
            found += wrong(question, answers[-1])
    found = [scrub(line, names) for line in found]
    exchanges = [{**answer, "body": scrub(answer["body"], names)} for answer in answers]
    (out / "exchanges.json").write_text(json.dumps(exchanges, indent=1) + "\n")
    (out / "startup.log").write_text(scrub(started, names))
    raw.write_text(scrub(raw.read_text(errors="replace"), names))
    shown = [{"name": answer["name"], "status": answer["status"], "bytes": len(answer["body"])} for answer in answers]
    lines = memory_lines(scrub(started, names))
    (out / "summary.json").write_text(json.dumps({"wrong": found, "asked": shown, "memory": lines}, indent=1) + "\n")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--arms", type=Path, default=ARMS, help="a benchmark's file of servers")
    parser.add_argument("--arm", default="tree-16")
    parser.add_argument("--port", type=int, default=31300)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the server ends, too
    table = tomllib.loads(options.arms.read_text())
    entry = next(one for one in table["arm"] if one["name"] == options.arm)
    launch.require_free(options.port)
    argv = [*launch.command(table, {**entry, "port": options.port}), *MORE]
    found = capture(argv, {**os.environ, **table.get("env", {})}, options.port, options.out)
    print("\n".join(found) or "everything was answered")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
