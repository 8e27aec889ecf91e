"""The one place that quotes for systemd.

A unit file is read in layers, and each eats characters: lines end at newline and carriage return and join at a
trailing backslash; words split at white space, with quotes and C escapes undone; ``%`` starts a specifier; in
``Exec*=`` lines ``$`` starts a variable, and a lone ``;`` ends the command. ``Environment=`` has every layer but the
last: there ``$`` is a plain character. A word is quoted so that it passes through all of them unchanged.
"""

from __future__ import annotations

import re

from ddtree_ops.text import unusable

_PLAIN = re.compile(r"[A-Za-z0-9_@:=./,+-]+")
_ESCAPES = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r", "\t": "\\t"}


def is_control(char: str) -> bool:
    """Whether a unit can say ``char`` by an escape only."""
    return ord(char) < 0x20 or ord(char) == 0x7F


def quote_arg(word: str) -> str:
    """One argument of ``ExecStart=``. Raises ValueError for what none can hold (see ``text.unusable``)."""
    return _quote(word, dollar="$$")


def quote_env(name: str, value: str) -> str:
    """One ``NAME=value`` of ``Environment=``."""
    return _quote(f"{name}={value}", dollar="$")


def quote_path(path: str) -> str:
    """One path of ``RequiresMountsFor=``, which undoes quotes and specifiers only. Raises ValueError as ``quote_arg``.

    There ``\\n`` is an ``n``: a path with control characters cannot be said and must not come here.
    """
    return _quote(path, dollar="$")


def _quote(word: str, *, dollar: str) -> str:
    if reason := unusable(word):
        raise ValueError(reason)
    if _PLAIN.fullmatch(word):
        return word
    return '"' + "".join(_escape(char, dollar) for char in word) + '"'


def _escape(char: str, dollar: str) -> str:
    if char in _ESCAPES:
        return _ESCAPES[char]
    if char == "%":
        return "%%"
    if char == "$":
        return dollar
    if is_control(char):
        return f"\\x{ord(char):02x}"
    return char
