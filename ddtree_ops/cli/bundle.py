"""``ddtree-ops bundle``: build and inspect the engine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ddtree_ops.bundle import Bundle, build_bundle, read_archive, write_archive
from ddtree_ops.cli.command import Session, command

WheelOption = Annotated[
    Path | None,
    typer.Option("--wheel", metavar="FILE", show_default=False, help="SGLang's wheel; fetched by pip if left out."),
]
OutputOption = Annotated[
    Path | None,
    typer.Option("--output", "-o", metavar="FILE", show_default=False, help="Write the engine as one tar file too."),
]
InspectOption = Annotated[
    Path | None,
    typer.Option("--inspect", metavar="FILE", show_default=False, help="Show an engine written with --output."),
]

EXAMPLES = [
    "ddtree-ops bundle",
    "ddtree-ops bundle --wheel sglang-0.5.17-cp311-cp311-manylinux_2_34_x86_64.whl",
    "ddtree-ops bundle --output engine.tar",
    "ddtree-ops bundle --inspect engine.tar --json",
]


def register(app: typer.Typer) -> None:
    @command(app, "bundle", examples=EXAMPLES)
    def bundle(
        session: Session, wheel: WheelOption = None, output: OutputOption = None, inspect: InspectOption = None
    ) -> None:
        """Build the engine: SGLang's pinned sources, the patches and the plugin, under one digest."""
        built = read_archive(inspect) if inspect else build_bundle(wheel)
        if output:
            write_archive(built, output)
        if session.json:
            session.out.data(describe(built) | ({"output": str(output)} if output else {}))
            return
        show(session, built)
        if output:
            session.out.line(f"written to {output}")


def describe(bundle: Bundle) -> dict[str, Any]:
    """The manifest with its digest."""
    return {"digest": bundle.digest, **bundle.manifest.model_dump(mode="json")}


def show(session: Session, bundle: Bundle) -> None:
    manifest = bundle.manifest
    session.out.line(f"engine {bundle.digest}", style="bold")
    session.out.line(f"SGLang {manifest.sglang}, {len(manifest.patched)} files patched, {len(manifest.new)} new")
    for patch in manifest.patches:
        session.out.line(f"  {patch.name}: {patch.subject}")
    rows = [
        (what, path, str(file.size), file.sha256[:12])
        for what, files in (("patched", manifest.patched), ("new", manifest.new))
        for path, file in files.items()
    ]
    session.out.table(("WHAT", "FILE", "BYTES", "SHA256"), rows)
