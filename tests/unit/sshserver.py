"""A real SSH server in this process, on loopback: runs commands, forwards connections, and misbehaves on demand."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import paramiko


@dataclass
class SshServer:
    """``frozen`` stops answering anything, ``freeze_on_exec`` only as a command is asked for; ``port``: it listens.

    ``on_probe`` is called for each question whether the link still lives, before it is answered; ``greeting`` is what
    the login shell runs before a command, ``shell`` that shell.
    """

    host_key: paramiko.PKey
    user_key: paramiko.PKey
    user: str = "op"
    address: str = "127.0.0.1"
    frozen: threading.Event = field(default_factory=threading.Event)
    freeze_on_exec: bool = False
    greeting: str = ""
    shell: str = "/bin/sh"
    on_probe: Callable[[], None] = field(default=lambda: None)
    children: list[subprocess.Popen[bytes]] = field(default_factory=list)
    transports: list[paramiko.Transport] = field(default_factory=list)
    forwards: list[tuple[str, int]] = field(default_factory=list)
    port: int = 0
    _listener: socket.socket | None = None

    def start(self) -> None:
        family = socket.AF_INET6 if ":" in self.address else socket.AF_INET
        self._listener = socket.socket(family, socket.SOCK_STREAM)
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._listener.bind((self.address, self.port))
        self._listener.listen(16)
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def stop(self) -> None:
        if self._listener is not None:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
        self.cut()
        for pid in in_sessions({child.pid for child in self.children}):  # what was asked for must not outlive the test
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def cut(self) -> None:
        """End every connection, as a host does that dies."""
        for transport in self.transports:
            transport.close()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            transport = _Stoppable(client, self.frozen)
            transport.add_server_key(self.host_key)
            self.transports.append(transport)
            with contextlib.suppress(paramiko.SSHException, EOFError, OSError):
                transport.start_server(event=threading.Event(), server=_Session(self, transport))


class _Stoppable(paramiko.Transport):
    """A transport whose answers stop while ``frozen`` is set; what it received by then is not read either."""

    def __init__(self, sock: socket.socket, frozen: threading.Event) -> None:
        self._frozen = frozen
        super().__init__(sock)

    def _send_message(self, data: Any) -> None:
        if not self._frozen.is_set():
            super()._send_message(data)


class _Session(paramiko.ServerInterface):
    def __init__(self, server: SshServer, transport: paramiko.Transport) -> None:
        self._server, self._transport = server, transport

    def check_auth_publickey(self, username: str, key: paramiko.PKey) -> int:
        if username == "two-factors":
            return paramiko.AUTH_PARTIALLY_SUCCESSFUL
        fits = username == self._server.user and key == self._server.user_key
        return paramiko.AUTH_SUCCESSFUL if fits else paramiko.AUTH_FAILED

    def get_allowed_auths(self, username: str) -> str:
        return "keyboard-interactive" if username == "two-factors" else "publickey"

    def check_global_request(self, _kind: str, _msg: paramiko.Message) -> bool:
        self._server.on_probe()
        return False

    def check_channel_request(self, kind: str, _chanid: int) -> int:
        return paramiko.OPEN_SUCCEEDED if kind == "session" else paramiko.OPEN_FAILED_ADMINISTRATIVELY_PROHIBITED

    def check_channel_direct_tcpip_request(self, chanid: int, _origin: Any, destination: tuple[str, int]) -> int:
        self._server.forwards.append(destination)
        try:
            far = socket.create_connection(destination, timeout=60)
        except OSError:
            return paramiko.OPEN_FAILED_CONNECT_FAILED
        threading.Thread(target=self._forward, args=(chanid, far), daemon=True).start()
        return paramiko.OPEN_SUCCEEDED

    def _forward(self, chanid: int, far: socket.socket) -> None:
        channel = None
        while channel is None or channel.get_id() != chanid:
            channel = self._transport.accept(5)
            if channel is None:
                return
        with far:
            far.settimeout(None)
            there = threading.Thread(target=pump, args=(channel, far), daemon=True)
            there.start()
            pump(far, channel)
            with contextlib.suppress(OSError, EOFError, paramiko.SSHException):  # the client may have gone meanwhile
                channel.close()
            there.join()

    def check_channel_exec_request(self, channel: paramiko.Channel, command: bytes) -> bool:
        if self._server.freeze_on_exec:
            self._server.frozen.set()
        threading.Thread(target=self._execute, args=(channel, command.decode()), daemon=True).start()
        return True

    def _execute(self, channel: paramiko.Channel, command: str) -> None:
        with subprocess.Popen(
            [self._server.shell, "-c", self._server.greeting + command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=Path.home(),
            start_new_session=True,
        ) as child:
            self._server.children.append(child)
            assert child.stdin
            assert child.stdout
            assert child.stderr
            threads = [
                threading.Thread(target=pump, args=(channel, child.stdin), daemon=True),
                threading.Thread(target=pump, args=(child.stdout, channel), daemon=True),
                threading.Thread(target=pump, args=(child.stderr, channel.makefile_stderr("wb", 0)), daemon=True),
            ]
            for thread in threads:
                thread.start()
            for thread in threads[1:]:
                thread.join()
            rc = child.wait()
        with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
            channel.send_exit_status(rc if rc >= 0 else 128 - rc)  # as a shell counts one that a signal ended
            channel.shutdown_write()
            channel.close()


def pump(source: Any, sink: Any) -> None:
    """Copy until the source ends; then end the sink, if that is how it knows."""
    read = source.recv if hasattr(source, "recv") else source.read1
    with contextlib.suppress(OSError, EOFError, ValueError, paramiko.SSHException):
        while block := read(1 << 15):
            if hasattr(sink, "sendall"):
                sink.sendall(block)
            else:
                sink.write(block)
                sink.flush()
    with contextlib.suppress(OSError, EOFError, ValueError):
        if isinstance(sink, socket.socket):
            sink.shutdown(socket.SHUT_WR)
        elif not isinstance(sink, paramiko.Channel) and hasattr(source, "recv"):
            sink.close()


def in_sessions(leaders: set[int]) -> list[int]:
    """The processes of these sessions. Of a process group there may be more: ``timeout`` makes one of its own."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # it ended meanwhile
                words = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
                if int(words[3]) in leaders:
                    found.append(int(entry.name))
    return found


@contextlib.contextmanager
def serving(server: SshServer) -> Iterator[SshServer]:
    server.start()
    try:
        yield server
    finally:
        server.stop()
