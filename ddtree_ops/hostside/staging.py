"""Receiving releases: a tar stream becomes a complete, verified folder, or nothing.

A manifest names every file with its sha256: ``{"files": {"unit": "<sha256>", ...}, ...}``. The folder gets its name
only after every file was checked and flushed, so a folder that has its name is complete.
"""

from __future__ import annotations

import json
import os
import tarfile
from typing import Any, BinaryIO, Callable

from . import files, lock
from .context import Context, Failure, Op

MANIFEST = "manifest.json"
# Written beside the manifest's files later on, by the helper itself.
ADDED_LATER = {"gates.json"}
MAX_FILE = 1 << 30


def missing(ctx: Context, args: dict[str, Any]) -> dict[str, Any]:
    """{engines: [digest], releases: {instance: [digest]}} -> those of each that the host lacks."""

    def here(folder: str) -> bool:
        return files.read_json(os.path.join(folder, MANIFEST)) is not None

    return {
        "engines": [e for e in args.get("engines") or [] if not here(ctx.engine_dir(e))],
        "releases": {
            instance: [r for r in wanted if not here(ctx.release_dir(instance, r))]
            for instance, wanted in (args.get("releases") or {}).items()
        },
    }


def wanted_files(manifest: dict[str, Any]) -> dict[str, str]:
    """path -> sha256 of a manifest, whether it gives the sha256 alone or among other things."""
    return {p: v if isinstance(v, str) else v["sha256"] for p, v in (manifest.get("files") or {}).items()}


def stage_release(ctx: Context, args: dict[str, Any]) -> dict[str, Any]:
    """{instance, release} and a tar with manifest.json and its files -> {staged, mended}."""
    instance, release = args["instance"], args["release"]
    place = ctx.release_dir(instance, release)
    parent = os.path.dirname(place)
    files.make_dirs(parent)
    files.sweep(parent)
    if os.path.isdir(place) and not damage(place):
        return {"staged": False, "mended": []}
    # A name of its own: the helper of a link that broke may still live, and removes what it made when it ends.
    tmp = files.temporary(place)
    os.mkdir(tmp, 0o755)
    try:
        receive(ctx.payload, tmp)
        complain_if_damaged(tmp, release)
        named = (files.read_json(os.path.join(tmp, MANIFEST)) or {}).get("release", release)
        if named != release:
            raise Failure("HelperError", f"the upload is release {named[:12]}, not {release[:12]}")
        for folder, _dirs, _names in os.walk(tmp):
            files.fsync_dir(folder)
        with lock.alone(ctx):
            if os.path.isdir(place):
                return {"staged": False, "mended": mend(tmp, place)}
            os.rename(tmp, place)
            files.fsync_dir(parent)
    finally:
        files.remove_entry(tmp)
    return {"staged": True, "mended": []}


def receive(stream: BinaryIO, folder: str, progress: Callable[[int], None] | None = None) -> None:
    """Unpack regular files only, each flushed; anything that could leave ``folder`` is refused."""
    done = 0
    try:
        with tarfile.open(fileobj=stream, mode="r|*") as tar:
            for member in tar:
                name = os.path.normpath(member.name)
                if os.path.isabs(name) or name.split(os.sep)[0] == ".." or not (member.isreg() or member.isdir()):
                    raise Failure("HelperError", f"the upload contains {member.name!r}, which is not a plain file")
                path = os.path.join(folder, name)
                if member.isdir():
                    files.make_dirs(path)
                    continue
                source = tar.extractfile(member)
                if source is None or member.size > MAX_FILE:
                    raise Failure("HelperError", f"the upload contains {member.name!r} of {member.size} bytes")
                files.make_dirs(os.path.dirname(path))
                files.write_new(path, source.read(), 0o755 if member.mode & 0o100 else 0o644)
                done += member.size
                if progress is not None:
                    progress(done)
    except (tarfile.TarError, EOFError) as torn:
        raise Failure(
            "UnreachableError", f"the upload broke off: {torn}", "nothing of it was kept", "ddtree-ops deploy {host}"
        ) from torn


def damage(folder: str) -> list[str]:
    """What is wrong with a staged folder: files that are missing, differ or are too many; empty if it is whole."""
    manifest = files.read_json(os.path.join(folder, MANIFEST))
    if not isinstance(manifest, dict):
        return [f"{MANIFEST} is missing or unreadable"]
    wanted = wanted_files(manifest)
    wrong = []
    for path, digest in sorted(wanted.items()):
        try:
            if files.sha256(os.path.join(folder, path)) != digest:
                wrong.append(f"{path} differs from the manifest")
        except OSError:
            wrong.append(f"{path} is missing")
    for base, _dirs, names in os.walk(folder):
        for name in names:
            path = os.path.relpath(os.path.join(base, name), folder)
            if path not in wanted and path != MANIFEST and path not in ADDED_LATER and not name.startswith(files.TMP):
                wrong.append(f"{path} is not in the manifest")
    return wrong


def complain_if_damaged(folder: str, release: str) -> None:
    wrong = damage(folder)
    if wrong:
        raise Failure(
            "HelperError", "the upload of {} is not what its manifest says: {}".format(release, "; ".join(wrong[:5])),
            "nothing of it was kept", "ddtree-ops deploy {host}", files=wrong,
        )  # fmt: skip


def mend(source: str, place: str) -> list[str]:
    """Put back what somebody changed in a staged release, file by file: ``current`` may point at it meanwhile."""
    manifest = json.loads(read(os.path.join(source, MANIFEST)).decode("utf-8"))
    mended = []
    for path in [*sorted(wanted_files(manifest)), MANIFEST]:
        target = os.path.join(place, path)
        if not os.path.isfile(target) or files.sha256(target) != files.sha256(os.path.join(source, path)):
            files.make_dirs(os.path.dirname(target))
            files.write_file(target, read(os.path.join(source, path)))
            mended.append(path)
    for line in damage(place):
        if line.endswith("is not in the manifest"):
            files.remove_link(os.path.join(place, line[: -len(" is not in the manifest")]))
    return mended


def read(path: str) -> bytes:
    with open(path, "rb") as src:
        return src.read()


OPS: dict[str, Op] = {
    "missing": missing,
    "stage_release": stage_release,
}
