"""Files that a command writes for a person: what cannot be written is said before anything else is done."""

from __future__ import annotations

import os
from pathlib import Path

from ddtree_ops.errors import UsageError


def require_writable(*files: Path | None) -> None:
    """UsageError for a file that could not be written in the end. Nothing is created."""
    for file in files:
        if file is None:
            continue
        if file.is_dir():
            wrong = "it is a folder"
        elif not file.parent.is_dir():
            wrong = f"there is no folder {file.parent}"
        elif not os.access(file if file.exists() else file.parent, os.W_OK):
            wrong = "no permission"
        else:
            continue
        raise UsageError(
            f"{file} cannot be written: {wrong}",
            why="what the command finds would be lost at its end",
            next=f"mkdir -p {file.parent}" if "there is no" in wrong else "name another file",
        )
