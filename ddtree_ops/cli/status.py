"""``ddtree-ops status``: what is wanted, on disk, loaded and running."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.text import Text

from ddtree_ops import watch
from ddtree_ops.cli.command import OptionalTargets, Session, command
from ddtree_ops.drift import find
from ddtree_ops.errors import ExitCode
from ddtree_ops.hosts import Hosts, code_of, each_host
from ddtree_ops.operate import by_host
from ddtree_ops.ui import error_data
from ddtree_ops.ui.status import show_status
from ddtree_ops.ui.streams import gone
from ddtree_ops.wiring import CLOCK

EXAMPLES = [
    "ddtree-ops status",
    "ddtree-ops status ct200:tree --watch",
    "ddtree-ops status ct200 --drift",
    "ddtree-ops status all --json | jq '.instances[] | {target, health}'",
]


def show_drift(session: Session, hosts: Hosts) -> ExitCode:
    """Every difference with the command that mends it; 8 if there is any, else what kept us from looking."""
    answers = each_host(hosts, find)
    found = [each for answer in answers for each in answer.value or ()]
    errors = [answer.error for answer in answers if answer.error is not None]
    code = ExitCode.MOVED if found else code_of(errors)
    if session.json:
        unseen = [error_data(error) for error in errors]
        session.out.data({"exit_code": int(code), "differences": found, "errors": unseen})
        return code
    for each in found:
        session.out.line(Text(f"{each.target}  ", "cyan").append(f"{each.kind}: {each}", "default"))
        session.out.line(session.out.hint(f"    {each.repair}"), style="dim")
    for error in errors:
        session.out.error(error)
    if code is ExitCode.DONE:
        session.out.line("no drift: everything is as it was deployed")
    return code


def register(app: typer.Typer) -> None:
    @command(app, "status", examples=EXAMPLES)
    def status(
        session: Session,
        targets: OptionalTargets = None,
        watching: Annotated[bool, typer.Option("--watch", "-w", help="Look again until Ctrl-C.")] = False,
        drift: Annotated[
            bool, typer.Option("--drift", help="Compare every file, unit and process with what was deployed.")
        ] = False,
        every: Annotated[float, typer.Option("--every", metavar="S", min=0.5, help="Seconds between looks.")] = 2.0,
    ) -> None:
        """Show every instance: health, mode, release, accept length, tok/s, GPU memory, restarts.

        Exit code 0: all are healthy and proven; 8: one is not; 3: a host does not answer. What runs otherwise than the
        inventory wants is said, but does not count. With --drift, 8: something differs from what was deployed.
        """
        hosts = by_host(session.select(targets).targets)
        if drift:
            raise typer.Exit(show_drift(session, hosts))
        while True:
            code = look(session, hosts, watching=watching)
            if not watching or gone():
                raise typer.Exit(code)
            CLOCK.sleep(every)


def look(session: Session, hosts: Hosts, *, watching: bool) -> ExitCode:
    """Show every instance once."""
    found = watch.statuses(hosts)
    code = watch.status_code(found)
    if session.json:
        show = session.out.json_line if watching else session.out.data
        show({"exit_code": int(code), "instances": [each.as_json() for each in found]})
        return code
    if watching:
        session.out.out.clear()
    show_status(session.out, found)
    return code
