"""The HTTP side: SGLang's paths, bodies and status codes, answered by the stand-in's engine."""

from __future__ import annotations

import json
import sys
import time
import uuid
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from . import NOTICE
from .decoding import Engine, Prompt, Request, length_of, text_of
from .settings import Settings

SECRETS = ("api_key", "admin_api_key", "ssl_keyfile_password")  # as our patch of SGLang hides them


def dumps(value: Any) -> str:
    """JSON as SGLang writes it."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


class State:
    """What every request sees: the engine, and where the server is in its life (starting, up, draining)."""

    def __init__(self, engine: Engine, version: str, argv: list[str], paths: tuple[str, ...]) -> None:
        self.engine, self.version, self.argv, self.paths = engine, version, argv, paths
        self.life = "starting"
        self.started = time.time()

    @property
    def settings(self) -> Settings:
        return self.engine.settings

    @property
    def weight_version(self) -> str:
        return str(self.engine.faults.weight_version or self.settings.args["weight_version"])

    def model_info(self) -> dict[str, Any]:
        args, model = self.settings.args, self.settings.model
        return {
            "model_path": args["model_path"], "tokenizer_path": args["tokenizer_path"], "is_generation": True,
            "preferred_sampling_params": args.get("preferred_sampling_params"), "weight_version": self.weight_version,
            "has_image_understanding": False, "has_audio_understanding": False,
            "model_type": model.get("model_type"), "architectures": model.get("architectures"),
        }  # fmt: skip

    def server_info(self) -> dict[str, Any]:
        args = {name: "***" if name in SECRETS and value else value for name, value in self.settings.args.items()}
        internal: dict[str, Any] = {
            **args,
            "last_gen_throughput": self.engine.last_throughput,
            "effective_max_running_requests_per_dp": self.settings.args.get("max_running_requests") or 256,
        }
        accept = self.engine.mean_accept_length()
        if accept is not None:
            internal["avg_spec_accept_length"] = accept
        if self.settings.ddtree is not None:
            internal["ddtree"] = dict(self.settings.ddtree)
        return {
            **args, "weight_version": self.weight_version,
            "status": "ready" if self.life == "up" else self.life, "max_total_num_tokens": 262144,
            "max_req_input_len": 262138, "startup_time": {"load_weight": self.engine.faults.load_s},
            "internal_states": [internal], "version": self.version, "kv_events": None,
            "stand_in": NOTICE, "launch_command": " ".join(self.argv),
        }  # fmt: skip


class Handler(BaseHTTPRequestHandler):
    """One connection. ``state`` is set on the class that ``serve`` makes."""

    protocol_version = "HTTP/1.1"
    server_version = "ddtree-standin"
    state: State

    # ---- in and out

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:  # noqa: ARG002
        host, port = self.client_address[:2]
        status = HTTPStatus(int(code))
        said = f'{host}:{port} - "{self.command} {self.path} HTTP/1.1" {status.value} {status.phrase}'
        sys.stdout.write(time.strftime("[%Y-%m-%d %H:%M:%S] ") + f"INFO:     {said}\n")
        sys.stdout.flush()

    def _answer(self, status: int, body: Any = None, kind: str = "application/json") -> None:
        data = b"" if body is None else (body if isinstance(body, str) else dumps(body)).encode()
        self.send_response(status)
        if body is not None:
            self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("X-Stand-In", NOTICE)
        self.end_headers()
        self.wfile.write(data)

    def _body(self) -> dict[str, Any]:
        length = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(length) or b"{}")
        if not isinstance(body, dict):
            raise ValueError("the body is not a JSON object")
        return body

    def _allowed(self, path: str) -> bool:
        key = self.state.settings.args.get("api_key")
        open_paths = ("/health", "/ready", "/metrics")
        return not key or path.startswith(open_paths) or self.headers.get("Authorization") == f"Bearer {key}"

    # ---- paths

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        state = self.state
        if not self._allowed(path):
            self._answer(401, {"error": "Unauthorized"})
        elif path in ("/health", "/health_generate"):
            self._health()
        elif path == "/ready" and "/ready" in state.paths:
            self._answer(200 if state.life == "up" else 503)
        elif path in ("/model_info", "/get_model_info"):
            self._answer(200, state.model_info())
        elif path in ("/server_info", "/get_server_info"):
            self._answer(200, state.server_info())
        elif path == "/v1/models":
            name = state.settings.args["served_model_name"]
            card = {"id": name, "object": "model", "created": int(state.started), "owned_by": "sglang", "root": name,
                    "parent": None, "max_model_len": state.settings.args.get("context_length") or 262144}  # fmt: skip
            self._answer(200, {"object": "list", "data": [card]})
        elif path.rstrip("/") == "/metrics" and state.settings.args.get("enable_metrics"):
            self._answer(200, state.engine.metrics(), "text/plain; version=0.0.4; charset=utf-8")
        elif path == "/":
            self._answer(200, NOTICE + "\n", "text/plain")
        else:
            self._answer(404, {"detail": "Not Found"})

    def _health(self) -> None:
        if self.state.life != "up":
            self._answer(503)
            return
        time.sleep(1)  # as SGLang: it looks for the first time after one second
        self._answer(200 if self.state.life == "up" else 503)

    def do_POST(self) -> None:
        path = self.path.partition("?")[0]
        try:
            body = self._body()
        except ValueError as error:
            said = f"1 validation error: JSON decode error: {error}"
            refusal = {"object": "error", "message": said, "type": "Bad Request", "param": None, "code": 400}
            self._answer(400, refusal)
            return
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

    do_PUT = do_POST

    # ---- completions

    def _generate(self, body: dict[str, Any]) -> None:
        prompts = body.get("text") if body.get("text") is not None else body.get("input_ids")
        many = isinstance(prompts, list) and bool(prompts) and isinstance(prompts[0], (str, list))
        if prompts in (None, "", []) or (many and body.get("stream")):
            message = "Either text, input_ids or input_embeds should be provided."
            self._answer(400, {"error": {"message": message}})
            return
        if body.get("return_logprob") and self.state.settings.block_size:
            self._answer(
                400, {"error": {"message": "DFLASH speculative decoding does not support return_logprob yet."}}
            )
            return
        sampling = body.get("sampling_params") or {}
        limit = int(sampling.get("max_new_tokens") or 128)
        requests = [self._new(prompt, limit, body.get("rid")) for prompt in (prompts if many else [prompts])]
        if body.get("stream"):
            self._stream(requests[0], lambda request, _: self._native(request, body))
            return
        for request in requests:
            for _ in self.state.engine.decode(request):
                pass
        answers = [self._native(request, body) for request in requests]
        self._answer(200, answers if many else answers[0])

    def _new(self, prompt: Prompt, limit: int, rid: str | None) -> Request:
        return Request(rid or uuid.uuid4().hex, prompt, limit)

    def _native(self, request: Request, body: dict[str, Any]) -> dict[str, Any]:
        finish = {"type": request.finish, "length": len(request.tokens)} if request.finish else None
        meta: dict[str, Any] = {
            "id": request.rid, "finish_reason": finish, "prompt_tokens": length_of(request.prompt),
            "weight_version": self.state.weight_version, "num_retractions": 0, "reasoning_tokens": 0,
            "completion_tokens": len(request.tokens), "cached_tokens": 0, "cached_tokens_details": None,
            "dp_rank": None,
        }  # fmt: skip
        if finish is not None:
            meta["e2e_latency"] = time.monotonic() - request.started
        if finish is not None and self.state.settings.block_size and request.rounds:
            meta["spec_verify_ct"] = request.rounds
            meta["spec_accept_length"] = len(request.tokens) / request.rounds
        if body.get("return_logprob"):
            meta["output_token_logprobs"] = [[-0.05, token, None] for token in request.tokens]
            count = int(body.get("top_logprobs_num") or 0)
            meta["output_top_logprobs"] = [
                [[-0.05 - 3.0 * rank, token + rank, None] for rank in range(count)] for token in request.tokens
            ]
        return {"text": text_of(request.tokens), "output_ids": list(request.tokens), "meta_info": meta}

    def _completions(self, body: dict[str, Any]) -> None:
        prompts = body.get("prompt")
        many = isinstance(prompts, list) and bool(prompts) and isinstance(prompts[0], (str, list))
        if prompts in (None, "", []):
            said = "Prompt cannot be empty"
            refusal = {"object": "error", "message": said, "type": "BadRequestError", "param": None, "code": 400}
            self._answer(400, refusal)
            return
        limit = int(body.get("max_tokens") or 16)
        requests = [self._new(prompt, limit, None) for prompt in (prompts if many else [prompts])]
        if body.get("stream"):
            usage = bool((body.get("stream_options") or {}).get("include_usage"))
            self._stream(requests[0], lambda request, new: self._openai([request], text_of(new), body), usage)
            return
        for request in requests:
            for _ in self.state.engine.decode(request):
                pass
        answer = self._openai(requests, None, body)
        answer["usage"] = self._usage(requests)
        answer["metadata"] = {"weight_version": self.state.weight_version}
        self._answer(200, answer)

    def _openai(self, requests: list[Request], delta: str | None, body: dict[str, Any]) -> dict[str, Any]:
        choices = [
            {"index": index, "text": text_of(request.tokens) if delta is None else delta, "logprobs": None,
             "finish_reason": request.finish, "matched_stop": None}
            for index, request in enumerate(requests)
        ]  # fmt: skip
        return {
            "id": requests[0].rid, "object": "text_completion", "created": int(time.time()),
            "model": body.get("model") or self.state.settings.args["served_model_name"], "choices": choices,
            "usage": None,
        }  # fmt: skip

    @staticmethod
    def _usage(requests: list[Request]) -> dict[str, Any]:
        prompt = sum(length_of(request.prompt) for request in requests)
        done = sum(len(request.tokens) for request in requests)
        return {"prompt_tokens": prompt, "completion_tokens": done, "total_tokens": prompt + done,
                "prompt_tokens_details": None, "reasoning_tokens": 0}  # fmt: skip

    def _stream(self, request: Request, chunk: Any, usage: bool = False) -> None:
        """Server-sent events, one for each round, then [DONE]. A client that goes away aborts the request."""
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        try:
            for new in self.state.engine.decode(request, streamed=True):
                self._event(dumps(chunk(request, new)))
            if usage:
                self._event(dumps({"object": "text_completion", "choices": [], "usage": self._usage([request])}))
            self._event("[DONE]")
            self.wfile.write(b"0\r\n\r\n")
        except (BrokenPipeError, ConnectionResetError):
            request.aborted.set()
            self.close_connection = True

    def _event(self, data: str) -> None:
        payload = (f"data: {data}\n\n").encode()
        self.wfile.write(b"%x\r\n%s\r\n" % (len(payload), payload))
        self.wfile.flush()


class Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no error of ours; anything else is, and belongs in the journal."""
        if not isinstance(sys.exc_info()[1], (BrokenPipeError, ConnectionResetError)):
            super().handle_error(request, client_address)


def serve(host: str, port: int, state: State) -> Server:
    """A listening server; OSError if the port is taken."""
    return Server((host, port), type("BoundHandler", (Handler,), {"state": state}))
