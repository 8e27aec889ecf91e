"""``ddtree-ops logs``: the journal of the instances' units."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from ddtree_ops import watch
from ddtree_ops.cli.command import Session, Targets, command
from ddtree_ops.hosts import code_of
from ddtree_ops.operate import by_host
from ddtree_ops.ui import error_data
from ddtree_ops.ui.streams import gone

EXAMPLES = ["ddtree-ops logs ct200:tree", "ddtree-ops logs all -f", "ddtree-ops logs ct200 -n 1000 --json"]


def register(app: typer.Typer) -> None:
    @command(app, "logs", examples=EXAMPLES)
    def logs(
        session: Session,
        targets: Targets,
        follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until Ctrl-C.")] = False,
        last: Annotated[int, typer.Option("--lines", "-n", min=0, metavar="N", help="How many lines back.")] = 100,
    ) -> None:
        """Show the servers' logs, of several instances side by side. With --json one JSON object a line."""
        selection = session.select(targets)
        prefix = len(selection.targets) > 1

        def line(target: str, entry: dict[str, Any]) -> None:
            if gone():  # nobody reads any more
                raise typer.Exit
            if session.json:
                session.out.json_line({"target": target, **entry})
                return
            at = datetime.fromtimestamp(entry["at"], UTC).strftime("%H:%M:%S")
            session.out.raw(f"{target + '  ' if prefix else ''}{at} {entry['message']}\n")
            sys.stdout.flush()

        errors = watch.logs(by_host(selection.targets), last, line, follow=follow)
        for error in errors:
            if session.json:
                session.out.json_line({"error": error_data(error)})
            else:
                session.out.error(error)
        raise typer.Exit(code_of(errors))
