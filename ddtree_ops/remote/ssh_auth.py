"""Which keys are offered to a host, in which order, and what became of each.

Keys named in the inventory or the SSH configuration come first, then the agent's, then ``~/.ssh/id_*``. No password
is ever asked for or sent. paramiko's own order loads every file as every kind of key and reports the last parser's
complaint as the reason; here the reason is what the host said, key by key.
"""

from __future__ import annotations

import base64
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import paramiko
from paramiko.auth_strategy import AuthFailure, AuthSource, AuthStrategy, InMemoryPrivateKey

from ddtree_ops.errors import AuthError
from ddtree_ops.remote.ssh_config import Hop

DEFAULT_KEYS = ("~/.ssh/id_ed25519", "~/.ssh/id_ecdsa", "~/.ssh/id_rsa")
AGENT_S = 2.0


class Keys(AuthStrategy):
    """Yields the keys for one hop; ``unusable`` says which files could not be loaded, and why."""

    def __init__(self, hop: Hop) -> None:
        super().__init__(ssh_config=paramiko.SSHConfig())
        self.hop = hop
        self.unusable: list[str] = []
        self.locked: str | None = None

    def get_sources(self) -> Iterator[AuthSource]:
        named = self.hop.identities
        yield from (key for key in map(self._load, named) if key is not None)
        yield from self._agent_keys()
        if not self.hop.identities_only:
            defaults = [path for path in map(os.path.expanduser, DEFAULT_KEYS) if path not in named]
            yield from (key for key in map(self._load, filter(os.path.exists, defaults)) if key is not None)

    def _load(self, path: str) -> AuthSource | None:
        try:
            return Named(self.hop.user, paramiko.PKey.from_path(path), path)
        except FileNotFoundError:
            self.unusable.append(f"{path} does not exist")
        except (TypeError, paramiko.PasswordRequiredException):
            self.unusable.append(f"{path} needs a passphrase")
            self.locked = self.locked or path
        except (OSError, ValueError, paramiko.SSHException) as error:
            self.unusable.append(f"{path} could not be read: {error}")
        return None

    def _agent_keys(self) -> Iterator[AuthSource]:
        if not self.hop.use_agent or not agent_answers(os.environ.get("SSH_AUTH_SOCK"), AGENT_S):
            return
        wanted = [blob for blob in map(public_blob, self.hop.identities) if blob is not None]
        agent = paramiko.Agent()
        try:
            for key in agent.get_keys():
                if not self.hop.identities_only or key.asbytes() in wanted:
                    yield Named(self.hop.user, key, f"agent key {key.comment or key.get_name()}")
        finally:
            agent.close()


class Named(InMemoryPrivateKey):
    """A key with the name a person knows it by."""

    def __init__(self, user: str, key: paramiko.PKey, name: str) -> None:
        super().__init__(user, key)
        self.name = name

    def authenticate(self, transport: paramiko.Transport) -> Any:
        """A host that wants more than a key has not let us in; paramiko would call that a success."""
        further = super().authenticate(transport)
        if further:
            raise paramiko.BadAuthenticationType("the key is not enough", list(further))
        return further

    def __repr__(self) -> str:
        return self.name


def explain_auth(error: AuthFailure, where: str, ssh: str) -> AuthError:
    """What the host said to each key, and what to do about it."""
    keys = error.result.strategy
    assert isinstance(keys, Keys)
    tried = [f"{source} ({said(result)})" for source, result in error.result] + keys.unusable
    user = keys.hop.user
    if keys.locked and not error.result:
        return AuthError(
            f"the key {keys.locked} needs a passphrase", "", "keys are never unlocked here; an agent does that",
            f"ssh-add {keys.locked}",
        )  # fmt: skip
    why = "the user does not exist there, or none of these keys is in its authorized_keys"
    return AuthError(
        f"{where} does not let {user} in; tried: {'; '.join(tried) or 'nothing, there is no key'}", "", why, ssh
    )


def said(result: object) -> str:
    if isinstance(result, paramiko.BadAuthenticationType):
        return f"a key alone is not enough, it wants {', '.join(result.allowed_types)}"
    if isinstance(result, paramiko.AuthenticationException):
        return "refused"
    return str(result) or type(result).__name__


def public_blob(path: str) -> bytes | None:
    """The public half of a key file, without its passphrase."""
    try:
        return base64.b64decode(Path(path + ".pub").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return None


def agent_answers(path: str | None, seconds: float) -> bool:
    """Whether an SSH agent listens at ``path`` and answers in time; paramiko would wait for a dead one for ever."""
    if not path:
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(seconds)
        try:
            probe.connect(path)
            probe.sendall(struct.pack(">IB", 1, 11))  # SSH2_AGENTC_REQUEST_IDENTITIES
            return len(probe.recv(5)) > 0
        except OSError:
            return False
