"""``ddtree-ops history``: what was done to an instance, by whom, and how it ended."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from ddtree_ops import history as past
from ddtree_ops.audit import read
from ddtree_ops.cli.command import OptionalTargets, Session, command
from ddtree_ops.hosts import code_of, each_host
from ddtree_ops.operate import by_host
from ddtree_ops.release import short
from ddtree_ops.ui import error_data
from ddtree_ops.wiring import audit

EXAMPLES = ["ddtree-ops history ct200:tree", "ddtree-ops history all -n 5 --json", "ddtree-ops history --local"]


def register(app: typer.Typer) -> None:
    @command(app, "history", examples=EXAMPLES)
    def history(
        session: Session,
        targets: OptionalTargets = None,
        local: Annotated[
            bool, typer.Option("--local", help="What was done from this machine, also to hosts that are gone.")
        ] = False,
        last: Annotated[int, typer.Option("--last", "-n", min=1, metavar="N", help="Events of each instance.")] = 20,
    ) -> None:
        """List deploys, proofs and rollbacks as the hosts recorded them, oldest first."""
        if local:
            show_local(session, targets or [], last)
            return
        hosts = by_host(session.select(targets).targets)
        answers = each_host(hosts, lambda connection, instances: past.events(connection, instances, last))
        found = sorted((event for answer in answers for event in answer.value or ()), key=lambda event: event["at"])
        errors = [answer.error for answer in answers if answer.error is not None]
        if session.json:
            session.out.data({"events": found, "errors": [error_data(error) for error in errors]})
        else:
            session.out.table(("WHEN", "TARGET", "WHAT", "RELEASE", "FROM / TO", "BY", "REASON"), map(_row, found))
            for error in errors:
                session.out.error(error)
        raise typer.Exit(code_of(errors))


def show_local(session: Session, targets: list[str], last: int) -> None:
    """The operator's own log; TARGETs are names in it, which an inventory need not know any more."""
    found = [
        entry
        for entry in read(audit().path, 10 * last)
        if not targets or {"all", entry["host"], entry["target"]} & set(targets)
    ][-last:]
    if session.json:
        session.out.data({"events": found})
        return
    session.out.table(
        ("WHEN", "TARGET", "COMMAND", "RESULT", "RELEASE", "FROM", "BY", "FOUND"),
        [
            (
                datetime.fromtimestamp(entry["at"], UTC).strftime("%Y-%m-%d %H:%M:%S"),
                entry["target"],
                entry["command"],
                entry["status"],
                short(entry["release"]),
                short(entry["before"]),
                f"{entry['by']}@{entry['client']}",
                entry["found"] or "",
            )
            for entry in found
        ],
    )


def _row(event: dict[str, Any]) -> list[str]:
    when = datetime.fromtimestamp(event["at"], UTC).strftime("%Y-%m-%d %H:%M:%S")
    other = event.get("to") or event.get("from")
    reason = str(event.get("reason") or event.get("text") or "")
    target = f"{event['host']}:{event['instance']}"
    by = f"{event['by']}@{event['client']}" if "by" in event and "client" in event else str(event.get("by", "-"))
    return [when, target, event["what"], short(event.get("release")), short(other), by, reason]
