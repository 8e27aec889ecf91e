"""``ddtree-ops bootstrap``: make a bare host ready."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from ddtree_ops.cli.command import Session, Targets, command

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddtree_ops.connection import Connection
    from ddtree_ops.errors import ExitCode
    from ddtree_ops.hosts import Answer
    from ddtree_ops.model import Settings

EXAMPLES = [
    "ddtree-ops bootstrap ct200 --dry-run",
    "ddtree-ops bootstrap ct200 --create-user              # SGLang from the host's own package index",
    "ddtree-ops bootstrap ct200 --offline                  # wheels fetched here for its Python, then sent",
    "ddtree-ops bootstrap ct200 --offline --require sglang==0.5.17 --require ninja",
]


def register(app: typer.Typer) -> None:
    @command(app, "bootstrap", examples=EXAMPLES)
    def bootstrap(
        session: Session,
        targets: Targets,
        offline: Annotated[bool, typer.Option("--offline", help="Fetch wheels here, send and install them.")] = False,
        create_user: Annotated[bool, typer.Option("--create-user", help="Create the instances' service user.")] = False,
        require: Annotated[
            list[str] | None,
            typer.Option("--require", metavar="NAME==VERSION", help="What to install instead of SGLang alone."),
        ] = None,
        no_deps: Annotated[bool, typer.Option("--no-deps", help="Install nothing but what is named.")] = False,
        python: Annotated[
            str | None, typer.Option("--python", metavar="PROGRAM", help="The host's Python that makes the venv.")
        ] = None,
        dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be done, and how much.")] = False,
    ) -> None:
        """Create what a deploy needs on a host: service user, folders, the venv with SGLang at the pinned version.

        May be repeated: what is there is left alone, what broke off goes on. A venv that somebody else made is never
        changed.
        """
        from ddtree_ops.bootstrap import Options, one_host
        from ddtree_ops.bundle.wheelhouse import DEFAULT_REQUIREMENTS
        from ddtree_ops.hosts import each_host

        wanted = tuple(require or DEFAULT_REQUIREMENTS)
        options = Options(offline, create_user, wanted, not no_deps, python, dry_run)
        chosen = session.select(targets).by_host().values()
        hosts = [(those[0].host, [each.settings for each in those]) for those in chosen]

        def prepare(link: Connection, settings: Sequence[Settings]) -> dict[str, Any]:
            return one_host(link, settings, options, session.out.notice)

        answers = each_host(hosts, prepare, changes=True)
        raise typer.Exit(show(session, answers))


def show(session: Session, answers: Sequence[Answer[dict[str, Any]]]) -> ExitCode:
    """What was done, or will be; every host's error."""
    from ddtree_ops.hosts import code_of
    from ddtree_ops.ui.problem import error_data

    errors = [answer.error for answer in answers if answer.error is not None]
    if session.json:
        done = [answer.value for answer in answers if answer.value is not None]
        session.out.data({"hosts": done, "errors": [error_data(error) for error in errors]})
    else:
        for answer in answers:
            for line in (answer.value or {}).get("did", ()):
                session.out.line(f"{answer.host.name}: {line}")
        for error in errors:
            session.out.error(error)
    return code_of(errors)
