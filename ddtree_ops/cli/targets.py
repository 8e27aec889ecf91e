"""``ddtree-ops targets``: what the inventory defines."""

from __future__ import annotations

from typing import Any

import typer

from ddtree_ops.cli.command import OptionalTargets, Session, command
from ddtree_ops.model import Fleet
from ddtree_ops.targets import Target, resolve_targets


def register(app: typer.Typer) -> None:
    @command(app, "targets", examples=["ddtree-ops targets", "ddtree-ops targets ct200 --json"])
    def targets(session: Session, targets: OptionalTargets = None) -> None:
        """List the hosts, instances and groups of the inventory; of every inventory here if none is meant."""
        fleets = [session.fleet(targets)] if targets else session.fleets()
        found = [(fleet, resolve_targets(fleet, targets or ())) for fleet in fleets]
        for _, selection in found:
            for notice in selection.notices:
                session.out.notice(notice)
        if session.json:
            session.out.data({"inventories": [_data(fleet, selection.targets) for fleet, selection in found]})
            return
        rows = [_row(fleet, target) for fleet, selection in found for target in selection.targets]
        session.out.table(("TARGET", "ADDRESS", "MODE", "GPU", "PORT", "MODEL", "INVENTORY"), rows)
        for fleet, _ in found:
            for group, members in fleet.groups.items():
                session.out.line(f"group {group}: {', '.join(members)}")


def _data(fleet: Fleet, targets: tuple[Target, ...]) -> dict[str, Any]:
    return {
        "inventory": fleet.path,
        "groups": fleet.groups,
        "targets": [{"target": t.name, "address": str(t.host.address), "settings": t.settings} for t in targets],
    }


def _row(fleet: Fleet, target: Target) -> tuple[str, ...]:
    host, settings = target
    return (
        target.name + (" (default)" if host.default_instance == settings.instance else ""),
        str(host.address) if host.transport == "ssh" else "local",
        settings.mode.value,
        ",".join(map(str, settings.gpus)) or "-",
        str(settings.port),
        settings.model,
        fleet.path,
    )
