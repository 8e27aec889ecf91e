"""A port for a server that is told its port, which nobody else takes between choosing it and listening on it."""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import Iterator
from pathlib import Path

RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """A port of 127.0.0.1, this test's own as long as the block lasts.

    It lies below those that the kernel hands out by itself. Among tests, of this run or of another one, it belongs to
    whoever has bound it on 127.0.0.2.
    """
    low = int(RANGE.read_text().split()[0])
    for port in random.sample(range(max(1024, low - 16384), low), 512):
        with socket.socket() as claim:
            try:
                claim.bind(("127.0.0.2", port))
                with socket.socket() as trial:
                    trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    trial.bind(("127.0.0.1", port))
            except OSError:
                continue
            yield port
            return
    raise AssertionError(f"no free port below {low}")
