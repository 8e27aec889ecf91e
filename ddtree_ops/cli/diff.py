"""``ddtree-ops diff``: two releases of an instance, compared."""

from __future__ import annotations

from typing import Annotated

import typer

from ddtree_ops import history as past
from ddtree_ops.cli.command import OneTarget, Session, command
from ddtree_ops.hosts import each_host
from ddtree_ops.release import short
from ddtree_ops.targets import one_target
from ddtree_ops.ui.results import show_diff

EXAMPLES = ["ddtree-ops diff ct200:tree previous current", "ddtree-ops diff ct200:tree 3fa91c 92035317c374"]
ReleaseName = Annotated[
    str,
    typer.Argument(metavar="RELEASE", show_default=False, help="current, previous, proven or a release's beginning."),
]


def register(app: typer.Typer) -> None:
    @command(app, "diff", examples=EXAMPLES)
    def diff(session: Session, target: OneTarget, a: ReleaseName, b: ReleaseName) -> None:
        """Compare two releases that lie on the host: engine, settings, unit."""
        host, settings = one_target(session.fleet([target]), target)
        pair = [(host, [settings])]
        answer = each_host(pair, lambda connection, _: past.difference(connection, settings, a, b))[0]
        if answer.error is not None:
            raise answer.error
        found = answer.value
        assert found is not None
        if session.json:
            session.out.data(found)
            return
        session.out.line(f"{found.target}  {short(found.a)} -> {short(found.b)}")
        if found.engines[0] != found.engines[1]:
            session.out.line(f"    engine: {short(found.engines[0])} -> {short(found.engines[1])}")
        for change in found.settings:
            session.out.line(f"    {change.setting}: {change.before or '-'} -> {change.after or '-'}")
        show_diff(session.out, found.unit)
