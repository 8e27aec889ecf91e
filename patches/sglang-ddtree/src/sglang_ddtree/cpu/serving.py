"""Requests in flight: rounds of several sessions take turns, text comes out as it is decoded, everything is counted."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from sglang_ddtree.cpu.args import Launch
from sglang_ddtree.cpu.asks import Ask, BadRequest
from sglang_ddtree.cpu.decode import Counters, Pair, Session
from sglang_ddtree.reference.topk import logsumexp

TOTALS = ("prompt_tokens_total", "generation_tokens_total", "num_requests_total")
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Request:
    """One completion while it runs."""

    def __init__(self, ask: Ask, session: Session) -> None:
        self.ask, self.session = ask, session
        self.tokens: list[int] = []
        self.logprobs: list[tuple[float, int, list[tuple[float, int]]]] = []
        self.text = ""
        self.finish: dict[str, Any] | None = None
        self.aborted = threading.Event()
        self.started = time.monotonic()
        self.first_token_s: float | None = None
        self.ended: float | None = None

    @property
    def age(self) -> float:
        """Seconds from its arrival to its end, or so far."""
        return (self.ended or time.monotonic()) - self.started


class Engine:
    """Thread-safe: each HTTP request runs in a thread of its own, and one round runs at a time."""

    def __init__(self, launch: Launch, pair: Pair, tokenizer: Tokenizer) -> None:
        self.launch, self.pair, self.tokenizer = launch, pair, tokenizer
        self.context = launch.context
        self.capacity = int(launch.args.get("max_total_tokens") or self.context)
        self.load_s = 0.0
        self.eos = launch.model.get("eos_token_id")
        self.running: dict[str, Request] = {}
        self.queued = 0
        self.counters = Counters()
        self.totals = {(name, streamed): 0 for name in TOTALS for streamed in (False, True)}
        self.aborted = 0
        self.last_throughput = 0.0
        self._turn = threading.Lock()
        self._slots = threading.Semaphore(int(launch.args.get("max_running_requests") or 48))

    def new(self, ask: Ask) -> Request:
        if len(ask.prompt) >= self.context:
            raise BadRequest(
                f"The input ({len(ask.prompt)} tokens) is longer than the model's context length "
                f"({self.context} tokens)."
            )
        if ask.logprobs is not None and self.launch.mode.drafts:
            raise BadRequest("DFLASH speculative decoding does not support return_logprob yet.")
        return Request(ask, Session(self.pair, self.launch.mode, ask.prompt, ask.sampling))

    def decode(self, request: Request, *, streamed: bool = False) -> Iterator[str]:
        """Yield the text of each round as it ends. A request counts in the totals once it has ended."""
        self.queued += 1
        with self._slots:
            self.queued -= 1
            self.running[request.ask.rid] = request
            try:
                while request.finish is None:
                    yield self._step(request)
            finally:
                self.running.pop(request.ask.rid, None)
                request.finish = request.finish or {"type": "abort", "message": "Aborted"}
                request.ended = time.monotonic()
                self.aborted += request.finish["type"] == "abort"
                for name, count in zip(TOTALS, (len(request.ask.prompt), len(request.tokens), 1), strict=True):
                    self.totals[name, streamed] += count
                request.session.counters.dropped += len(request.session.open)
                self.counters.add(request.session.counters)

    def _step(self, request: Request) -> str:
        with self._turn:
            if request.aborted.is_set():
                request.finish = {"type": "abort", "message": "Abort in decode"}
                return ""
            if request.ask.limit == 0:
                request.finish = {"type": "length", "length": 0}
                return ""
            began = time.monotonic()
            session = request.session
            new = session.round() if request.tokens else session.start()
            if request.first_token_s is None:
                request.first_token_s = time.monotonic() - request.started
            kept = self._take(request, new)
            self.last_throughput = kept / max(time.monotonic() - began, 1e-9)
            return self._grow_text(request)

    def _take(self, request: Request, new: list[int]) -> int:
        """Keep tokens until one ends the request; SGLang, too, trims what was accepted beyond the end."""
        ask = request.ask
        for count, token in enumerate(new, start=1):
            request.tokens.append(token)
            if ask.logprobs is not None:
                request.logprobs.append(law_of(request.session.last_logits[count - 1], token, ask))
            if token in ask.stop_tokens or (token == self.eos and not ask.ignore_eos):
                request.finish = {"type": "stop", "matched": token}
            elif len(request.tokens) >= ask.limit or len(ask.prompt) + len(request.tokens) >= self.context:
                request.finish = {"type": "length", "length": len(request.tokens)}
            if request.finish:
                return count
        return len(new)

    def _grow_text(self, request: Request) -> str:
        """Decode all tokens and hand out what is new; half a character waits for the token that completes it."""
        ended_by_token = request.finish is not None and request.finish["type"] == "stop"
        tokens = request.tokens[:-1] if ended_by_token else request.tokens
        text = self.tokenizer.decode(tokens)
        for stop in request.ask.stop:
            at = text.find(stop)
            if at >= 0:
                text = text[:at]
                request.finish = {"type": "stop", "matched": stop}
        if request.finish is None:
            text = text.rstrip(REPLACEMENT)
            text = text[: len(text) - _held_back(text, request.ask.stop)]
        new = text[len(request.text) :]
        request.text += new
        return new

    def abort(self, rid: str, everything: bool) -> None:
        for name, request in list(self.running.items()):
            if everything or (rid and name.startswith(rid)):
                request.aborted.set()

    def live_counters(self) -> Counters:
        """Of finished and running requests together."""
        total = Counters()
        total.add(self.counters)
        for request in list(self.running.values()):
            total.add(request.session.counters)
        return total

    def gauges(self) -> dict[str, float]:
        counters, speculating = self.live_counters(), self.launch.mode.drafts
        offered = max(self.launch.rows - 1, 1) * max(counters.rounds, 1)
        used = sum(request.session.caches.length for request in list(self.running.values()))
        shown = counters.public(self.launch.mode, self.launch.block)
        names = ("trees", "nodes_per_tree", "accepted_per_tree", "accepted_off_spine", "would_accept_per_tree")
        return {
            "num_running_reqs": len(self.running),
            "num_queue_reqs": self.queued,
            "gen_throughput": self.last_throughput if self.running else 0.0,
            "token_usage": used / (self.context * max(len(self.running), 1)),
            "spec_accept_length": (counters.accept_length or 0.0) if speculating else 0.0,
            "spec_accept_rate": counters.accepted / offered if speculating else 0.0,
            "spec_num_steps": 1 if speculating else 0,
            "spec_num_draft_tokens": self.launch.block,
            "max_total_num_tokens": self.capacity,
            "cache_hit_rate": 0.0,
            **{f"ddtree_{name}": shown[name] for name in names if name in shown},
        }

    def metrics(self) -> str:
        """The text of /metrics under SGLang's names and labels: a gauge is a rank's, a counter the server's."""
        labels = f'engine_type="unified",model_name="{self.launch.args["served_model_name"]}"'
        ranks = 'moe_ep_rank="0",pp_rank="0",tp_rank="0"'
        families = [("gauge", name, [(f"{labels},{ranks}", value)]) for name, value in self.gauges().items()]
        for name in TOTALS:
            both = (("false", self.totals[name, False]), ("true", self.totals[name, True]))
            families.append(("counter", name, [(f'{labels},is_streaming="{word}"', n) for word, n in both]))
        rounds = self.live_counters().rounds if self.launch.mode.drafts else 0
        for name, value in (("num_aborted_requests_total", self.aborted), ("spec_verify_calls_total", rounds)):
            families.append(("counter", name, [(labels, value)]))
        lines = []
        for kind, name, samples in families:
            lines += [f"# HELP sglang:{name} Of the CPU reference engine.", f"# TYPE sglang:{name} {kind}"]
            lines += [f"sglang:{name}{{{labelled}}} {float(value)}" for labelled, value in samples]
        return "\n".join(lines) + "\n"


def _held_back(text: str, stops: tuple[str, ...]) -> int:
    """How many characters at the end could be the beginning of a stop string."""
    return max(
        (size for stop in stops for size in range(1, len(stop)) if text.endswith(stop[:size])),
        default=0,
    )


def law_of(logits: np.ndarray, token: int, ask: Ask) -> tuple[float, int, list[tuple[float, int]]]:
    """Log-probability of the token and of the likeliest others, before any temperature (as SGLang returns them)."""
    logp = logits - logsumexp(logits[None].astype(np.float64))[0]
    best = np.argsort(-logp, kind="stable")[: ask.logprobs or 0]
    return float(logp[token]), token, [(float(logp[i]), int(i)) for i in best]
