"""``ddtree-ops history``: what was done to an instance, by whom, and how it ended."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from ddtree_ops import history as past
from ddtree_ops.cli.command import OptionalTargets, Session, command
from ddtree_ops.hosts import code_of, each_host
from ddtree_ops.operate import by_host
from ddtree_ops.release import short

EXAMPLES = ["ddtree-ops history ct200:tree", "ddtree-ops history all -n 5 --json"]


def register(app: typer.Typer) -> None:
    @command(app, "history", examples=EXAMPLES)
    def history(
        session: Session,
        targets: OptionalTargets = None,
        last: Annotated[int, typer.Option("--last", "-n", min=1, metavar="N", help="Events of each instance.")] = 20,
    ) -> None:
        """List deploys, proofs and rollbacks as the hosts recorded them, oldest first."""
        hosts = by_host(session.select(targets).targets)
        answers = each_host(hosts, lambda connection, instances: past.events(connection, instances, last))
        found = sorted((event for answer in answers for event in answer.value or ()), key=lambda event: event["at"])
        errors = [answer.error for answer in answers if answer.error is not None]
        if session.json:
            session.out.data({"events": found})
        else:
            session.out.table(("WHEN", "TARGET", "WHAT", "RELEASE", "FROM / TO", "BY", "REASON"), map(_row, found))
        for error in errors:
            session.out.notice(str(error))
        raise typer.Exit(code_of(errors))


def _row(event: dict[str, Any]) -> list[str]:
    when = datetime.fromtimestamp(event["at"], UTC).strftime("%Y-%m-%d %H:%M:%S")
    other = event.get("to") or event.get("from")
    reason = str(event.get("reason") or event.get("text") or "")
    target = f"{event['host']}:{event['instance']}"
    by = f"{event['by']}@{event['client']}" if "by" in event and "client" in event else str(event.get("by", "-"))
    return [when, target, event["what"], short(event.get("release")), short(other), by, reason]
