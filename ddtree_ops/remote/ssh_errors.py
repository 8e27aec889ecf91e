"""What went wrong on the way to a host, in words a person can act on."""

from __future__ import annotations

import errno
import re
import socket
from typing import cast

import paramiko
from paramiko.auth_strategy import AuthFailure
from paramiko.ssh_exception import IncompatiblePeer, NoValidConnectionsError, ProxyCommandFailure

from ddtree_ops.errors import AuthError, DdtreeError, DeadlineError, UnreachableError
from ddtree_ops.remote.ssh_auth import explain_auth
from ddtree_ops.remote.ssh_config import Hop

NOT_CHANGED = "nothing was changed"
# How paramiko says that the handshake did not end in time; the second is what start_client leaves behind.
SILENT = re.compile("banner|No existing session")


def explain_connect(error: BaseException, hop: Hop, name: str, seconds: float, *, last: bool) -> DdtreeError:
    """The error of connecting to ``hop`` on the way to the host ``name``; ``last``: the hop is that host."""
    if isinstance(error, DdtreeError):
        return error
    where = f"{hop.host} port {hop.port}" + ("" if last else " (a jump host)")
    ssh = f"ssh -v {hop.alias if last else hop}"
    for explain in (_names, _auth, _protocol, _network):
        found = explain(error, hop, where, seconds, ssh)
        if found is not None:
            found.host = name
            return found
    return UnreachableError(f"{where}: {type(error).__name__}: {error}", name, NOT_CHANGED, ssh)


def _names(error: BaseException, hop: Hop, _where: str, _seconds: float, _ssh: str) -> DdtreeError | None:
    if isinstance(error, socket.gaierror):
        return UnreachableError(
            f"the name {hop.host} does not resolve ({error.strerror})", "",
            "neither DNS, /etc/hosts nor ~/.ssh/config knows it", f"getent hosts {hop.host}",
        )  # fmt: skip
    return None


def _auth(error: BaseException, _hop: Hop, where: str, _seconds: float, ssh: str) -> DdtreeError | None:
    if isinstance(error, AuthFailure):
        return explain_auth(error, where, ssh)
    if isinstance(error, paramiko.AuthenticationException):
        return AuthError(f"{where} ended the login: {error}", "", NOT_CHANGED, ssh)
    return None


def _protocol(error: BaseException, _hop: Hop, where: str, seconds: float, ssh: str) -> DdtreeError | None:
    if isinstance(error, IncompatiblePeer):
        return UnreachableError(
            f"{where} speaks only algorithms that are no longer safe ({error})", "",
            "its sshd is too old, or has only an RSA key with SHA-1", "on the host: ssh-keygen -A, and update sshd",
        )  # fmt: skip
    if isinstance(error, paramiko.ChannelException):
        return UnreachableError(f"the jump host could not reach {where}: {error.text}", "", NOT_CHANGED, ssh)
    if isinstance(error, ProxyCommandFailure):
        return UnreachableError(f"the ProxyCommand to {where} failed: {error}", "", NOT_CHANGED, ssh)
    if isinstance(error, paramiko.SSHException) and SILENT.search(str(error)):
        return DeadlineError(
            f"{where} accepts connections, but no SSH server answers there within {seconds:.0f} s", "",
            "the host is frozen or overloaded, or something else has the port", ssh,
        )  # fmt: skip
    if isinstance(error, EOFError):
        return UnreachableError(f"{where} closed the connection during the handshake", "", NOT_CHANGED, ssh)
    return None


def _network(error: BaseException, hop: Hop, where: str, seconds: float, ssh: str) -> DdtreeError | None:
    if isinstance(error, NoValidConnectionsError):
        first = cast(OSError, next(iter(error.errors.values())))
        if first.errno == errno.ECONNREFUSED:
            return UnreachableError(
                f"{where} refuses connections", "", "no SSH server listens there", "on the host: systemctl start ssh"
            )
        return UnreachableError(f"{where}: {first.strerror}", "", "there is no way to it", f"ping -c 3 {hop.host}")
    if isinstance(error, TimeoutError):
        return UnreachableError(
            f"{where} does not answer within {seconds:.0f} s", "",
            "it is down, cut off, or a firewall drops the packets", f"ping -c 3 {hop.host}",
        )  # fmt: skip
    if isinstance(error, OSError):
        return UnreachableError(f"{where}: {error.strerror or error}", "", NOT_CHANGED, ssh)
    return None
