"""What stands in for decoding: tokens from the prompt alone, times and accept lengths from the mode."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Union

from .faults import Faults
from .settings import Settings

Prompt = Union[str, Sequence[int]]
FIRST_TOKEN = 1000
ENDED = ("prompt_tokens_total", "generation_tokens_total", "num_requests_total")
WORDS = (
    "the",
    "a",
    "tree",
    "node",
    "draft",
    "token",
    "verify",
    "path",
    "depth",
    "of",
    "and",
    "is",
    "with",
    "state",
    "root",
    "leaf",
)


def token_at(seed: bytes, position: int) -> int:
    """The token at a position: a function of the prompt and the position."""
    digest = hashlib.blake2b(seed + position.to_bytes(4, "big"), digest_size=4).digest()
    return FIRST_TOKEN + int.from_bytes(digest, "big") % 30000


def text_of(tokens: Sequence[int]) -> str:
    return "".join(" " + WORDS[token % len(WORDS)] for token in tokens)


def seed_of(prompt: Prompt) -> bytes:
    material = prompt.encode() if isinstance(prompt, str) else repr(list(prompt)).encode()
    return hashlib.blake2b(material, digest_size=16).digest()


def length_of(prompt: Prompt) -> int:
    """Tokens in a prompt; for text about what a tokenizer would count."""
    return max(1, len(prompt.encode()) // 4) if isinstance(prompt, str) else len(prompt)


class Request:
    """One completion while it runs."""

    def __init__(self, rid: str, prompt: Prompt, max_tokens: int) -> None:
        self.rid, self.prompt, self.max_tokens = rid, prompt, max_tokens
        self.tokens: list[int] = []
        self.rounds = 0
        self.finish: str | None = None
        self.aborted = threading.Event()
        self.started = time.monotonic()


class Engine:
    """Counts and times completions. Thread-safe: every HTTP request runs in a thread of its own."""

    def __init__(self, settings: Settings, faults: Faults) -> None:
        self.settings, self.faults = settings, faults
        self.running: dict[str, Request] = {}
        self.totals: dict[str, float] = {"rounds": 0, "tokens": 0, "aborted": 0}
        self.ended = {(name, streamed): 0 for name in ENDED for streamed in (False, True)}
        self.last_throughput = 0.0
        self._lock = threading.Lock()

    @property
    def accept_length(self) -> float:
        """Tokens a round gives on average, the bonus token included."""
        mean = self.faults.accept[self.settings.mode]
        return min(mean, float(max(self.settings.block_size, 1)))

    def speed(self) -> float:
        """Tokens a second of one stream, now: streams share the machine, though not one to one."""
        return self.faults.tok_s[self.settings.mode] / (1 + 0.15 * max(0, len(self.running) - 1))

    def decode(self, request: Request, streamed: bool = False) -> Iterator[list[int]]:
        """Yield the tokens of each round as it ends; the last ones with why the request ended."""
        with self._lock:
            self.running[request.rid] = request
        try:
            if self.faults.hang_completion:
                request.aborted.wait()
            wanted = request.max_tokens // 2 if self.faults.short_completion else request.max_tokens
            seed = seed_of(request.prompt)
            while len(request.tokens) < wanted and not request.aborted.is_set():
                request.rounds += 1
                due = min(wanted, int(request.rounds * self.accept_length + 0.5))
                new = [self._token(seed, position) for position in range(len(request.tokens), due)]
                speed = self.speed()
                if request.aborted.wait(len(new) / speed):
                    break
                request.tokens += new
                with self._lock:
                    self.totals["tokens"] += len(new)
                    self.totals["rounds"] += 1
                    self.last_throughput = speed * len(self.running)
                if len(request.tokens) >= wanted:
                    request.finish = "length"
                yield new
            if request.finish is None:
                request.finish = "abort" if request.aborted.is_set() else "length"
                yield []
        finally:
            with self._lock:
                self.running.pop(request.rid, None)
                self.totals["aborted"] += request.finish != "length"
                for name, count in zip(ENDED, (length_of(request.prompt), len(request.tokens), 1)):
                    self.ended[name, streamed] += count

    def _token(self, seed: bytes, position: int) -> int:
        at = self.faults.diverge_at
        diverged = at is not None and self.settings.mode == "tree" and position >= at
        return token_at(seed, position) + (1 if diverged else 0)

    def abort(self, rid: str, everything: bool) -> None:
        for name, request in list(self.running.items()):
            if everything or name.startswith(rid):
                request.aborted.set()

    def mean_accept_length(self) -> float | None:
        """Over all rounds so far; None before the first and without speculation."""
        rounds = self.totals["rounds"]
        return self.totals["tokens"] / rounds if rounds and self.settings.mode != "ar" else None

    def metrics(self) -> str:
        """The text of /metrics, with SGLang's names and labels: a gauge is a rank's, a counter the server's."""
        accept = self.mean_accept_length() or 0.0
        rows = max(self.settings.rows - 1, 1)
        gauges: tuple[tuple[str, float], ...] = (
            ("num_running_reqs", len(self.running)), ("num_queue_reqs", 0),
            ("gen_throughput", self.last_throughput if self.running else 0.0),
            ("token_usage", 0.01 * len(self.running)),
            ("spec_accept_length", accept), ("spec_accept_rate", max(0.0, accept - 1) / rows),
            ("spec_num_steps", 1 if self.settings.block_size else 0),
            ("spec_num_draft_tokens", self.settings.block_size),
            ("max_total_num_tokens", 262144), ("cache_hit_rate", 0.0),
        )  # fmt: skip
        labels = 'engine_type="unified",model_name="{}"'.format(self.settings.args["served_model_name"])
        ranks = ',moe_ep_rank="0",pp_rank="0",tp_rank="0"'
        families = [("gauge", name, [(labels + ranks, value)]) for name, value in gauges]
        for name in ENDED:
            both = (("false", self.ended[name, False]), ("true", self.ended[name, True]))
            families.append(("counter", name, [(f'{labels},is_streaming="{word}"', float(n)) for word, n in both]))
        rounds = self.totals["rounds"] if self.settings.block_size else 0.0
        for name, value in (
            ("num_aborted_requests_total", self.totals["aborted"]),
            ("spec_verify_calls_total", rounds),
        ):
            families.append(("counter", name, [(labels, value)]))
        lines = []
        for kind, name, samples in families:
            lines += [f"# HELP sglang:{name} Of the lab stand-in.", f"# TYPE sglang:{name} {kind}"]
            lines += [f"sglang:{name}{{{labelled}}} {float(value)}" for labelled, value in samples]
        return "\n".join(lines) + "\n"
