"""Learning a host's keys: what ``ddtree-ops trust`` shows, judges and writes. Nothing is trusted without a decision."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import paramiko

from ddtree_ops.errors import HostKeyError
from ddtree_ops.model import HostSpec
from ddtree_ops.remote.known_hosts import KnownHosts, fingerprint, remember
from ddtree_ops.remote.ssh import CONNECT_S, open_hop, within
from ddtree_ops.remote.ssh_config import Hop, find_route, load_config
from ddtree_ops.remote.ssh_errors import explain_connect

if TYPE_CHECKING:
    from fabric import Connection

KINDS = (("ssh-ed25519",), ("ecdsa-sha2-nistp256", "ecdsa-sha2-nistp384", "ecdsa-sha2-nistp521"), ("rsa-sha2-512",))
State = Literal["known", "new", "changed"]


@dataclass(frozen=True)
class OfferedKey:
    """A key that a machine showed, and what known_hosts says about it."""

    key: paramiko.PKey
    state: State

    @property
    def type(self) -> str:
        return self.key.get_name()

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.key.asbytes())


@dataclass(frozen=True)
class Offer:
    """One machine on the way to the host, the keys it showed, and the file that would remember them."""

    hop: Hop
    keys: tuple[OfferedKey, ...]
    file: Path

    @property
    def unknown(self) -> tuple[OfferedKey, ...]:
        return tuple(key for key in self.keys if key.state != "known")

    @property
    def changed(self) -> bool:
        """Some key of a kind that is known is another one now."""
        return any(key.state == "changed" for key in self.keys)


def learn(
    host: HostSpec,
    decide: Callable[[Offer], Sequence[OfferedKey]],
    *,
    replace: bool = False,
    config: paramiko.SSHConfig | None = None,
    connect_s: float = CONNECT_S,
) -> list[Offer]:
    """Show each machine on the way to ``decide``, which returns the keys to trust. A jump host comes first.

    Raises HostKeyError for a key that changed, unless ``replace``.
    """
    route = find_route(host, config if config is not None else load_config())
    offers: list[Offer] = []
    way: list[Connection] = []
    try:
        for hop in route:
            offer = offered(hop, host, way[-1] if way else None, connect_s, last=hop is route[-1])
            offers.append(offer)
            if offer.changed and not replace:
                refuse_changed(offer, host.name)
            chosen = decide(offer) if offer.unknown else ()
            if chosen:
                drop = replace and any(key.state == "changed" for key in offer.keys)
                remember(offer.file, hop.key_name, [key.key for key in chosen], replace=drop)
            if hop is not route[-1]:
                way.append(open_hop(hop, way[-1] if way else None, host.name, connect_s, last=False))
    finally:
        for connection in reversed(way):
            connection.client.close()
    return offers


def offered(hop: Hop, host: HostSpec, through: Connection | None, seconds: float, *, last: bool) -> Offer:
    """Ask a machine for one key of each kind it has."""
    known = KnownHosts.load(hop.known_hosts)
    keys: dict[bytes, paramiko.PKey] = {}
    for kinds in KINDS:
        try:
            key = within(seconds + 1.0, partial(shown_key, hop, through, kinds, seconds))
        except paramiko.ssh_exception.IncompatiblePeer:
            continue
        except Exception as error:
            raise explain_connect(error, hop, host.name, seconds, last=last) from error
        keys[key.asbytes()] = key
    entries = known.about(hop.key_name)
    found = tuple(OfferedKey(key, judged(key, entries)) for key in keys.values())
    file = host.known_hosts or hop.known_hosts[0]
    return Offer(hop, found, Path(file).expanduser())


def judged(key: paramiko.PKey, entries: Sequence[Any]) -> State:
    if any(entry.blob == key.asbytes() for entry in entries):
        return "known"
    return "changed" if any(entry.key_type == key.get_name() for entry in entries) else "new"


def shown_key(hop: Hop, through: Connection | None, kinds: Sequence[str], seconds: float) -> paramiko.PKey:
    """The key that the machine proves to hold in a handshake limited to ``kinds``; nobody logs in."""
    sock: Any
    if through is not None:
        assert through.transport is not None
        sock = through.transport.open_channel("direct-tcpip", (hop.host, hop.port), ("", 0), timeout=seconds)
    elif hop.proxy_command:
        sock = paramiko.ProxyCommand(hop.proxy_command)
    else:
        sock = socket.create_connection((hop.host, hop.port), timeout=seconds)
    transport = paramiko.Transport(sock)
    with contextlib.closing(transport):
        transport.banner_timeout = seconds
        transport.get_security_options().key_types = list(kinds)
        transport.start_client(timeout=seconds)
        return transport.get_remote_server_key()


def refuse_changed(offer: Offer, host: str) -> None:
    entries = KnownHosts.load(offer.hop.known_hosts).about(offer.hop.key_name)
    before = [f"{entry.key_type} {fingerprint(entry.blob)}" for entry in entries]
    now = [f"{key.type} {key.fingerprint}" for key in offer.keys if key.state == "changed"]
    raise HostKeyError(
        f"{offer.hop} shows {', '.join(now)}, but known is {', '.join(before)}",
        host,
        "either it was installed anew or another machine answers in its place",
        f"ddtree-ops trust {host} --replace",
        {"known": before, "shown": now},
    )
