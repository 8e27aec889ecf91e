"""``ddtree-ops unlock``: free a host's lock whose owner is gone."""

from __future__ import annotations

from typing import Annotated

import typer

from ddtree_ops import history as past
from ddtree_ops.cli.command import Session, Targets, command
from ddtree_ops.hosts import code_of, each_host
from ddtree_ops.operate import by_host
from ddtree_ops.ui import error_data
from ddtree_ops.wiring import who

EXAMPLES = ["ddtree-ops unlock ct200", "ddtree-ops unlock ct200 --force"]


def register(app: typer.Typer) -> None:
    @command(app, "unlock", examples=EXAMPLES)
    def unlock(
        session: Session,
        targets: Targets,
        force: Annotated[bool, typer.Option("--force", help="Also a lock whose lease still runs.")] = False,
    ) -> None:
        """Free the lock of each host and say whose it was; a lock that is alive needs --force."""
        me = who()
        by = f"{me['by']}@{me['client']}"
        hosts = by_host(session.select(targets).targets)
        answers = each_host(hosts, lambda connection, _: past.unlock(connection, by, force=force), changes=True)
        errors = [answer.error for answer in answers if answer.error is not None]
        if session.json:
            freed = {answer.host.name: answer.value for answer in answers if answer.error is None}
            session.out.data({"freed": freed, "errors": [error_data(error) for error in errors]})
            raise typer.Exit(code_of(errors))
        for answer in answers:
            if answer.error is not None:
                session.out.error(answer.error)
            else:
                was = answer.value
                said = f"freed the lock of {was['owner']} ({was['purpose']})" if was else "was not locked"
                session.out.line(f"{answer.host.name}  {said}")
        raise typer.Exit(code_of(errors))
