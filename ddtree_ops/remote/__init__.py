"""Machines: ``open_remote`` gives the right kind of ``Remote`` for a host of the inventory."""

from __future__ import annotations

from ddtree_ops.clock import Clock
from ddtree_ops.model import HostSpec
from ddtree_ops.remote.base import Completed, Remote

__all__ = ["Completed", "Remote", "open_remote"]


def open_remote(host: HostSpec, clock: Clock | None = None) -> Remote:
    """A remote for ``host``. Nothing is contacted yet: that happens at the first call."""
    if host.transport == "local":
        from ddtree_ops.remote.local import LocalRemote

        return LocalRemote(host.name, clock)
    from ddtree_ops.remote.ssh import SshRemote  # fabric takes a while to import

    return SshRemote(host, clock)
