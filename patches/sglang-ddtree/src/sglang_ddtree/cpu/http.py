"""The HTTP side: SGLang's paths, bodies and status codes."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from sglang_ddtree import SGLANG_VERSION
from sglang_ddtree.cpu import NOTICE
from sglang_ddtree.cpu.asks import BadRequest, NoJson, Unforeseen, parse_completions, parse_generate
from sglang_ddtree.cpu.serving import Engine, Request

OPEN_PATHS = ("/health", "/ready", "/metrics")
SECRETS = ("api_key", "admin_api_key", "ssl_keyfile_password")


def dumps(value: Any) -> str:
    """JSON as SGLang writes it: nothing between the words, and no character escaped that need not be."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


class State:
    """What every request sees: the engine, and where the server is in its life (starting, up, draining)."""

    def __init__(self, engine: Engine, argv: list[str]) -> None:
        self.engine, self.argv = engine, argv
        self.life = "starting"
        self.started = time.time()

    @property
    def args(self) -> dict[str, Any]:
        return self.engine.launch.args

    def model_info(self) -> dict[str, Any]:
        model = self.engine.launch.model
        return {
            "model_path": self.args["model_path"],
            "tokenizer_path": self.args["tokenizer_path"],
            "is_generation": True,
            "preferred_sampling_params": self.args.get("preferred_sampling_params"),
            "weight_version": self.args["weight_version"],
            "has_image_understanding": False,
            "has_audio_understanding": False,
            "model_type": model.get("model_type"),
            "architectures": model.get("architectures"),
        }

    def server_info(self) -> dict[str, Any]:
        engine, counters = self.engine, self.engine.live_counters()
        args = {name: "***" if name in SECRETS and value else value for name, value in self.args.items()}
        internal: dict[str, Any] = {
            **args,
            "last_gen_throughput": engine.last_throughput,
            "effective_max_running_requests_per_dp": self.args.get("max_running_requests") or 48,
        }
        if engine.launch.mode.drafts and counters.accept_length is not None:
            internal["avg_spec_accept_length"] = counters.accept_length
        if engine.launch.ddtree is not None:
            shown = counters.public(engine.launch.mode, engine.launch.block)
            internal["ddtree"] = {**engine.launch.ddtree, **({"counters": shown} if shown else {})}
        return {
            **args,
            "status": "ready" if self.life == "up" else self.life,
            "max_total_num_tokens": engine.capacity,
            "max_req_input_len": engine.context - 6,
            "startup_time": {"load_weight": engine.load_s},
            "internal_states": [internal],
            "version": SGLANG_VERSION,
            "kv_events": None,
            "stand_in": NOTICE,
            "launch_command": " ".join(self.argv),
        }

    def models(self) -> dict[str, Any]:
        name = self.args["served_model_name"]
        card = {
            "id": name, "object": "model", "created": int(self.started), "owned_by": "sglang", "root": name,
            "parent": None, "max_model_len": self.engine.context,
        }  # fmt: skip
        return {"object": "list", "data": [card]}


def native(request: Request, engine: Engine) -> dict[str, Any]:
    """The answer of /generate."""
    meta: dict[str, Any] = {
        "id": request.ask.rid,
        "finish_reason": request.finish,
        "prompt_tokens": len(request.ask.prompt),
        "weight_version": engine.launch.args["weight_version"],
        "num_retractions": 0,
        "reasoning_tokens": 0,
        "completion_tokens": len(request.tokens),
        "cached_tokens": 0,
        "cached_tokens_details": None,
        "dp_rank": None,
    }
    if request.finish is not None:
        meta["e2e_latency"] = request.age
        meta |= speculation(request, engine.launch.rows - 1) if engine.launch.mode.drafts else {}
    if request.ask.logprobs is not None:
        meta["output_token_logprobs"] = [[logp, token, None] for logp, token, _ in request.logprobs]
        meta["output_top_logprobs"] = [[[p, t, None] for p, t in others] for _, _, others in request.logprobs]
    return {"text": request.text, "output_ids": list(request.tokens), "meta_info": meta}


def speculation(request: Request, offered: int) -> dict[str, Any]:
    """What a finished request says of its rounds, each of ``offered`` nodes; nothing if it had none."""
    counters = request.session.counters
    if not counters.rounds:
        return {}
    drafts = {"correct": counters.accepted, "proposed": counters.rounds * offered}
    accepted = [counters.histogram.get(n + 1, 0) for n in range(max(counters.histogram))]
    return {
        "spec_accept_rate": drafts["correct"] / max(drafts["proposed"], 1),
        "spec_accept_length": len(request.tokens) / counters.rounds,
        **{f"spec_num_{name}_drafts": count for name, count in drafts.items()},
        "spec_verify_ct": counters.rounds,
        "spec_accepted_drafts": drafts["correct"],
        "spec_proposed_drafts": drafts["proposed"],
        "spec_correct_drafts_histogram": accepted,
        "spec_accept_histogram": accepted,
    }


def openai(requests: list[Request], delta: str | None, model: str) -> dict[str, Any]:
    """The answer of /v1/completions, or one event of its stream."""
    choices = [
        {
            "index": index,
            "text": request.text if delta is None else delta,
            "logprobs": None,
            "finish_reason": request.finish["type"] if request.finish else None,
            "matched_stop": (request.finish or {}).get("matched"),
        }
        for index, request in enumerate(requests)
    ]
    return {
        "id": requests[0].ask.rid, "object": "text_completion", "created": int(time.time()), "model": model,
        "choices": choices,
    }  # fmt: skip


def usage(requests: list[Request]) -> dict[str, Any]:
    prompt = sum(len(request.ask.prompt) for request in requests)
    done = sum(len(request.tokens) for request in requests)
    return {
        "prompt_tokens": prompt, "total_tokens": prompt + done, "completion_tokens": done,
        "prompt_tokens_details": None, "reasoning_tokens": 0,
    }  # fmt: skip


class Handler(BaseHTTPRequestHandler):
    """One connection. ``state`` is set on the class that ``serve`` makes."""

    protocol_version = "HTTP/1.1"
    server_version = "ddtree-cpu-reference"
    state: State

    # ---- in and out

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:  # noqa: ARG002
        host, port = self.client_address[:2]
        status = HTTPStatus(int(code))
        said = f'{host}:{port} - "{self.command} {self.path} HTTP/1.1" {status.value} {status.phrase}'
        print(time.strftime("[%Y-%m-%d %H:%M:%S] ") + f"INFO:     {said}", flush=True)

    def _answer(self, status: int, body: Any = None, kind: str = "application/json") -> None:
        data = b"" if body is None else (body if isinstance(body, str) else dumps(body)).encode()
        self.send_response(status)
        if body is not None:
            self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("X-Stand-In", NOTICE)
        self.end_headers()
        self.wfile.write(data)

    def _refuse(self, error: BadRequest) -> None:
        if self.path.startswith("/v1/") or isinstance(error, NoJson):
            kind = "Bad Request" if isinstance(error, NoJson) else "BadRequestError"
            self._answer(400, {"object": "error", "message": str(error), "type": kind, "param": None, "code": 400})
        else:
            self._answer(400, {"error": {"message": str(error)}})

    def _body(self) -> dict[str, Any]:
        length = int(self.headers.get("Content-Length") or 0)
        try:
            body = json.loads(self.rfile.read(length) or b"{}")
        except ValueError as error:
            raise NoJson(f"1 validation error: JSON decode error: {error}") from None
        if not isinstance(body, dict):
            raise NoJson("1 validation error: the body is not a JSON object")
        return body

    def _allowed(self, path: str) -> bool:
        key = self.state.args.get("api_key")
        return not key or path.startswith(OPEN_PATHS) or self.headers.get("Authorization") == f"Bearer {key}"

    # ---- paths

    def do_GET(self) -> None:
        path, state = self.path.partition("?")[0], self.state
        answers: dict[str, Callable[[], Any]] = {
            "/model_info": state.model_info, "/get_model_info": state.model_info,
            "/server_info": state.server_info, "/get_server_info": state.server_info,
            "/weight_version": lambda: {"weight_version": state.args["weight_version"]},
            "/v1/models": state.models,
        }  # fmt: skip
        if not self._allowed(path):
            self._answer(401, {"error": "Unauthorized"})
        elif path in ("/health", "/health_generate"):
            self._answer(200 if state.life == "up" else 503)
        elif path in answers:
            self._answer(200, answers[path]())
        elif path.rstrip("/") == "/metrics" and state.args.get("enable_metrics"):
            self._answer(200, state.engine.metrics(), "text/plain; version=0.0.4; charset=utf-8")
        elif path == "/":
            self._answer(200, NOTICE + "\n", "text/plain")
        else:
            self._answer(404, {"detail": "Not Found"})

    def do_POST(self) -> None:
        path = self.path.partition("?")[0]
        try:
            body = self._body()
            if not self._allowed(path):
                self._answer(401, {"error": "Unauthorized"})
            elif path == "/generate":
                self._generate(body)
            elif path == "/v1/completions":
                self._completions(body)
            elif path == "/abort_request":
                self.state.engine.abort(str(body.get("rid") or ""), bool(body.get("abort_all")))
                self._answer(200)
            elif path == "/flush_cache":
                self._answer(200, "Cache flushed.\n", "text/plain")
            else:
                self._answer(404, {"detail": "Not Found"})
        except BadRequest as error:
            self._refuse(error)
        except Unforeseen as error:
            print(f"ERROR:    {error}", flush=True)
            self._answer(500, "Internal Server Error", "text/plain; charset=utf-8")

    do_PUT = do_POST

    # ---- completions

    def _generate(self, body: dict[str, Any]) -> None:
        engine = self.state.engine
        try:
            asks, many = parse_generate(body, engine.tokenizer)
            requests = [engine.new(ask) for ask in asks]
        except BadRequest as error:
            if not body.get("stream"):
                raise
            self._refuse_stream(error)
            return
        if body.get("stream"):
            self._stream(requests[0], lambda request, _: native(request, engine))
            return
        self._run(requests)
        answers = [native(request, engine) for request in requests]
        self._answer(200, answers if many else answers[0])

    def _completions(self, body: dict[str, Any]) -> None:
        engine = self.state.engine
        requests = [engine.new(ask) for ask in parse_completions(body, engine.tokenizer)]
        model = str(body.get("model") or self.state.args["served_model_name"])
        if body.get("stream"):
            final = bool((body.get("stream_options") or {}).get("include_usage"))
            self._stream(
                requests[0],
                lambda request, delta: openai([request], delta, model) | {"usage": None},
                model if final else None,
            )
            return
        self._run(requests)
        metadata = {"weight_version": self.state.args["weight_version"]}
        self._answer(200, {**openai(requests, None, model), "usage": usage(requests), "metadata": metadata})

    def _run(self, requests: list[Request]) -> None:
        for request in requests:
            for _ in self.state.engine.decode(request):
                pass

    def _stream(self, request: Request, event: Callable[[Request, str], Any], usage_for: str | None = None) -> None:
        """Server-sent events, one for each round, then [DONE]. A client that goes away aborts the request."""
        self._begin_stream()
        try:
            for delta in self.state.engine.decode(request, streamed=True):
                self._event(dumps(event(request, delta)))
            if usage_for is not None:
                self._event(dumps({**openai([request], "", usage_for), "choices": [], "usage": usage([request])}))
            self._end_stream()
        except (BrokenPipeError, ConnectionResetError):
            request.aborted.set()
            self.close_connection = True

    def _refuse_stream(self, error: BadRequest) -> None:
        """SGLang has answered 200 by the time it looks at what a stream asks for: the refusal is an event."""
        self._begin_stream()
        said = {"message": str(error), "type": "invalid_request_error", "code": 400, "retryable": False}
        self._event(dumps({"error": said}))
        self._end_stream()

    def _begin_stream(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Transfer-Encoding", "chunked")
        self.send_header("X-Stand-In", NOTICE)
        self.end_headers()

    def _end_stream(self) -> None:
        self._event("[DONE]")
        self.wfile.write(b"0\r\n\r\n")

    def _event(self, data: str) -> None:
        payload = f"data: {data}\n\n".encode()
        self.wfile.write(b"%x\r\n%s\r\n" % (len(payload), payload))
        self.wfile.flush()


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no error of ours; anything else is, and belongs in the log."""
        if not isinstance(sys.exc_info()[1], (BrokenPipeError, ConnectionResetError)):
            super().handle_error(request, client_address)


def serve(host: str, port: int, state: State) -> Server:
    """A listening server; OSError if the port is taken."""
    return Server((host, port), type("BoundHandler", (Handler,), {"state": state}))
