"""``ddtree-ops doctor``: what is wrong with a host, and the command that repairs it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ddtree_ops.cli.command import OptionalTargets, Session, command
from ddtree_ops.errors import ExitCode
from ddtree_ops.targets import Overrides

EXAMPLES = [
    "ddtree-ops doctor",
    "ddtree-ops doctor ct200 --memory",
    "ddtree-ops doctor ct200:tree --mode tree --budget 64 --memory   # before it is deployed",
    "ddtree-ops doctor ct200 --save                            # write the limits that fit into the inventory",
    "ddtree-ops doctor all --json | jq '.hosts[].findings[] | select(.level == \"red\")'",
]


def register(app: typer.Typer) -> None:
    @command(app, "doctor", examples=EXAMPLES, changes=True)
    def doctor(
        session: Session,
        overrides: Overrides,
        targets: OptionalTargets = None,
        memory: Annotated[bool, typer.Option("--memory", help="Show where the GPU memory goes and what fits.")] = False,
        save: Annotated[
            bool, typer.Option("--save", help="Write the limits that fit (and the options given) into the inventory.")
        ] = False,
    ) -> None:
        """Look at hosts without changing anything: everything that would make a deploy fail or a server slow.

        Exit code 0: nothing red; 4: something is; 3: a host does not answer. The findings are in docs/doctor.md.
        """
        from ddtree_ops.doctor.visit import save_limits, visit
        from ddtree_ops.hosts import code_of, each_host
        from ddtree_ops.ui.doctor import show_visit, visit_data
        from ddtree_ops.ui.problem import error_data
        from ddtree_ops.wiring import CLOCK

        chosen = session.select(targets, overrides).by_host().values()
        hosts = [(those[0].host, [each.settings for each in those]) for those in chosen]
        answers = each_host(hosts, lambda connection, settings: visit(connection, settings, CLOCK))
        seen = [answer.value for answer in answers if answer.value is not None]
        errors = [answer.error for answer in answers if answer.error is not None]
        code = code_of(errors)
        if code is ExitCode.DONE and any(each.refuses for each in seen):
            code = ExitCode.REFUSED
        for line in save_limits(Path(session.fleet(targets or ()).path), seen, overrides.given()) if save else ():
            session.out.notice(line)
        if session.json:
            shown = [visit_data(each) for each in seen]
            problems = [error_data(error) for error in errors]
            session.out.data({"exit_code": int(code), "hosts": shown, "errors": problems})
        else:
            for each in seen:
                show_visit(session.out, each, memory=memory)
            for error in errors:
                session.out.error(error)
        raise typer.Exit(code)
