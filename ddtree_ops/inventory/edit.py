"""``--save``: write changed settings back into the TOML file, comments and layout kept."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tomlkit

from ddtree_ops.errors import InventoryError
from ddtree_ops.inventory.load import parse_fleet

Change = tuple[str, str, Mapping[str, Any]]
"""Host, instance, and the keys of its settings with their new values."""


def save_settings(path: Path, changes: Sequence[Change]) -> list[str]:
    """Change instances in the file; returns one line for each key that changed. Raises InventoryError.

    The new text is read back by the loader before the file is replaced, by rename: a reader sees old or new.
    """
    text = path.read_text(encoding="utf-8")
    new, lines = edit_text(text, changes)
    if new == text:
        return []
    parse_fleet(new, str(path))
    try:
        _replace(path, new)
    except OSError as error:
        raise InventoryError(
            f"the inventory {path} cannot be written: {error}",
            why="the change is not kept for the next deploy",
            next="make the file writable, or leave --save out",
        ) from error
    return lines


def edit_text(text: str, changes: Sequence[Change]) -> tuple[str, list[str]]:
    """The changed text and what changed. Pure."""
    document = tomlkit.parse(text)
    lines: list[str] = []
    for host, instance, values in changes:
        hosts: Any = document["hosts"]
        table = hosts[host]["instances"][instance]
        for key, value in values.items():
            old = table.get(key)
            if old == _toml(value):
                continue
            table[key] = _toml(value)
            was = "" if old is None else f" (was {old})"
            lines.append(f"hosts.{host}.instances.{instance}.{key} = {tomlkit.item(_toml(value)).as_string()}{was}")
    return tomlkit.dumps(document), lines


def _toml(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return list(value)
    return str(value) if isinstance(value, str) else value


def _replace(path: Path, text: str) -> None:
    path = path.resolve()  # a linked inventory stays a link
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, path.stat().st_mode & 0o7777)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
