"""Completion of TARGET in the shell, from every inventory the working directory offers. Never an error."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import platformdirs
import typer

from ddtree_ops.errors import DdtreeError
from ddtree_ops.inventory import load_fleet
from ddtree_ops.inventory.locate import candidates
from ddtree_ops.model import Fleet


def complete_target(context: typer.Context, incomplete: str) -> list[str]:
    """Names that start as typed. Bash splits words at the colon: then only the instance's part is wanted."""
    words: list[str] = context.params.get("targets") or []
    if len(words) > 1 and words[-1] == ":":
        prefix = f"{words[-2]}:"
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
    with contextlib.suppress(DdtreeError):
        for path in candidates(None, environ=os.environ, config_dir=platformdirs.user_config_path("ddtree-ops")):
            with contextlib.suppress(DdtreeError):
                yield load_fleet(path)
