"""What real servers of SGLang 0.5.17 with the plugin said on an H200, as benchmarks/gpu/capture.py wrote it down.

Two of the benchmark's servers, of eight requests at most: tree-16 gave the exchanges and the first log, tree-32-records
the second.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks/results/gpu/server"
PAIR = ROOT / "patches/selftest-pair"
ARGV = (
    "--model-path", "patches/selftest-pair/target", "--attention-backend", "triton", "--sampling-backend", "pytorch",
    "--grammar-backend", "none", "--page-size", "1", "--max-running-requests", "8", "--cuda-graph-max-bs-decode", "8",
    "--max-total-tokens", "24000", "--mem-fraction-static", "0.8", "--disable-radix-cache",
    "--disable-prefill-cuda-graph", "--random-seed", "7", "--host", "127.0.0.1", "--speculative-algorithm", "DDTREE",
    "--speculative-draft-model-path", "patches/selftest-pair/drafter", "--speculative-draft-attention-backend",
    "triton", "--speculative-ddtree-allow-hybrid-unsafe", "--speculative-ddtree-mode", "tree",
    "--speculative-ddtree-budget", "16", "--speculative-ddtree-states", "snapshots", "--port", "31300",
    "--log-level", "info", "--enable-metrics",
)  # fmt: skip
LOG, LOG_OF_RECORDS = "startup.log", "startup-records.log"


@functools.cache
def exchanges() -> dict[str, dict[str, Any]]:
    """{name: {name, request: {method, path, body}, status, type, body}}."""
    return {each["name"]: each for each in json.loads((FOLDER / "exchanges.json").read_text())}


def body(name: str) -> str:
    text = exchanges()[name]["body"]
    assert isinstance(text, str)
    return text


def answer(name: str) -> Any:
    return json.loads(body(name))


def log(name: str) -> str:
    return (FOLDER / name).read_text()


def events(text: str) -> list[Any]:
    """The events of a stream, its framing checked to the byte."""
    *frames, rest = text.split("\n\n")
    assert (frames[-1], rest) == ("data: [DONE]", "")
    assert all(frame.startswith("data: {") and "\n" not in frame for frame in frames[:-1])
    return [json.loads(frame[6:]) for frame in frames[:-1]]


def differences(real: Any, ours: Any, at: str = "") -> set[str]:
    """Where one JSON value is built otherwise than another: names that only one has, and other types. Of lists the
    first members are compared.
    """
    if type(real) is not type(ours):
        return {f"{at} is {type(ours).__name__}, not {type(real).__name__}"}
    if isinstance(real, list):
        return differences(real[0], ours[0], f"{at}[]") if real and ours else set()
    if not isinstance(real, dict):
        return set()
    found = {f"{at}.{name} is absent" for name in real.keys() - ours.keys()}
    found |= {f"{at}.{name} is new" for name in ours.keys() - real.keys()}
    return found.union(*(differences(real[name], ours[name], f"{at}.{name}") for name in real.keys() & ours.keys()))


@contextmanager
def replayed() -> Iterator[int]:
    """The port of a server that gives each captured answer to the request that it was captured for."""
    known = {key(each["request"]): each for each in exchanges().values()}

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.answer(None)

        def do_POST(self) -> None:
            self.answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def answer(self, asked: Any) -> None:
            found = known[key({"method": self.command, "path": self.path, "body": asked})]
            data = found["body"].encode()
            streamed = found["type"].startswith("text/event-stream")
            self.send_response(found["status"])
            if found["type"]:
                self.send_header("Content-Type", found["type"])
            self.send_header(*(("Transfer-Encoding", "chunked") if streamed else ("Content-Length", str(len(data)))))
            self.end_headers()
            self.wfile.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(data), data) if streamed else data)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with serving(ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as port:
        yield port


@contextmanager
def serving(server: HTTPServer) -> Iterator[int]:
    """The port of a server that answers meanwhile."""
    Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()


def key(request: dict[str, Any]) -> str:
    return json.dumps([request["method"], request["path"], request["body"]], sort_keys=True)
