"""An instance taken out of its router and put back, through the router's API.

Works with SGLang's model gateway (``smg``) and its predecessor ``sglang-router``; both were measured. What holds for
both: a 202 is acceptance, not done; the router's own counters do not say that a worker is drained, so the worker is
asked; an open circuit breaker shows in the metrics alone; ids are of one start of the router and are never kept.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ddtree_ops.clock import Clock, Deadline
from ddtree_ops.errors import DdtreeError, RefusedError
from ddtree_ops.http import Reply, Request
from ddtree_ops.model import RouterSettings

POLL_S = 0.25
BREAKER = re.compile(r'^smg_worker_cb_state\{[^}]*worker="([^"]*)"[^}]*\} (\d+)', re.M)


@dataclass(frozen=True)
class Worker:
    """One worker as the router lists it."""

    id: str
    url: str
    healthy: bool
    draining: bool = False
    failed: str = ""


def parse_workers(value: Any) -> tuple[Worker, ...]:
    """``GET /workers``; what is no list of workers reads as none."""
    listed = value.get("workers") if isinstance(value, dict) else None
    return tuple(parse_worker(each) for each in listed if isinstance(each, dict)) if isinstance(listed, list) else ()


def parse_worker(value: Mapping[str, Any]) -> Worker:
    job = value.get("job_status")
    failed = str(job.get("message") or "failed") if isinstance(job, dict) and job.get("status") == "failed" else ""
    return Worker(
        id=str(value.get("id", "")),
        url=str(value.get("url", "")).rstrip("/"),
        healthy=bool(value.get("is_healthy")),
        draining=value.get("status") == "draining",
        failed=failed,
    )


def open_breakers(metrics: str) -> frozenset[str]:
    """The workers whose circuit breaker is not closed."""
    return frozenset(url.rstrip("/") for url, state in BREAKER.findall(metrics) if state != "0")


@dataclass
class Router:
    """The router of one instance."""

    settings: RouterSettings
    worker_url: str
    target: str
    request: Request
    clock: Clock
    check: Callable[[], None]
    key: str | None = None
    worker_key: str | None = None
    was_in: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.worker_url = self.worker_url.rstrip("/")

    # -- out

    def take_out(self) -> str:
        """No new requests reach the instance once this returns; those that run go on. Refuses to empty the router."""
        here, others = self._find()
        if here is None:
            return "the router does not know it"
        if len(others) < self.settings.others:
            raise self._refused(
                f"the router would keep {len(others)} healthy workers without it, {self.settings.others} must remain",
                "its clients would get errors while it restarts",
            )
        self.was_in = True
        reply = self._ask("DELETE", f"/workers/{here.id}")
        if reply.status not in (200, 202, 404):
            raise self._refused(f"the router refused to take it out: {said(reply)}", "it still gets requests")
        self._until(self._is_out, "the router accepted to take it out, and still sends it requests")
        return f"out of the router, {len(others)} others serve"

    def gone(self) -> None:
        """Wait until the router has forgotten it (one that drains keeps it listed for a while), so it can be added."""
        self._until(lambda: self._find()[0] is None, "the router still lists it as draining")

    def _is_out(self) -> bool:
        here, _ = self._find()
        return here is None or here.draining

    # -- in

    def put_in(self) -> str:
        """Requests reach the instance again once this returns."""
        self._until(self._added, "the router does not take it in")
        self._until(self._serves, "the router took it in, but does not use it")
        self.was_in = False
        return "in the router again"

    def _added(self) -> bool:
        """Add it; a conflict means that it is there, or is still draining: then look, and try again."""
        here, _ = self._find()
        if here is not None:
            return not here.draining
        body = {"url": self.worker_url, **({"api_key": self.worker_key} if self.worker_key else {})}
        reply = self._ask("POST", "/workers", body)
        if reply.status not in (200, 201, 202, 409):
            raise self._refused(f"the router refused it: {said(reply)}", "it gets no requests")
        return reply.status != 409

    def _serves(self) -> bool:
        here, _ = self._find()
        if here is None:
            return False
        detail = self._ask("GET", f"/workers/{here.id}").json()
        shown = parse_worker(detail) if isinstance(detail, dict) else here
        if shown.failed and "already exists" not in shown.failed:
            raise self._refused(f"the router could not take it in: {shown.failed}", "it gets no requests")
        ready = self._ask("GET", "/readiness").status == 200
        return here.healthy and ready and here.url not in self._breakers()

    # -- asking

    def _find(self) -> tuple[Worker | None, list[Worker]]:
        """This worker, and the others that could serve in its place."""
        reply = self._ask("GET", "/workers")
        if reply.status != 200:
            raise self._refused(
                f"the router does not list its workers: {said(reply)}", "nobody can say who would serve"
            )
        workers = parse_workers(reply.json())
        mine = [worker for worker in workers if worker.url == self.worker_url]
        if len(mine) > 1:
            raise self._refused(f"the router lists {self.worker_url} {len(mine)} times", "one of them would stay in")
        broken = self._breakers()
        others = [w for w in workers if w not in mine and w.healthy and not w.draining and w.url not in broken]
        return (mine[0] if mine else None), others

    def _breakers(self) -> frozenset[str]:
        if self.settings.metrics_url is None:
            return frozenset()
        return open_breakers(self.request("GET", self.settings.metrics_url, headers={}).text)

    def _ask(self, method: str, path: str, body: Any = None) -> Reply:
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        reply = self.request(method, self.settings.url.rstrip("/") + path, headers=headers, body=body)
        if reply.status in (401, 403):
            raise self._refused(f"the router refused our key: {said(reply)}", "only its control key opens /workers")
        return reply

    def _until(self, true: Callable[[], bool], otherwise: str) -> None:
        deadline = Deadline.after(self.settings.settle_s, self.clock)
        while not true():
            if deadline.passed:
                raise self._refused(f"{otherwise} after {self.settings.settle_s:.0f} s", "its state there is not known")
            self.check()
            self.clock.sleep(POLL_S)

    def _refused(self, found: str, why: str) -> DdtreeError:
        return RefusedError(found, host=self.target, why=why, next=f"curl {self.settings.url.rstrip('/')}/workers")


def said(reply: Reply) -> str:
    text = " ".join(reply.text.split())[:200]
    return f"HTTP {reply.status}{f' {text}' if text else ''}"
