"""Machines: ``open_remote`` gives the right kind of ``Remote`` for a host of the inventory."""

from __future__ import annotations

from ddtree_ops.clock import Clock
from ddtree_ops.model import HostSpec
from ddtree_ops.remote.base import Completed, Remote
from ddtree_ops.remote.local import LocalRemote

__all__ = ["Completed", "Remote", "open_remote"]


def open_remote(host: HostSpec, clock: Clock | None = None) -> Remote:
    """A remote for ``host``. Nothing is contacted yet: that happens at the first call."""
    return LocalRemote(host.name, clock)
