"""The line of a TOML file on which a key is set: for error messages only, so best effort, never an error."""

from __future__ import annotations

import re
import tomllib

_HEADER = re.compile(r"^\s*\[\[?\s*(?P<keys>[^\[\]]+?)\s*\]\]?\s*(?:#.*)?$")
_PART = r"""(?:[A-Za-z0-9_-]+|"[^"]*"|'[^']*')"""
_KEY = re.compile(rf"^\s*(?P<keys>{_PART}(?:\s*\.\s*{_PART})*)\s*=")

KeyPath = tuple[str, ...]


def line_of(text: str, path: KeyPath) -> int | None:
    """The 1-based line that sets ``path``, or the nearest table or key above it; None when nothing is found."""
    best: tuple[int, int] | None = None  # (matched depth, line)
    table: KeyPath = ()
    inside = ""
    for number, line in enumerate(text.splitlines(), 1):
        if inside:
            inside = "" if line.count(inside) % 2 else inside
            continue
        if header := _HEADER.match(line):
            table = here = _split(header["keys"])
        elif key := _KEY.match(line):
            here = table + _split(key["keys"])
        else:
            continue
        inside = next((quote for quote in ('"""', "'''") if line.count(quote) % 2), "")
        if here and here == path[: len(here)] and (best is None or len(here) > best[0]):
            best = (len(here), number)
    return best[1] if best else None


def _split(dotted: str) -> KeyPath:
    """``a."b.c".d`` to its parts, by asking the TOML parser."""
    parts: list[str] = []
    try:
        node: object = tomllib.loads(f"{dotted} = 0")
    except tomllib.TOMLDecodeError:
        return ()
    while isinstance(node, dict):
        name, node = next(iter(node.items()))
        parts.append(name)
    return tuple(parts)


def dotted(path: KeyPath) -> str:
    """A key path as TOML writes it: ``hosts.ct200.instances."big one".port``."""
    return ".".join(part if re.fullmatch(r"[A-Za-z0-9_-]+", part) else f'"{part}"' for part in path)
