"""``ddtree-ops targets``: what the inventory defines."""

from __future__ import annotations

import typer

from ddtree_ops.cli.command import OptionalTargets, Session, command


def register(app: typer.Typer) -> None:
    @command(app, "targets", examples=["ddtree-ops targets", "ddtree-ops targets ct200 --json"])
    def targets(session: Session, targets: OptionalTargets = None) -> None:
        """List the hosts, instances and groups of the inventory."""
        fleet = session.fleet(targets or ())
        selection = session.select(targets)
        if session.json:
            session.out.data(
                {
                    "inventory": fleet.path,
                    "groups": fleet.groups,
                    "targets": [
                        {"target": t.name, "address": str(t.host.address), "settings": t.settings}
                        for t in selection.targets
                    ],
                }
            )
            return
        rows = [
            (
                t.name + (" (default)" if t.host.default_instance == t.settings.instance else ""),
                str(t.host.address) if t.host.transport == "ssh" else "local",
                t.settings.mode.value,
                ",".join(map(str, t.settings.gpus)) or "-",
                str(t.settings.port),
                t.settings.model,
            )
            for t in selection.targets
        ]
        session.out.table(("TARGET", "ADDRESS", "MODE", "GPU", "PORT", "MODEL"), rows)
        for group, members in fleet.groups.items():
            session.out.line(f"group {group}: {', '.join(members)}")
