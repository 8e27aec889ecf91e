"""Which inventory file is meant.

In this order: ``--inventory FILE``; the variable DDTREE_INVENTORY; ``./inventory.toml``; the one file of
``./inventory/`` that defines the first target named; ``inventory.toml`` in the user's configuration directory.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

from ddtree_ops.errors import InventoryError, UsageError
from ddtree_ops.inventory.checks import did_you_mean

VARIABLE = "DDTREE_INVENTORY"


def locate_inventory(
    given: Path | None, targets: Sequence[str], *, environ: Mapping[str, str], config_dir: Path
) -> Path:
    """The file to read. Raises InventoryError when there is none, UsageError when more than one could be meant."""
    found = candidates(given, environ=environ, config_dir=config_dir)
    return found[0] if len(found) == 1 else _choose(found, targets)


def candidates(given: Path | None, *, environ: Mapping[str, str], config_dir: Path) -> list[Path]:
    """Every file that could be meant: more than one only where ``./inventory/`` decides. Raises InventoryError."""
    if given is not None:
        return [given]
    if environ.get(VARIABLE):
        return [Path(environ[VARIABLE])]
    single, folder, fallback = Path("inventory.toml"), Path("inventory"), config_dir / "inventory.toml"
    for found in ([single], sorted(folder.glob("*.toml")), [fallback]):
        if files := [path for path in found if path.is_file()]:
            return files
    raise InventoryError(
        f"no inventory: neither ./{single}, ./{folder}/*.toml nor {fallback} exists",
        why="it says which hosts and instances there are",
        next="write one (docs/inventory.md), or name one with --inventory FILE",
    )


def _choose(files: Sequence[Path], targets: Sequence[str]) -> Path:
    names = ", ".join(path.name for path in files)
    wanted = [target.partition(":")[0] for target in targets]
    if not wanted or "all" in wanted:
        raise UsageError(
            f"more than one inventory in ./{files[0].parent}: {names}",
            why="'all' must not mean more hosts than you think of",
            next=f"name a host, or the file: --inventory {files[0]}",
        )
    defined = {path: _names(path) for path in files}
    matching = [path for path, known in defined.items() if wanted[0] in known]
    if len(matching) == 1:
        return matching[0]
    if matching:
        raise UsageError(
            f"{wanted[0]!r} is defined in more than one inventory: {', '.join(path.name for path in matching)}",
            next=f"name the file: --inventory {matching[0]}",
        )
    every = sorted({name for known in defined.values() for name in known})
    raise UsageError(
        f"unknown host or group {wanted[0]!r}.{did_you_mean(wanted[0], every)}",
        why=f"the inventories {names} define: {', '.join(every) or 'nothing'}",
        next="ddtree-ops targets",
        data={"known": every},
    )


def _names(path: Path) -> set[str]:
    """The hosts and groups a file defines; a file that does not parse defines none here (it is read properly later)."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return set()
    return {
        name for table in ("hosts", "groups") if isinstance(document.get(table), dict) for name in document[table]
    }  # fmt: skip
