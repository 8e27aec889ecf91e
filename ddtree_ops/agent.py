"""Calls the helper on a host: one round trip an operation, two the first time a host sees this version.

``Agent.call`` sends a request, hands progress to the caller as it comes, and returns the value or raises the error
that the helper named. ``Agent.locked`` holds the host's lock around a change.
"""

from __future__ import annotations

import contextlib
import getpass
import io
import json
import os
import platform
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from ddtree_ops import errors
from ddtree_ops.clock import Clock, SystemClock
from ddtree_ops.errors import DdtreeError, HelperError, LockedError, UnreachableError
from ddtree_ops.helper import HelperFile, helper_file
from ddtree_ops.log import LOG
from ddtree_ops.model import HostSpec
from ddtree_ops.remote.base import Completed, Remote
from ddtree_ops.remote.files import explain, last_line

KINDS: dict[str, type[DdtreeError]] = {
    name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, DdtreeError)
}
PUSH_DEADLINE_S = 60.0
# How much longer than the helper's own deadline the far side, and then we, wait for it.
GRACE_S = 5.0

Event = dict[str, Any]


class Agent:
    """The helper of one host."""

    def __init__(
        self,
        remote: Remote,
        host: HostSpec,
        *,
        helper: HelperFile | None = None,
        bins: dict[str, list[str]] | None = None,
        unit_dir: str | None = None,
        clock: Clock | None = None,
        log: Callable[..., None] = LOG,
    ) -> None:
        """``bins`` and ``unit_dir`` put other programs and another folder in place of systemd's, for tests."""
        self.remote = remote
        self.host = host
        self.token: str | None = None
        self._clock = clock or SystemClock()
        self._log = log
        self._helper = helper or helper_file()
        self._extra = {key: value for key, value in {"bin": bins, "unit_dir": unit_dir}.items() if value}

    @property
    def sudo(self) -> bool:
        return self.host.sudo and self.host.scope == "system"

    @property
    def path(self) -> str:
        """Where the helper lies; relative to the home folder if the root is (commands begin there)."""
        return f"{self.host.root.rstrip('/').removeprefix('~/')}/helper/{self._helper.name}"

    def call(
        self,
        op: str,
        args: dict[str, Any] | None = None,
        payload: bytes | BinaryIO | None = None,
        *,
        deadline_s: float,
        on_event: Callable[[Event], None] | None = None,
    ) -> dict[str, Any]:
        """Run one operation and return its value; raise the error it ended with."""
        began, trips = self._clock.monotonic(), self.remote.round_trips
        ended = "ok"
        try:
            return self._call(op, args, payload, deadline_s, on_event)
        except BaseException as error:
            ended = f"{type(error).__name__}: {error}"
            raise
        finally:
            seconds = round(self._clock.monotonic() - began, 3)
            trips = self.remote.round_trips - trips
            self._log("call", host=self.host.name, op=op, ended=ended, seconds=seconds, round_trips=trips)

    def _call(
        self,
        op: str,
        args: dict[str, Any] | None,
        payload: bytes | BinaryIO | None,
        deadline_s: float,
        on_event: Callable[[Event], None] | None,
    ) -> dict[str, Any]:
        done = self._run(op, args, payload, deadline_s, on_event)
        if helper_is_missing(done, self.path):
            self.remote.put(self._helper.data, self.path, deadline_s=PUSH_DEADLINE_S, sudo=self.sudo)
            if payload is not None and not isinstance(payload, bytes):
                payload.seek(0)
            done = self._run(op, args, payload, deadline_s, on_event)
        return result(done, self.host.name)

    def _run(
        self,
        op: str,
        args: dict[str, Any] | None,
        payload: bytes | BinaryIO | None,
        deadline_s: float,
        on_event: Callable[[Event], None] | None,
    ) -> Completed:
        request = {
            "op": op,
            "args": args or {},
            "root": self.host.root,
            "scope": self.host.scope,
            "host": self.host.name,
            "lock": self.token,
            "deadline_s": deadline_s,
            **self._extra,
        }
        line = json.dumps(request, separators=(",", ":")).encode() + b"\n"
        return self.remote.run(
            ["python3", "-I", self.path],
            deadline_s=deadline_s + GRACE_S,
            stdin=joined(line, payload),
            sudo=self.sudo,
            on_line=(lambda text: hand_over(text, on_event)) if on_event is not None else None,
        )

    @contextlib.contextmanager
    def locked(self, purpose: str, *, lease_s: float = 120.0) -> Iterator[dict[str, Any]]:
        """Hold the host's lock. It is freed however the block ends; if we are killed, its lease ends it.

        A lock left by a process of this very machine that is no longer alive is taken over at once.
        """
        token = secrets.token_hex(16)
        wanted = {
            "token": token,
            "owner": owner(),
            "pid": os.getpid(),
            "client": client(),
            "purpose": purpose,
            "lease_s": lease_s,
        }
        try:
            taken = self.call("lock", wanted, deadline_s=30.0)
        except LockedError as held:
            lock = held.data.get("lock", {})
            if not left_behind(lock):
                raise
            why = f"{owner()}, pid {lock['pid']} is dead"
            self.call("unlock", {"force": True, "by": why, "only": lock}, deadline_s=30.0)
            taken = self.call("lock", wanted, deadline_s=30.0)
        self.token = token
        try:
            yield taken
        finally:
            self.token = None
            with contextlib.suppress(UnreachableError, LockedError):
                self.call("unlock", {"token": token}, deadline_s=15.0)


def joined(line: bytes, payload: bytes | BinaryIO | None) -> bytes | BinaryIO:
    """The request line, then the payload."""
    if payload is None:
        return line
    if isinstance(payload, bytes):
        return line + payload
    return io.BufferedReader(_Joined(line, payload))


class _Joined(io.RawIOBase):
    """Two sources read one after the other, without holding the second in memory."""

    def __init__(self, head: bytes, tail: BinaryIO) -> None:
        self._head, self._tail = head, tail

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        block, self._head = self._head[: len(buffer)], self._head[len(buffer) :]
        block = block or self._tail.read(len(buffer))
        buffer[: len(block)] = block
        return len(block)


def helper_is_missing(done: Completed, path: str) -> bool:
    """Python's own words when the file to run is not there: exit status 2."""
    return done.rc == 2 and path in done.err_text and "No such file" in done.err_text


def hand_over(text: str, on_event: Callable[[Event], None] | None) -> None:
    event = parsed(text)
    if event is not None and event.get("event") == "progress" and on_event is not None:
        on_event(event)


def parsed(text: str) -> Event | None:
    try:
        event = json.loads(text)
    except ValueError:
        return None
    return event if isinstance(event, dict) else None


def result(done: Completed, host: str) -> dict[str, Any]:
    """The value in the helper's last line, or the error there; what is no such line is an error of its own."""
    last = parsed(done.text.strip().rpartition("\n")[2])
    if last is None or last.get("event") != "result":
        raise explain(done, host) or HelperError(
            f"the helper ended with status {done.rc} and no result: {last_line(done)}", host,
            data={"out": done.text[-2000:], "err": done.err_text[-2000:]},
        )  # fmt: skip
    if last.get("ok"):
        return dict(last["value"])
    error = last["error"]
    kind = KINDS.get(error.get("kind", ""), HelperError)
    raise kind(error["found"], host, error.get("why", ""), error.get("next", ""), error.get("data") or {})


def owner() -> str:
    return f"{getpass.getuser()}@{platform.node()}"


def client() -> str:
    """This machine and process namespace, where a pid of ours means something; empty where that cannot be told."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}:{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def left_behind(lock: dict[str, Any]) -> bool:
    """Whether the lock's owner was a process of this machine that is gone."""
    if not client() or lock.get("client") != client() or not isinstance(lock.get("pid"), int):
        return False
    try:
        os.kill(lock["pid"], 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False
