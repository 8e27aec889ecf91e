"""One client of a server under test: asks over HTTP, times what comes back. Standard library only."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

Clock = Callable[[], float]


class ServerError(Exception):
    """The server refused, broke off or could not be reached."""


@dataclass(frozen=True)
class Reply:
    """One completion as a client saw it. ``decode_s`` runs from the first text to the last."""

    tokens: tuple[int, ...]
    ttft_s: float
    decode_s: float
    e2e_s: float
    rounds: int | None
    histogram: tuple[int, ...]  # drafted tokens accepted in a round -> rounds
    first_tokens: int  # tokens that came with the first event, no part of the decode time


class Client:
    """A kept-alive connection; not for several threads at once."""

    def __init__(self, url: str, timeout_s: float = 600.0, clock: Clock = time.perf_counter) -> None:
        parts = urlsplit(url)
        self._connection = http.client.HTTPConnection(parts.hostname or "", parts.port or 80, timeout=timeout_s)
        self._clock = clock
        self.url = url

    def close(self) -> None:
        self._connection.close()

    def get(self, path: str) -> Any:
        return self._json("GET", path, None)

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        return self._json("POST", path, body)

    def _json(self, method: str, path: str, body: Mapping[str, Any] | None) -> Any:
        response = self._send(method, path, body)
        text = response.read()
        try:
            return json.loads(text)
        except ValueError:
            raise ServerError(f"{self.url}{path} answered no JSON: {text[:200]!r}") from None

    def _send(self, method: str, path: str, body: Mapping[str, Any] | None) -> http.client.HTTPResponse:
        data = None if body is None else json.dumps(body).encode()
        try:
            self._connection.request(method, path, data, {"Content-Type": "application/json"})
            response = self._connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()
            raise ServerError(f"{self.url}{path}: {error}") from error
        if response.status != 200:
            raise ServerError(f"{self.url}{path} answered {response.status}: {response.read()[:300]!r}")
        return response

    def generate(self, text: str, sampling: Mapping[str, Any]) -> Reply:
        """Stream one completion of /generate."""
        began = self._clock()
        response = self._send("POST", "/generate", {"text": text, "sampling_params": dict(sampling), "stream": True})
        first: tuple[float, int] | None = None
        last, ended, tokens = {}, began, []
        while line := response.readline():
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise ServerError(f"{self.url}/generate: {event['error']}")
            last, ended = event["meta_info"], self._clock()
            tokens = grown(tokens, event["output_ids"], last["completion_tokens"])
            if first is None and last["completion_tokens"]:
                first = (ended, last["completion_tokens"])
        if first is None or len(tokens) != last["completion_tokens"]:
            raise ServerError(f"{self.url}/generate ended after {len(tokens)} tokens")
        return Reply(
            tokens=tuple(tokens),
            ttft_s=first[0] - began,
            decode_s=ended - first[0],
            e2e_s=ended - began,
            rounds=last.get("spec_verify_ct"),
            histogram=tuple(last.get("spec_correct_drafts_histogram") or ()),
            first_tokens=first[1],
        )


def grown(tokens: list[int], ids: list[int], count: int) -> list[int]:
    """All tokens so far: servers send every id again with each event, or the new ones only."""
    return list(ids) if len(ids) == count else tokens + list(ids)
