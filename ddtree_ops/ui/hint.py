"""Commands that a person is told to run next act on the inventory that was named, not on whichever is found. Pure.

What decides and what runs on a host write ``ddtree-ops logs h1:tree`` and know of no inventory. Whatever shows such a
text passes it through ``repeat_inventory``. An inventory that the environment names stays in force by itself.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

COMMANDS = (
    "bench",
    "bootstrap",
    "deploy",
    "diff",
    "doctor",
    "history",
    "logs",
    "plan",
    "prune",
    "render",
    "rollback",
    "selftest",
    "smoke",
    "status",
    "sweep",
    "targets",
    "trust",
    "unlock",
)
"""The commands that read an inventory."""

FIELDS = frozenset({"next", "resume", "repair", "notes", "details"})
"""Where data for ``--json`` holds commands to run; other fields (a unit, a log line, a reason) stay as they are."""

_COMPLETE = r"(?! (?:-i|--inventory|--local|--help)\b)"  # it names an inventory, or needs none
_COMMAND = re.compile(rf"(?<![\w-])ddtree-ops (?:{'|'.join(COMMANDS)})(?![\w-]){_COMPLETE}")


def repeat_inventory(text: str, inventory: Path | None) -> str:
    """``text`` with ``-i FILE``, quoted for a shell, in each command that reads an inventory and names none."""
    if inventory is None:
        return text
    option = f" -i {shlex.quote(str(inventory))}"
    return _COMMAND.sub(lambda found: found[0] + option, text)


def repeat_in_data(value: Any, inventory: Path | None, *, hints: bool = False) -> Any:
    """Plain data with every text below one of ``FIELDS`` passed through ``repeat_inventory``."""
    if inventory is None:
        return value
    if isinstance(value, dict):
        return {
            key: repeat_in_data(each, inventory, hints=key in FIELDS and isinstance(each, (str, list)))
            for key, each in value.items()
        }
    if isinstance(value, list):
        return [repeat_in_data(each, inventory, hints=hints) for each in value]
    return repeat_inventory(value, inventory) if hints and isinstance(value, str) else value
