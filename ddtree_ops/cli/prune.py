"""``ddtree-ops prune``: remove releases and engines that nothing needs."""

from __future__ import annotations

from typing import Annotated

import typer

from ddtree_ops import history as past
from ddtree_ops.cli.command import Session, Targets, command
from ddtree_ops.hosts import code_of, each_host
from ddtree_ops.operate import by_host
from ddtree_ops.release import short
from ddtree_ops.ui import error_data

EXAMPLES = ["ddtree-ops prune ct200", "ddtree-ops prune all --keep 2 --dry-run"]


def register(app: typer.Typer) -> None:
    @command(app, "prune", examples=EXAMPLES)
    def prune(
        session: Session,
        targets: Targets,
        keep: Annotated[int, typer.Option("--keep", min=0, metavar="N", help="Newest releases of each instance.")] = 3,
        dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would go; remove nothing.")] = False,
    ) -> None:
        """Keep the newest N of each instance, and current, previous, proven and pinned ones, however old."""
        hosts = by_host(session.select(targets).targets)
        answers = each_host(
            hosts, lambda connection, all_: past.prune(connection, all_, keep, dry_run=dry_run), changes=True
        )
        errors = [answer.error for answer in answers if answer.error is not None]
        if session.json:
            removed = {answer.host.name: answer.value for answer in answers if answer.value is not None}
            unseen = [error_data(error) for error in errors]
            session.out.data({"dry_run": dry_run, "removed": removed, "errors": unseen})
            raise typer.Exit(code_of(errors))
        for answer in answers:
            if answer.error is not None:
                session.out.error(answer.error)
            elif answer.value is not None:
                verb = "would remove" if dry_run else "removed"
                gone = [f"{name} {short(each)}" for name, all_ in answer.value["releases"].items() for each in all_]
                gone += [f"engine {short(each)}" for each in answer.value["engines"]]
                session.out.line(f"{answer.host.name}  {verb}: {', '.join(gone) or 'nothing'}")
        raise typer.Exit(code_of(errors))
