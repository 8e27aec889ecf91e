"""``ddtree-ops bundle``: build and inspect the engine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ddtree_ops.bundle import Bundle, build_bundle, read_archive, write_archive
from ddtree_ops.bundle.wheelhouse import Platform, resolve
from ddtree_ops.cli.command import Session, command
from ddtree_ops.errors import UsageError

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

WheelhouseOption = Annotated[
    bool, typer.Option("--wheelhouse", help="Fetch the wheels of a host without an index instead.")
]
PythonOption = Annotated[str, typer.Option("--python", metavar="X.Y", help="For --wheelhouse: the host's Python.")]
GlibcOption = Annotated[str, typer.Option("--glibc", metavar="X.Y", help="For --wheelhouse: the host's C library.")]
MachineOption = Annotated[str, typer.Option("--machine", metavar="NAME", help="For --wheelhouse: x86_64 or aarch64.")]

EXAMPLES = [
    "ddtree-ops bundle",
    "ddtree-ops bundle --wheel sglang-0.5.17-cp311-cp311-manylinux_2_34_x86_64.whl",
    "ddtree-ops bundle --output engine.tar",
    "ddtree-ops bundle --inspect engine.tar --json",
    "ddtree-ops bundle --wheelhouse --python 3.11 --glibc 2.36",
]


def register(app: typer.Typer) -> None:
    @command(app, "bundle", examples=EXAMPLES)
    def bundle(
        session: Session,
        wheel: WheelOption = None,
        output: OutputOption = None,
        inspect: InspectOption = None,
        wheelhouse: WheelhouseOption = False,
        python: PythonOption = "3.11",
        glibc: GlibcOption = "2.36",
        machine: MachineOption = "x86_64",
    ) -> None:
        """Build the engine: SGLang's pinned sources, the patches and the plugin, under one digest."""
        if wheelhouse:
            fetch_wheelhouse(session, python, glibc, machine)
            return
        built = read_archive(inspect) if inspect else build_bundle(wheel)
        if output:
            write_archive(built, output)
        if session.json:
            session.out.data(describe(built) | ({"output": str(output)} if output else {}))
            return
        show(session, built)
        if output:
            session.out.line(f"written to {output}")


def fetch_wheelhouse(session: Session, python: str, glibc: str, machine: str) -> None:
    """Everything SGLang needs on such a host, into the cache, where ``bootstrap --offline`` finds it."""
    major, dot, minor = glibc.partition(".")
    if not (dot and major.isdigit() and minor.isdigit()):
        raise UsageError(f"--glibc {glibc} is not a version", next="on the host: ldd --version")
    found = resolve(Platform(python, (int(major), int(minor)), machine))
    if session.json:
        session.out.data({"folder": str(found.folder), "bytes": found.size(), **found.record.model_dump(mode="json")})
        return
    session.out.line(f"{len(found.wheels)} wheels, {found.size() / 1e6:.1f} MB, in {found.folder}")


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
