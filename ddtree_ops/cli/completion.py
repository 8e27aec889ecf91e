"""Completion of TARGET in the shell, from every inventory the working directory offers. Never an error."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import platformdirs

from ddtree_ops.errors import DdtreeError
from ddtree_ops.inventory import load_fleet
from ddtree_ops.inventory.locate import VARIABLE
from ddtree_ops.model import Fleet


def complete_target(args: list[str], incomplete: str) -> list[str]:
    """Names that start as typed. Bash splits words at the colon: then only the instance's part is wanted."""
    if args and args[-1] == ":" and len(args) > 1:
        prefix = f"{args[-2]}:"
        return [name.removeprefix(prefix) for name in _names() if name.startswith(prefix + incomplete)]
    return [name for name in _names() if name.startswith(incomplete)]


def _names() -> list[str]:
    names = ["all"]
    for fleet in _fleets():
        names += fleet.groups
        for host in fleet.hosts.values():
            names.append(host.name)
            names += [f"{host.name}:{instance}" for instance in host.instances]
    return sorted(dict.fromkeys(names))


def _fleets() -> Iterator[Fleet]:
    cwd = Path.cwd()
    if given := os.environ.get(VARIABLE):
        paths = [Path(given)]
    else:
        paths = [cwd / "inventory.toml", *sorted((cwd / "inventory").glob("*.toml"))]
        paths.append(platformdirs.user_config_path("ddtree-ops") / "inventory.toml")
    for path in paths:
        try:
            yield load_fleet(path)
        except DdtreeError:
            continue
