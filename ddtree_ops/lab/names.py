"""What a lab and its hosts are called. Pure: names and paths from a lab's name, nothing is touched.

Two labs never share a link, a network namespace, a control group, a directory or an address: everything global
carries the lab's name, or a tag of five characters made from it where the kernel allows 15 (link names).
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from ddtree_ops import data
from ddtree_ops.errors import UsageError

DEFAULT_LAB = "default"
FIRST_HOST = 11
MAX_HOSTS = 64


def cache_dir() -> Path:
    """Where the base roots and disks are kept; shared by all labs, rebuilt when missing."""
    return data.cache_dir() / "lab"


def state_dir() -> Path:
    """Where running labs live, one directory each."""
    return platformdirs.user_state_path("ddtree-ops") / "lab"


def nets_lock() -> Path:
    """Held while links, namespaces and addresses are chosen or let go: all labs share those."""
    return state_dir() / "nets.lock"


@dataclass(frozen=True)
class LabNames:
    """The names of one lab."""

    lab: str = DEFAULT_LAB

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z0-9][a-z0-9-]{0,31}", self.lab):
            raise UsageError(
                f"{self.lab!r} cannot be a lab's name",
                why="it becomes part of directory, namespace and control group names",
                next="use at most 32 of a-z, 0-9 and '-', starting with a letter or a digit",
            )

    @property
    def tag(self) -> str:
        return hashlib.sha256(self.lab.encode()).hexdigest()[:5]

    @property
    def dir(self) -> Path:
        return state_dir() / self.lab

    @property
    def bridge(self) -> str:
        return f"dd{self.tag}-br"

    @property
    def cgroup(self) -> str:
        """Path of the lab's control group below the root of the cgroup2 tree."""
        return f"ddtree-lab-{self.lab}"

    @property
    def known_hosts(self) -> Path:
        return self.dir / "known_hosts"

    @property
    def identity(self) -> Path:
        return self.dir / "id_ed25519"

    @property
    def inventory(self) -> Path:
        return self.dir / "inventory.toml"

    @property
    def pair_inventory(self) -> Path:
        return self.dir / "pair.toml"

    def host(self, index: int) -> HostNames:
        """The host with this number, counted from 1."""
        return HostNames(self, index)

    def host_by_name(self, name: str) -> HostNames:
        """The host called ``lab1``, ``lab2``, ...; any other name is a usage error."""
        match = re.fullmatch(r"lab([1-9][0-9]?)", name)
        if match is None or int(match[1]) > MAX_HOSTS:
            raise UsageError(
                f"there is no lab host called {name!r}",
                why="lab hosts are called lab1, lab2, and so on",
                next="ddtree-ops lab status",
            )
        return self.host(int(match[1]))


@dataclass(frozen=True)
class HostNames:
    """The names of one host of a lab."""

    lab: LabNames
    index: int

    @property
    def name(self) -> str:
        return f"lab{self.index}"

    @property
    def dir(self) -> Path:
        return self.lab.dir / "hosts" / self.name

    @property
    def link(self) -> str:
        """This machine's end of the host's cable."""
        return f"dd{self.lab.tag}-{self.index}"

    @property
    def netns(self) -> str:
        return f"ddtree-{self.lab.lab}-{self.name}"

    @property
    def cgroup(self) -> str:
        return f"{self.lab.cgroup}/{self.name}"

    def address(self, net: int) -> str:
        return f"10.77.{net}.{FIRST_HOST + self.index - 1}"
