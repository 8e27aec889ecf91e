"""The router's API as both of them answer it: a fake that behaves as was measured, and what the client makes of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from ddtree_ops.clock import FakeClock
from ddtree_ops.errors import DdtreeError, RefusedError
from ddtree_ops.http import Reply
from ddtree_ops.model import RouterSettings
from ddtree_ops.router import Router, Worker, open_breakers, parse_workers

A, B = "http://10.0.0.1:30000", "http://10.0.0.2:30000"


@dataclass
class FakeRouter:
    """``kind``: ``old`` is sglang-router (forgets a worker at once), ``new`` is smg (lists it while it drains)."""

    kind: str
    clock: FakeClock
    workers: dict[str, str] = field(default_factory=lambda: {A: "ready", B: "ready"})
    until: dict[str, float] = field(default_factory=dict)
    breakers: dict[str, int] = field(default_factory=dict)
    key: str = ""
    deaf: bool = False
    asked: list[str] = field(default_factory=list)

    def __call__(
        self, method: str, url: str, *, headers: Mapping[str, str], body: Any = None, timeout_s: float = 10.0
    ) -> Reply:
        assert timeout_s > 0
        path = "/" + url.split("/", 3)[3]
        self.asked.append(f"{method} {path.split('/')[1]}")
        self._settle()
        if path == "/metrics":
            lines = [f'smg_worker_cb_state{{worker="{w}"}} {n}' for w, n in self.breakers.items()]
            return Reply(200, "\n".join(lines))
        if path == "/readiness":
            return Reply(200 if "ready" in self.workers.values() else 503, "{}")
        if self.key and headers.get("Authorization") != f"Bearer {self.key}":
            return Reply(401, '{"error": "unauthorized"}')
        if path == "/workers" and method == "GET":
            return Reply(200, json.dumps({"workers": [self._shown(worker) for worker in self.workers]}))
        if path == "/workers":
            return self._add(body["url"])
        worker = next((worker for worker in self.workers if self._id(worker) == path.rsplit("/", 1)[1]), None)
        if worker is None:
            return Reply(404, '{"error": "WORKER_NOT_FOUND"}')
        return Reply(200, json.dumps(self._shown(worker))) if method == "GET" else self._remove(worker)

    @staticmethod
    def _id(worker: str) -> str:
        return "id-" + worker[7:].replace(":", "-")

    def _settle(self) -> None:
        for worker, at in list(self.until.items()):
            if self.clock.now >= at:
                del self.until[worker]
                if self.workers[worker] == "draining":
                    del self.workers[worker]
                else:
                    self.workers[worker] = "ready"

    def _shown(self, worker: str) -> dict[str, Any]:
        state = self.workers[worker]
        shown = {"id": self._id(worker), "url": worker, "is_healthy": state == "ready"}
        return {**shown, "status": state} if self.kind == "new" else shown

    def _remove(self, worker: str) -> Reply:
        if not self.deaf:
            if self.kind == "new":
                self.workers[worker] = "draining"
                self.until[worker] = self.clock.now + 5
            else:
                del self.workers[worker]
        return Reply(202, '{"status": "accepted"}')

    def _add(self, worker: str) -> Reply:
        if worker in self.workers:
            return Reply(409 if self.kind == "new" else 202, '{"error": "WORKER_ALREADY_EXISTS"}')
        if not self.deaf:
            self.workers[worker], self.until[worker] = "starting", self.clock.now + 0.1
        return Reply(202, '{"status": "accepted"}')


def made(kind: str, key: str | None = None, **changes: Any) -> tuple[FakeRouter, Router]:
    clock = FakeClock()
    fake = FakeRouter(kind, clock)
    settings = RouterSettings(url="http://gw:30100/", metrics_url="http://gw:29000/metrics", **changes)
    return fake, Router(settings, A + "/", "h1:a", fake, clock, lambda: None, key)


@pytest.mark.parametrize("kind", ["old", "new"])
def test_out_and_in_again(kind: str) -> None:
    fake, router = made(kind)
    assert router.take_out() == "out of the router, 1 others serve"
    assert router.was_in
    assert fake.workers.get(A) in (None, "draining")
    router.gone()
    assert router.put_in() == "in the router again"
    assert fake.workers == {B: "ready", A: "ready"}
    assert not router.was_in


def test_one_that_drains_is_added_when_it_is_forgotten() -> None:
    fake, router = made("new")
    router.take_out()
    router.put_in()
    assert fake.clock.now >= 5
    assert fake.workers[A] == "ready"


@pytest.mark.parametrize("kind", ["old", "new"])
def test_putting_in_what_is_in_is_no_error(kind: str) -> None:
    _, router = made(kind)
    assert router.put_in() == "in the router again"


@pytest.mark.parametrize("state", ["starting", "draining"])
def test_the_last_healthy_worker_is_not_taken_out(state: str) -> None:
    fake, router = made("new")
    fake.workers[B] = state
    with pytest.raises(RefusedError, match="would keep 0 healthy workers without it, 1 must remain"):
        router.take_out()
    assert fake.workers[A] == "ready"
    assert not router.was_in
    fake, router = made("new", others=0)
    fake.workers[B] = state
    router.take_out()


def test_a_worker_whose_breaker_is_open_does_not_count() -> None:
    fake, router = made("old")
    fake.breakers = {B: 1, A: 0}
    with pytest.raises(RefusedError, match="would keep 0 healthy workers"):
        router.take_out()


@pytest.mark.parametrize("kind", ["old", "new"])
def test_accepted_is_not_done(kind: str) -> None:
    fake, router = made(kind)
    fake.deaf = True
    with pytest.raises(RefusedError, match="still sends it requests after 15 s"):
        router.take_out()
    del fake.workers[A]
    with pytest.raises(RefusedError, match="does not use it after 15 s"):
        router.put_in()


def test_wrong_key() -> None:
    fake, router = made("old", key="client")
    fake.key = "control"
    with pytest.raises(DdtreeError, match="refused our key: HTTP 401"):
        router.take_out()
    assert made("old", key="control")[1].take_out()


def test_a_worker_the_router_does_not_know() -> None:
    fake, router = made("old")
    del fake.workers[A]
    assert router.take_out() == "the router does not know it"
    assert not router.was_in


def test_two_entries_of_one_server() -> None:
    fake, router = made("old")
    fake.workers[A + "/"] = "ready"
    with pytest.raises(RefusedError, match="2 times"):
        router.take_out()


def test_parsers_take_anything() -> None:
    assert parse_workers(None) == parse_workers({"workers": 3}) == ()
    listed = {"workers": [{"id": "1", "url": "http://x/", "is_healthy": True, "status": "draining"}, 3]}
    assert parse_workers(listed) == (Worker("1", "http://x", True, True),)
    text = 'smg_worker_cb_state{worker="http://a:1",x="y"} 0\nsmg_worker_cb_state{x="y",worker="http://b:1/"} 2\n'
    assert open_breakers(text) == {"http://b:1"}
