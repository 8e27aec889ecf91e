"""``ddtree-ops rollback``: back to what was proven, or to another mode with the engine that is there."""

from __future__ import annotations

from typing import Annotated

import typer

from ddtree_ops import operate
from ddtree_ops.cli.command import Session, Targets, command
from ddtree_ops.errors import UsageError
from ddtree_ops.model import Mode
from ddtree_ops.outcome import worst
from ddtree_ops.targets import changed_targets
from ddtree_ops.ui.progress import showing
from ddtree_ops.ui.results import show_outcomes

EXAMPLES = [
    "ddtree-ops rollback ct200:tree",
    "ddtree-ops rollback ct200:tree ct201:tree",
    "ddtree-ops rollback ct200:tree --to 3fa91c",
    'ddtree-ops rollback ct200:tree --mode linear --reason "slower than linear at 8 streams"',
]


def register(app: typer.Typer) -> None:
    @command(app, "rollback", examples=EXAMPLES)
    def rollback(
        session: Session,
        targets: Targets,
        to: Annotated[
            str | None, typer.Option("--to", metavar="RELEASE", show_default=False, help="Beginning of its name.")
        ] = None,
        mode: Annotated[
            Mode | None, typer.Option("--mode", "-m", show_default=False, help="Change the mode only.")
        ] = None,
        reason: Annotated[str, typer.Option("--reason", metavar="TEXT", help="Why; recorded.")] = "rolled back by hand",
        wait: Annotated[int, typer.Option("--wait", metavar="S", min=0, help="Seconds to wait for a lock.")] = 0,
    ) -> None:
        """Return to the last proven release of each instance; refuses, with the reason, one that has none.

        A bare HOST means its default instance, as where options change one. Several hosts are taken back side by side.
        """
        if to is not None and mode is not None:
            raise UsageError("--to and --mode exclude each other", next=f"ddtree-ops rollback {targets[0]} --to {to}")
        fleet = session.fleet(targets)
        chosen = changed_targets(fleet, targets)
        if to is not None and len(chosen) != 1:
            raise UsageError(
                f"--to names a release of one instance, {' '.join(targets)} means {len(chosen)}",
                why=", ".join(target.name for target in chosen),
                next=f"ddtree-ops rollback {chosen[0].name} --to {to}",
            )
        wanted = operate.Wanted(fleet.path, chosen)
        how = operate.How(lock_wait_s=wait)
        with showing(session.out) as report:
            outcomes = operate.rollback(wanted, how, report, to=to, mode=mode, reason=reason)
        if session.json:
            session.out.data(operate.result(outcomes))
        else:
            show_outcomes(session.out, outcomes)
        raise typer.Exit(worst(outcomes))
