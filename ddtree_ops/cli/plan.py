"""``ddtree-ops plan``: the exact change, before anything is touched."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ddtree_ops import operate
from ddtree_ops.cli.command import Session, Targets, command
from ddtree_ops.hosts import code_of
from ddtree_ops.targets import Overrides
from ddtree_ops.ui import error_data
from ddtree_ops.ui.files import require_writable
from ddtree_ops.ui.results import show_plan

EXAMPLES = [
    "ddtree-ops plan ct200",
    "ddtree-ops plan ct200 --mode tree --budget 32",
    "ddtree-ops plan all --out change.json && ddtree-ops deploy --plan change.json",
]


def register(app: typer.Typer) -> None:
    @command(app, "plan", examples=EXAMPLES, changes=True)
    def plan(
        session: Session,
        targets: Targets,
        overrides: Overrides,
        out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Keep it for `deploy --plan`.")] = None,
        restart: Annotated[bool, typer.Option("--restart", help="As `deploy --restart`.")] = False,
    ) -> None:
        """Show what deploy would do: steps, effect, the diff of unit and settings, what travels."""
        require_writable(out)
        wanted = operate.select(session.fleet, targets, overrides)
        for notice in wanted.notices:
            session.out.notice(notice)
        planned = operate.plans(wanted, operate.How(restart=restart))
        errors = [each.error for each in planned if each.error is not None]
        if session.json:
            made = [each.plan for each in planned if each.plan is not None]
            session.out.data({"plans": made, "errors": [error_data(error) for error in errors]})
        else:
            for each in planned:
                if each.plan is not None:
                    show_plan(session.out, each.plan)
            for error in errors:
                session.out.error(error)
        if out is not None and not errors:
            operate.keep(wanted, planned, out)
            session.out.notice(f"kept in {out}; carry it out: ddtree-ops deploy --plan {out}")
        elif out is not None:
            session.out.notice(f"{out} is not written: a plan with errors in it is not kept")
        raise typer.Exit(code_of(errors))
