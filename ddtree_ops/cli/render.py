"""``ddtree-ops render``: the unit as it would be written, without touching a host."""

from __future__ import annotations

from typing import Annotated

import typer

from ddtree_ops.cli.command import Session, Targets, command
from ddtree_ops.model import unit_name
from ddtree_ops.render import RELEASE_PLACEHOLDER, render_target, server_argv
from ddtree_ops.targets import Overrides

EXAMPLES = [
    "ddtree-ops render ct200:tree",
    "ddtree-ops render ct200 --mode tree --budget 32",
    "ddtree-ops render ct200:tree --systemd 255 > tree.service",
]


def register(app: typer.Typer) -> None:
    @command(app, "render", examples=EXAMPLES, changes=True)
    def render(
        session: Session,
        targets: Targets,
        overrides: Overrides,
        systemd: Annotated[int, typer.Option(metavar="VERSION", help="Version of systemd to write for.")] = 252,
        release: Annotated[str, typer.Option(metavar="ID", help="Release id to write.")] = RELEASE_PLACEHOLDER,
        engine: Annotated[str, typer.Option(metavar="DIGEST", help="Engine digest to write.")] = RELEASE_PLACEHOLDER,
    ) -> None:
        """Print the systemd unit of each target; nothing is read from a host."""
        units = []
        for host, settings in session.select(targets, overrides).targets:
            text = render_target(
                host,
                settings,
                release=release,
                engine_dir=f"{host.root}/engines/{engine}",
                systemd_version=systemd,
            )
            name = unit_name(settings.instance)
            argv = server_argv(settings, release)
            units.append({"host": host.name, "instance": settings.instance, "name": name, "unit": text, "argv": argv})
        if session.json:
            session.out.data({"units": units})
        else:
            session.out.raw("\n".join(str(unit["unit"]) for unit in units))
