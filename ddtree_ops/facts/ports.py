"""The kernel's range for outgoing connections, and what is kept out of it. Pure."""

from __future__ import annotations

import re


def parse_port_range(text: str) -> tuple[int, int] | None:
    """``ip_local_port_range``: first and last."""
    found = re.fullmatch(r"\s*(\d+)\s+(\d+)\s*", text)
    return (int(found[1]), int(found[2])) if found else None


def parse_reserved(text: str) -> frozenset[int]:
    """``ip_local_reserved_ports``: numbers and ranges."""
    found: set[int] = set()
    for part in text.strip().split(","):
        ends = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip())
        if ends and int(ends[2] or ends[1]) <= 65535:
            found.update(range(int(ends[1]), int(ends[2] or ends[1]) + 1))
    return frozenset(found)


def may_be_taken(port: int, span: tuple[int, int] | None, reserved: frozenset[int]) -> bool:
    """Whether any outgoing connection may be given this port."""
    return span is not None and span[0] <= port <= span[1] and port not in reserved
