"""From a host of the inventory to the way there: which jump hosts, which names, ports, users and keys.

What the inventory says wins over ``~/.ssh/config``, which wins over ``/etc/ssh/ssh_config``. ``Include`` is expanded
in place. Nothing is contacted.
"""

from __future__ import annotations

import getpass
import glob
import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import paramiko

from ddtree_ops.errors import InventoryError
from ddtree_ops.model import HostSpec
from ddtree_ops.remote.known_hosts import split_files

USER_CONFIG = "~/.ssh/config"
SYSTEM_CONFIG = "/etc/ssh/ssh_config"
INCLUDE = re.compile(r"^\s*include(?:\s+|\s*=\s*)(.+)$", re.IGNORECASE)
MAX_INCLUDES = 16
MAX_HOPS = 8


@dataclass(frozen=True)
class Hop:
    """One machine on the way; ``key_name`` is what known_hosts calls it."""

    alias: str
    host: str
    port: int
    user: str
    key_name: str
    known_hosts: tuple[str, ...]
    identities: tuple[str, ...] = ()
    identities_only: bool = False
    use_agent: bool = True
    proxy_command: str | None = None

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.user}@{host}" + (f":{self.port}" if self.port != 22 else "")


def load_config(user: str = USER_CONFIG, system: str = SYSTEM_CONFIG) -> paramiko.SSHConfig:
    """Both files as one: the first value of an option wins, so the user's comes first."""
    texts = [included(Path(path).expanduser()) for path in (user, system)]
    # "Host *" closes an open block of the first file, or the second would only apply inside it.
    return paramiko.SSHConfig.from_text("\nHost *\n".join(texts))


def included(path: Path, depth: int = 0) -> str:
    """A file's text with its ``Include`` lines replaced by what they name; relative names lie beside it."""
    if depth > MAX_INCLUDES:
        raise InventoryError(f"{path}: Include nested deeper than {MAX_INCLUDES}")
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    out = []
    for line in lines:
        match = INCLUDE.match(line)
        if match is None:
            out.append(line)
            continue
        for pattern in shlex.split(match.group(1)):
            places = sorted(glob.glob(str(path.parent / Path(pattern).expanduser())))
            out += [included(Path(place), depth + 1) for place in places]
    return "\n".join(out)


def find_route(spec: HostSpec, config: paramiko.SSHConfig) -> tuple[Hop, ...]:
    """The machines to go through, in order; the last one is the host itself."""
    own = config.lookup(spec.address.host)
    target = hop(
        spec.address.host, spec.address.user, spec.address.port, config,
        identities=spec.identity, known_hosts=spec.known_hosts,
    )  # fmt: skip
    jumps = spec.jump if spec.jump is not None else own.get("proxyjump", "none")
    before = expand(jumps, config, spec, ((target.host, target.port),))
    return (*before, target)


def expand(
    jumps: str, config: paramiko.SSHConfig, spec: HostSpec, seen: tuple[tuple[str, int], ...]
) -> tuple[Hop, ...]:
    """``a,b`` goes through a, then b; what stands before a is for a's own ProxyJump to say.

    A wildcard often makes a jump host its own ProxyJump; like OpenSSH, that is taken as none.
    """
    if jumps.lower() == "none" or not jumps:
        return ()
    hops: list[Hop] = []
    for text in jumps.split(","):
        user, host, port = split_jump(text.strip())
        here = hop(host, user, port, config, identities=spec.identity, known_hosts=spec.known_hosts)
        if (here.host, here.port) == seen[-1]:
            return ()
        if (here.host, here.port) in seen or len(seen) > MAX_HOPS:
            raise InventoryError(
                f"the way to {spec.name} goes in a circle through {here}", spec.name,
                "no connection could ever be made", f"ssh -G {spec.address.host} | grep -i proxyjump",
            )  # fmt: skip
        if not hops:
            own = config.lookup(host).get("proxyjump", "none")
            hops += expand(own, config, spec, (*seen, (here.host, here.port)))
        hops.append(here)
    return tuple(hops)


def split_jump(text: str) -> tuple[str | None, str, int | None]:
    """``[user@]host[:port]``, with IPv6 in brackets; ``ssh://`` in front is allowed, as in OpenSSH."""
    rest = text.removeprefix("ssh://")
    user, at, place = rest.rpartition("@")
    if place.startswith("["):
        host, _, tail = place[1:].partition("]")
        return user if at else None, host, int(tail[1:]) if tail.startswith(":") else None
    if place.count(":") == 1:
        host, _, port = place.partition(":")
        return user if at else None, host, int(port)
    return user if at else None, place, None


def hop(
    alias: str,
    user: str | None,
    port: int | None,
    config: paramiko.SSHConfig,
    *,
    identities: Sequence[str] = (),
    known_hosts: str | None = None,
) -> Hop:
    """One machine, with what the inventory leaves open taken from the SSH configuration."""
    own = config.lookup(alias)
    host = own.get("hostname", alias)
    number = port or int(own.get("port", 22))
    name = own.get("hostkeyalias", host)
    files = split_files(own.get("userknownhostsfile"), ["~/.ssh/known_hosts", "~/.ssh/known_hosts2"])
    files += split_files(own.get("globalknownhostsfile"), ["/etc/ssh/ssh_known_hosts", "/etc/ssh/ssh_known_hosts2"])
    if known_hosts:
        files = (str(Path(known_hosts).expanduser()), *files)
    keys = [str(Path(i).expanduser()) for i in (*identities, *own.get("identityfile", []))]
    return Hop(
        alias=alias,
        host=host,
        port=number,
        user=user or own.get("user") or getpass.getuser(),
        key_name=name if number == 22 or "hostkeyalias" in own else f"[{name}]:{number}",
        known_hosts=files,
        # a key named in a configuration need not exist; one named in the inventory must
        identities=tuple(k for k in keys if k in map(os.path.expanduser, identities) or os.path.exists(k)),
        identities_only=own.get("identitiesonly", "no").lower() == "yes",
        use_agent=own.get("identityagent", "").lower() != "none",
        proxy_command=own.get("proxycommand") if own.get("proxycommand", "none").lower() != "none" else None,
    )
