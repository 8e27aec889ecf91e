"""Where SSH finds a host: ``user@host:port``, ``[2001:db8::1]:22``, or an alias of ``~/.ssh/config``."""

from __future__ import annotations

import ipaddress
import re

from ddtree_ops.model import Address

_NAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9._-]*[A-Za-z0-9_])?\.?")
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._@\\+-]*\$?")


def parse_address(text: str) -> Address:
    """Parse ``[user@]host[:port]``; IPv6 with a port needs brackets. Raises ValueError that says what is wrong.

    The user may hold an ``@`` itself (directory services name users ``me@corp``): the last one separates.
    """
    user, at, place = text.rpartition("@")
    if at and not _USER.fullmatch(user):
        raise ValueError(f"{user!r} is not a user name")
    host, port = _split_port(place)
    if ":" in host:
        _check_ipv6(host)
    elif not _NAME.fullmatch(host):
        raise ValueError(f"{host!r} is neither a host name, an address nor an alias")
    return Address(host=host, user=user if at else None, port=port)


def _split_port(place: str) -> tuple[str, int | None]:
    if place.startswith("["):
        host, closed, rest = place[1:].partition("]")
        if not closed:
            raise ValueError("the bracket is not closed; IPv6 is written [2001:db8::1]:22")
        _check_ipv6(host)
        if rest and not rest.startswith(":"):
            raise ValueError(f"{rest!r} after the bracket; IPv6 is written [2001:db8::1]:22")
        return host, _port(rest[1:]) if rest else None
    if place.count(":") > 1:  # bare IPv6: any port would be ambiguous, so it has none
        return place, None
    host, colon, port = place.partition(":")
    return host, _port(port) if colon else None


def _port(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= 65535):
        raise ValueError(f"{text!r} is not a port (1 to 65535)")
    return int(text)


def _check_ipv6(host: str) -> None:
    try:
        ipaddress.IPv6Address(host)
    except ValueError:
        raise ValueError(f"{host!r} is not an IPv6 address") from None
