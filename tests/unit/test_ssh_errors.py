"""Every way a connection can fail, in words a person can act on."""

from __future__ import annotations

import errno
import socket

import paramiko
import pytest
from paramiko.ssh_exception import IncompatiblePeer, NoValidConnectionsError, ProxyCommandFailure

from ddtree_ops.errors import AuthError, DeadlineError, ExitCode, HostKeyError, UnreachableError
from ddtree_ops.remote.ssh_config import Hop
from ddtree_ops.remote.ssh_errors import explain_connect

HOP = Hop("box", "10.0.0.1", 2222, "op", "[10.0.0.1]:2222", ())
REFUSED = NoValidConnectionsError({("10.0.0.1", 2222): OSError(errno.ECONNREFUSED, "Connection refused")})
NO_WAY = NoValidConnectionsError({("10.0.0.1", 2222): OSError(errno.EHOSTUNREACH, "No route to host")})


@pytest.mark.parametrize(
    ("error", "kind", "found", "next"),
    [
        (socket.gaierror(-2, "Name not known"), UnreachableError, "does not resolve", "getent hosts 10.0.0.1"),
        (IncompatiblePeer("no acceptable kex algorithm"), UnreachableError, "no longer safe", "update sshd"),
        (paramiko.ChannelException(2, "Connect failed"), UnreachableError, "jump host could not reach", "ssh -v box"),
        (ProxyCommandFailure("nc box 22", "no route"), UnreachableError, "the ProxyCommand to 10.0.0.1", "ssh -v box"),
        (paramiko.SSHException("Error reading SSH protocol banner"), DeadlineError, "no SSH server answers", "ssh -v"),
        (paramiko.SSHException("No existing session"), DeadlineError, "no SSH server answers", "ssh -v box"),
        (EOFError(), UnreachableError, "closed the connection during the handshake", "ssh -v box"),
        (paramiko.AuthenticationException("Timeout"), AuthError, "ended the login", "ssh -v box"),
        (REFUSED, UnreachableError, "refuses", "start ssh"),
        (NO_WAY, UnreachableError, "No route", "ping"),
        (TimeoutError(), UnreachableError, "does not answer within 5 s", "ping -c 3 10.0.0.1"),
        (OSError(errno.ENETUNREACH, "Network is unreachable"), UnreachableError, "Network is unreachable", "ssh -v"),
        (paramiko.SSHException("odd"), UnreachableError, "SSHException: odd", "ssh -v box"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else None,
)  # fmt: skip
def test_each_failure_is_told_apart(error: BaseException, kind: type[UnreachableError], found: str, next: str) -> None:
    said = explain_connect(error, HOP, "ct200", 5.0, last=True)
    assert type(said) is kind
    assert (said.host, said.exit_code) == ("ct200", ExitCode.UNREACHABLE)
    assert found in said.found
    assert next in said.next
    assert said.why


def test_a_jump_host_is_called_one_and_an_error_of_ours_stays_as_it_is() -> None:
    assert "10.0.0.1 port 2222 (a jump host)" in explain_connect(TimeoutError(), HOP, "ct200", 5.0, last=False).found
    ours = HostKeyError("its key is not known", "ct200")
    assert explain_connect(ours, HOP, "ct200", 5.0, last=True) is ours
