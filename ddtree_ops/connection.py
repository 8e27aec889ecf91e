"""One host as a change needs it: the helper behind a link that may break, its facts, its lock, looks at an instance.

A link that breaks in the middle of a change is mended for a while before it counts as lost: every operation of the
helper may be asked for twice. A host that never answered is not waited for.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, BinaryIO, Protocol

from ddtree_ops.clock import Clock, Deadline
from ddtree_ops.errors import AuthError, HostKeyError, LockedError, UnreachableError
from ddtree_ops.facts.host import HostFacts, command_of, parse_facts
from ddtree_ops.facts.journal import Phase
from ddtree_ops.facts.server import parse_metrics, parse_server_info, weight_version
from ddtree_ops.facts.unit import parse_show
from ddtree_ops.health import Completion, Listener, Observation
from ddtree_ops.model import HostSpec, Settings, unit_name
from ddtree_ops.release import release_dir

QUICK_S = 30.0  # operations that only touch a few files or talk to systemd
PATIENCE_S = 60.0
LEASE_S = 300.0  # of a lock that is held while a server loads or is measured
WATCH_S = 2.0  # how long the helper itself looks before it answers: fewer round trips, and Ctrl-C waits no longer
KEPT_LINES = 500
PROMPT = "The capital city of France is"

Event = dict[str, Any]


class Caller(Protocol):
    """The helper on a host: ``agent.Agent`` in earnest."""

    @property
    def token(self) -> str | None: ...

    def call(
        self,
        op: str,
        args: dict[str, Any] | None = None,
        payload: bytes | BinaryIO | None = None,
        *,
        deadline_s: float,
        on_event: Callable[[Event], None] | None = None,
    ) -> dict[str, Any]: ...

    def locked(self, purpose: str) -> AbstractContextManager[dict[str, Any]]: ...


class Connection:
    """A host, reached through ``agent``."""

    def __init__(
        self,
        host: HostSpec,
        agent: Caller,
        clock: Clock,
        *,
        headers: Callable[[Settings], Mapping[str, str]] = lambda _settings: {},
        read: Callable[[str], bytes] | None = None,
        close: Callable[[], None] = lambda: None,
        round_trips: Callable[[], int] = lambda: 0,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self.host = host
        self._headers = headers
        self._patience_s = patience_s
        self.close = close
        self.round_trips = round_trips
        self._read_file = read
        self._agent = agent
        self._clock = clock
        self._hopeful = False

    def call(
        self,
        op: str,
        args: Mapping[str, Any] | None = None,
        payload: bytes | BinaryIO | None = None,
        *,
        deadline_s: float = QUICK_S,
        on_event: Callable[[Event], None] | None = None,
    ) -> dict[str, Any]:
        """One operation of the helper; asked for again while a link that worked before is broken."""
        patience: Deadline | None = None
        while True:
            try:
                answer = self._agent.call(op, dict(args or {}), payload, deadline_s=deadline_s, on_event=on_event)
            except (HostKeyError, AuthError):
                raise
            except UnreachableError:
                patience = patience or Deadline.after(self._patience_s if self._hopeful else 0.0, self._clock)
                again = payload is None or isinstance(payload, bytes)
                if patience.passed or not again:
                    self._hopeful = False  # whatever else is tried on this host is tried once
                    raise
                self._clock.sleep(1.0)
            else:
                self._hopeful = True
                return answer

    def unit_of(self, instance: str, release: str) -> str:
        """The unit of a release that lies on the host, current or not."""
        assert self._read_file is not None
        return self._read_file(f"{release_dir(self.host.root, instance, release)}/unit").decode()

    def renew(self, lease_s: float = LEASE_S) -> None:
        """Hold on to the lock while nothing changes; operations that change something renew it by themselves."""
        self.call("renew", {"token": self._agent.token, "lease_s": lease_s})

    def facts(self, settings: Sequence[Settings], paths: Sequence[str] = ()) -> HostFacts:
        """Everything that is decided on, in one round trip."""
        asked = {
            "instances": sorted({wanted.instance for wanted in settings}),
            "ports": sorted({wanted.port for wanted in settings}),
            "venvs": sorted({wanted.venv for wanted in settings}),
            "paths": sorted(paths),
        }
        return parse_facts(self.host.name, self.call("facts", asked, deadline_s=2 * QUICK_S))

    @contextmanager
    def locked(
        self, purpose: str, wait_s: float, say: Callable[[str], None], check: Callable[[], None]
    ) -> Iterator[str]:
        """Hold the host's lock; while another holds it, wait at most ``wait_s``. Yields whose lock was taken over."""
        deadline = Deadline.after(wait_s, self._clock)
        while True:
            check()
            held = self._agent.locked(purpose)
            try:
                taken = held.__enter__()
                break
            except LockedError as error:
                if deadline.passed:
                    raise
                say(f"{error.found}; waiting, {deadline.left:.0f} s left")
                self._clock.sleep(min(2.0, max(deadline.left, 0.05)))
        try:
            yield (taken.get("took_over") or {}).get("owner", "")
        finally:
            held.__exit__(None, None, None)

    def probe(self, settings: Settings) -> InstanceProbe:
        return InstanceProbe(self, settings, self._headers(settings))


class InstanceProbe:
    """Looks at one instance. Keeps the log's place between looks, and which of the two ready paths the server has."""

    def __init__(self, connection: Connection, settings: Settings, headers: Mapping[str, str] | None = None) -> None:
        self._connection = connection
        self._settings = settings
        self._headers = dict(headers or {})
        self._ready_path = "/ready"
        self._cursor: str | None = None
        self._lines: list[dict[str, Any]] = []

    def observe(self, watch_s: float = WATCH_S, extra: tuple[str, ...] = ()) -> Observation:
        """One round trip; the helper looks for up to ``watch_s`` and answers early when it is ready or failed."""
        value = self._connection.call(
            "observe",
            {
                **self._where(),
                "instance": self._settings.instance,
                "paths": [self._ready_path, "/model_info", "/server_info", *extra],
                "cursor": self._cursor,
                "timeout_s": 25.0 if self._ready_path == "/health" else 5.0,
                "watch_s": watch_s,
                "every_s": 0.25,
            },
            deadline_s=QUICK_S + 75.0,
            on_event=self._seen,
        )
        self._keep(value)
        seen = self._read(value)
        if seen.ready == 404:
            # SGLang 0.5.17 has no /ready. Its log says the same at once; /health, asked from now on, takes a second.
            self._ready_path = "/health"
            return replace(seen, ready=200 if seen.progress.phase is Phase.READY else None, has_ready=False)
        return seen

    def complete(self, tokens: int, deadline_s: float) -> Completion:
        """One real completion through ``/generate``, whose answer says which release made it."""
        sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
        value = self._connection.call(
            "complete",
            {
                **self._where(),
                "path": "/generate",
                "body": {"text": PROMPT, "sampling_params": sampling},
                "timeout_s": deadline_s,
            },
            deadline_s=deadline_s + QUICK_S,
        )
        return parse_completion(value)

    def _where(self) -> dict[str, Any]:
        return {"port": self._settings.port, "bind": self._settings.bind, "headers": self._headers}

    def _seen(self, event: Event) -> None:
        if "observation" in event:
            self._keep(event["observation"])

    def _keep(self, value: Mapping[str, Any]) -> None:
        self._cursor = value["journal"]["cursor"]
        self._lines = [*self._lines, *value["journal"]["lines"]][-KEPT_LINES:]

    def _read(self, value: Mapping[str, Any]) -> Observation:
        unit = parse_show(value["show"])
        answers = {answer["path"]: answer for answer in value["http"]}
        info = answers.get("/server_info", {}).get("body", "")
        return Observation(
            unit=unit,
            listener=_listener(value["listeners"], unit_name(self._settings.instance)),
            ready=answers.get(self._ready_path, {}).get("status"),
            release=weight_version(answers.get("/model_info", {}).get("body", "")),
            resolved=parse_server_info(info) if info else None,
            served=parse_metrics(answers["/metrics"].get("body", "")) if "/metrics" in answers else None,
            processes=tuple((about["pid"], command_of(about)) for about in value["processes"]),
            lines=tuple(line["message"] for line in self._lines if line["invocation"] in (None, unit.invocation)),
        )


def _listener(listeners: Sequence[Mapping[str, Any]], unit: str) -> Listener | None:
    """Who answers on the port; a process of the unit counts before any other that shares the socket."""
    holders = [process for entry in listeners for process in entry["processes"]]
    if not holders:
        return None
    ours = [process for process in holders if process["unit"] == unit]
    chosen = (ours or holders)[0]
    command = " ".join(chosen["argv"][:3])
    return Listener(chosen["pid"], command, bool(ours))


def parse_completion(value: Mapping[str, Any]) -> Completion:
    """Read the helper's answer of one ``/generate`` request."""
    seconds = value["ms"] / 1000
    if "error" in value:
        return Completion(0, error=str(value["error"]), seconds=seconds)
    if value["status"] != 200:
        return Completion(0, error=f"HTTP {value['status']}: {value['body'][:200]}", seconds=seconds)
    try:
        meta = json.loads(value["body"])["meta_info"]
        return Completion(int(meta["completion_tokens"]), meta.get("weight_version"), seconds=seconds)
    except (ValueError, KeyError, TypeError):
        return Completion(0, error=f"not a completion: {value['body'][:200]}", seconds=seconds)
