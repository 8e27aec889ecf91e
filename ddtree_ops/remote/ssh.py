"""A host over SSH. The only module that uses fabric; paramiko does the talking.

fabric makes the connection (jump hosts, ProxyCommand), but by itself it accepts any host key, so every connection
gets a policy that asks ``known_hosts``. Commands run on a paramiko channel of their own: invoke reads standard input
character by character as text, which a tar stream does not survive.

Three clocks bound everything: connecting, each command, and the silence of the link. For the last one a thread asks
the server for an answer every few seconds; paramiko's own keepalive never looks whether one comes. What runs on the
host is bounded there as well, by ``timeout``, so a broken link leaves nothing behind that runs for ever.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import selectors
import threading
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO

import paramiko
from fabric import Config, Connection

from ddtree_ops.clock import Clock, Deadline, SystemClock
from ddtree_ops.errors import DeadlineError, UnreachableError
from ddtree_ops.model import HostSpec
from ddtree_ops.remote.base import Completed
from ddtree_ops.remote.files import FilesOverRun, bounded, ended
from ddtree_ops.remote.known_hosts import KnownHosts
from ddtree_ops.remote.lines import Feed, Lines
from ddtree_ops.remote.shell import for_any_shell
from ddtree_ops.remote.ssh_auth import Keys
from ddtree_ops.remote.ssh_config import Hop, find_route, load_config
from ddtree_ops.remote.ssh_errors import explain_connect

# paramiko logs every failure that we turn into an error of ours; without a handler, logging prints them itself.
logging.getLogger("paramiko").addHandler(logging.NullHandler())

CONNECT_S = 15.0
PROBE_EVERY_S = 5.0
SILENCE_S = 20.0
CHUNK = 1 << 16


class SshRemote(FilesOverRun):
    """One connection per host, made at the first call and again after it broke; ``round_trips`` counts commands."""

    def __init__(
        self,
        host: HostSpec,
        clock: Clock | None = None,
        *,
        config: paramiko.SSHConfig | None = None,
        connect_s: float = CONNECT_S,
        silence_s: float = SILENCE_S,
        probe_every_s: float = PROBE_EVERY_S,
    ) -> None:
        self.name = host.name
        self.round_trips = 0
        self.connections = 0
        self.route = find_route(host, config if config is not None else load_config())
        self._clock = clock or SystemClock()
        self._connect_s, self._silence_s, self._probe_every_s = connect_s, silence_s, probe_every_s
        self._hops: list[Connection] = []
        self._pulse: Pulse | None = None

    # -- the connection -------------------------------------------------------------------------------------------

    def _transport(self) -> tuple[paramiko.Transport, Pulse]:
        if self._hops and self._pulse is not None:
            transport = self._hops[-1].transport
            alive = self._pulse.silence <= self._silence_s  # it is asked while idle too
            if transport is not None and transport.is_active() and alive:
                return transport, self._pulse
        self.close()
        try:
            for hop in self.route:
                before = self._hops[-1] if self._hops else None
                self._hops.append(open_hop(hop, before, self.name, self._connect_s, last=hop is self.route[-1]))
        except UnreachableError:
            self.close()
            raise
        self.connections += 1
        transport = self._hops[-1].transport
        self._pulse = Pulse(transport, self._clock, self._probe_every_s)
        return transport, self._pulse

    def close(self) -> None:
        if self._pulse is not None:
            self._pulse.stop()
        for connection in reversed(self._hops):
            with contextlib.suppress(Exception):
                connection.client.close()
        self._hops, self._pulse = [], None

    # -- commands -------------------------------------------------------------------------------------------------

    def run(
        self,
        argv: Sequence[str],
        *,
        deadline_s: float,
        stdin: bytes | BinaryIO | None = None,
        sudo: bool = False,
        on_line: Callable[[str], None] | None = None,
    ) -> Completed:
        transport, pulse = self._transport()
        self.round_trips += 1
        command = for_any_shell(bounded(argv, deadline_s, sudo=sudo and self.route[-1].user != "root"))
        exchange = Exchange(self.name, argv[0], transport, pulse, self._silence_s)
        try:
            rc, out, err = exchange.run(command, stdin, Deadline.after(deadline_s + 6.0, self._clock), on_line)
        except UnreachableError:
            self.close()  # the next call begins with a new connection
            raise
        return ended(Completed(tuple(argv), rc, out, err), self.name, deadline_s)


def open_hop(hop: Hop, before: Connection | None, name: str, connect_s: float, *, last: bool) -> Connection:
    """Connect to one machine on the way to ``name``, through the one before it, if there is one."""
    known = KnownHosts.load(hop.known_hosts)
    connection = Connection(
        hop.host, user=hop.user, port=hop.port, connect_timeout=max(1, int(connect_s)),
        gateway=before or hop.proxy_command or False,
        config=Config(lazy=True, ssh_config=paramiko.SSHConfig()),
        connect_kwargs={
            "auth_strategy": Keys(hop), "transport_factory": prefer(known.preferred_types(hop.key_name)),
            "banner_timeout": connect_s, "auth_timeout": connect_s, "channel_timeout": connect_s,
        },
    )  # fmt: skip
    connection.client.set_missing_host_key_policy(OnlyKnown(known, hop.key_name, name))
    try:
        within(connect_s + 1.0, connection.open)
    except Exception as error:
        connection.client.close()
        raise explain_connect(error, hop, name, connect_s, last=last) from error
    return connection


class Exchange:
    """One command on one channel."""

    def __init__(self, host: str, what: str, transport: paramiko.Transport, pulse: Pulse, silence_s: float) -> None:
        self._host, self._what, self._transport, self._pulse = host, what, transport, pulse
        self._silence_s = silence_s

    def run(
        self, command: str, stdin: bytes | BinaryIO | None, deadline: Deadline, on_line: Callable[[str], None] | None
    ) -> tuple[int, bytes, bytes]:
        try:
            channel = self._transport.open_session(timeout=min(self._silence_s, max(1.0, deadline.left)))
        except (paramiko.SSHException, EOFError, OSError) as error:
            raise self._lost(f"no session could be opened: {error}") from error
        with contextlib.closing(channel):
            ready = channel.fileno()  # before anything comes, or the first data would not be noticed
            try:
                # paramiko waits for the answer without end, before there is anything that could be watched
                within(self._silence_s, lambda: channel.exec_command(command))
            except TimeoutError:
                raise self._lost(f"the host was silent for {self._silence_s:.0f} s") from None
            except (paramiko.SSHException, EOFError, OSError) as error:
                raise self._lost(str(error)) from error
            threading.Thread(target=self._write, args=(channel, Feed(stdin)), daemon=True).start()
            out, err = Lines(on_line), Lines(None)
            with selectors.DefaultSelector() as selector:
                selector.register(ready, selectors.EVENT_READ)
                while not self._over(channel):
                    selector.select(0.1)
                    self._read(channel, out, err)
                    self._check(deadline)
            self._read(channel, out, err)
            rc = channel.recv_exit_status() if channel.exit_status_ready() else -1
            if rc == -1:
                raise self._lost("it ended without an exit status")
            return rc, out.all(), err.all()

    def _write(self, channel: paramiko.Channel, feed: Feed) -> None:
        """Runs beside the reading; a command that ends before it read everything closes the channel under us."""
        with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
            while not feed.done:
                count = channel.send(bytes(feed.head()))
                feed.took(count)
                self._pulse.beat()
            channel.shutdown_write()

    def _read(self, channel: paramiko.Channel, out: Lines, err: Lines) -> None:
        while channel.recv_ready():
            out.add(channel.recv(CHUNK))
            self._pulse.beat()
        while channel.recv_stderr_ready():
            err.add(channel.recv_stderr(CHUNK))
            self._pulse.beat()

    @staticmethod
    def _over(channel: paramiko.Channel) -> bool:
        more = channel.recv_ready() or channel.recv_stderr_ready()
        return bool(not more and (channel.closed or (channel.exit_status_ready() and channel.eof_received)))

    def _check(self, deadline: Deadline) -> None:
        if not self._transport.is_active():
            raise self._lost("the connection broke off")
        if self._pulse.silence > self._silence_s:
            raise DeadlineError(
                f"silent for {self._pulse.silence:.0f} s while running {self._what}", self._host,
                "the link is cut or the host is frozen; what it was doing ends there by itself or is whole",
                f"ddtree-ops status {self._host}",
            )  # fmt: skip
        if deadline.passed:
            raise DeadlineError(
                f"{self._what} did not end in time", self._host, "it is ended on the host by its own limit",
                f"ddtree-ops status {self._host}",
            )  # fmt: skip

    def _lost(self, how: str) -> UnreachableError:
        return UnreachableError(
            f"the connection was lost while running {self._what}: {how}", self._host,
            "each step on the host is whole or did not happen, but which of the two is not known from here",
            f"ddtree-ops status {self._host}",
        )  # fmt: skip


class Pulse:
    """Asks the server for any answer again and again, and knows how long ago the link last showed life."""

    def __init__(self, transport: paramiko.Transport, clock: Clock, every_s: float) -> None:
        self._transport, self._clock, self._every_s = transport, clock, every_s
        self._stopped = threading.Event()
        self._heard = clock.monotonic()
        threading.Thread(target=self._ask, name="ssh-pulse", daemon=True).start()

    def beat(self) -> None:
        self._heard = self._clock.monotonic()

    @property
    def silence(self) -> float:
        return self._clock.monotonic() - self._heard

    def stop(self) -> None:
        self._stopped.set()

    def _ask(self) -> None:
        while not self._stopped.wait(self._every_s) and self._transport.is_active():
            try:
                # Servers answer a request they do not know with a refusal: an answer is all that counts.
                self._transport.global_request("keepalive@openssh.com", wait=True)
            except (OSError, EOFError, paramiko.SSHException):
                return
            if self._transport.is_active():
                self.beat()


class OnlyKnown(paramiko.MissingHostKeyPolicy):
    """Every key goes through here, because the client itself is given none: one place decides."""

    def __init__(self, known: KnownHosts, key_name: str, host: str) -> None:
        self._known, self._key_name, self._host = known, key_name, host

    def missing_host_key(self, _client: paramiko.SSHClient, _hostname: str, key: paramiko.PKey) -> None:
        self._known.check(self._key_name, key, self._host)


def prefer(types: Sequence[str]) -> Callable[..., paramiko.Transport]:
    """Makes transports that ask for the kinds of key we know first, so that a known host is not called unknown."""

    def make(sock: Any, **kwargs: Any) -> paramiko.Transport:
        if isinstance(sock, paramiko.Channel):  # through a jump host
            sock.close = quiet(sock.close)  # type: ignore[method-assign]
        transport = paramiko.Transport(sock, **kwargs)
        options = transport.get_security_options()
        able = [t for t in types if t in options.key_types]
        options.key_types = [*able, *(t for t in options.key_types if t not in able)]
        return transport

    return make


def quiet(close: Callable[[], None]) -> Callable[[], None]:
    """``close``, which tells the other side so; where that is gone, a thread of the library would print a traceback."""

    def closing() -> None:
        with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
            close()

    return closing


def within(seconds: float, func: Callable[[], Any]) -> Any:
    """``func()`` in a thread of its own; TimeoutError if it takes longer (name resolution has no timeout at all)."""
    answer: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

    def work() -> None:
        try:
            answer.put((func(), None))
        except BaseException as error:  # noqa: BLE001  handed to the caller, whatever it is
            answer.put((None, error))

    threading.Thread(target=work, daemon=True).start()
    try:
        value, error = answer.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError from None
    if error is not None:
        raise error
    return value
