"""``ddtree-ops status``: what is wanted, on disk, loaded and running."""

from __future__ import annotations

from typing import Annotated

import typer

from ddtree_ops import watch
from ddtree_ops.cli.command import OptionalTargets, Session, command
from ddtree_ops.operate import by_host
from ddtree_ops.ui.status import show_status
from ddtree_ops.wiring import CLOCK

EXAMPLES = [
    "ddtree-ops status",
    "ddtree-ops status ct200:tree --watch",
    "ddtree-ops status all --json | jq '.instances[] | {target, health}'",
]


def register(app: typer.Typer) -> None:
    @command(app, "status", examples=EXAMPLES)
    def status(
        session: Session,
        targets: OptionalTargets = None,
        watching: Annotated[bool, typer.Option("--watch", "-w", help="Look again until Ctrl-C.")] = False,
        every: Annotated[float, typer.Option("--every", metavar="S", min=0.5, help="Seconds between looks.")] = 2.0,
    ) -> None:
        """Show every instance: health, mode, release, accept length, tok/s, GPU memory, restarts.

        Exit code 0: all healthy, proven and as the inventory wants; 8: something is not; 3: a host does not answer.
        """
        hosts = by_host(session.select(targets).targets)
        while True:
            found = watch.statuses(hosts)
            code = watch.status_code(found)
            if session.json:
                show = session.out.json_line if watching else session.out.data
                show({"exit_code": int(code), "instances": [each.as_json() for each in found]})
            else:
                if watching:
                    session.out.out.clear()
                show_status(session.out, found)
            if not watching:
                raise typer.Exit(code)
            CLOCK.sleep(every)
