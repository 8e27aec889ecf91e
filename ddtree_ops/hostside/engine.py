"""Staging engines: a hard-linked copy of the venv's SGLang, plus the files of the bundle, under one digest.

The venv is only ever read. Files that the bundle replaces are not linked in the first place, so no write can reach the
venv through a shared inode. The folder gets its name only after every file of the bundle was checked and flushed and
the manifest written; a folder that has its name is complete.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import tarfile
from typing import Any, Iterator

from . import files, lock
from .context import Context, Failure, Op

SITE = "site"  # what stands before site-packages on PYTHONPATH
MANIFEST = "manifest.json"
ORIGIN = "origin.json"
PACKAGE = "sglang"
MAX_BLOB = 64 << 20
# What a hard link may fail with although a copy will do: another file system, no such thing on this one, too many
# links, or a kernel that lets nobody link to files he does not own.
NO_LINK = (errno.EXDEV, errno.EPERM, errno.EACCES, errno.EMLINK, errno.ENOSYS, errno.EOPNOTSUPP)

PROBE = """
import importlib.metadata, importlib.util, json, platform, sys
spec = importlib.util.find_spec("sglang")
try:
    version = importlib.metadata.version("sglang")
except importlib.metadata.PackageNotFoundError:
    version = None
places = list(spec.submodule_search_locations or []) if spec else []
print(json.dumps({"version": version, "package": places[0] if places else None,
                  "tag": sys.implementation.cache_tag + "-" + platform.machine()}))
"""


def engine_missing(ctx: Context, args: dict[str, Any]) -> dict[str, Any]:
    """{manifest, venv} -> {staged, blobs, sglang}: what must travel; refuses a host with another SGLang. Reads only."""
    manifest, digest = checked_manifest(args["manifest"])
    venv = installed_sglang(ctx, args["venv"])
    refuse_other_sglang(manifest, venv)
    place = ctx.engine_dir(digest)
    if is_whole(place, manifest):
        refuse_other_python(place, venv)
        return {"staged": True, "blobs": [], "sglang": venv}
    here = blobs_here(ctx)
    return {"staged": False, "blobs": sorted(wanted(manifest) - set(here)), "sglang": venv}


def stage_engine(ctx: Context, args: dict[str, Any]) -> dict[str, Any]:
    """{manifest, venv} and a tar of the missing blobs -> {staged, linked, copied, received, reused}."""
    manifest, digest = checked_manifest(args["manifest"])
    venv = installed_sglang(ctx, args["venv"])
    refuse_other_sglang(manifest, venv)
    place = ctx.engine_dir(digest)
    parent = os.path.dirname(place)
    files.make_dirs(parent)
    files.sweep(parent)
    if is_whole(place, manifest):
        refuse_other_python(place, venv)
        return {"staged": False, "linked": 0, "copied": 0, "received": 0, "reused": 0}
    here = blobs_here(ctx)
    tmp = files.temporary(place)  # of its own, as in staging: the helper of a broken link may still live
    os.mkdir(tmp, 0o755)
    try:
        received = receive(ctx, wanted(manifest), os.path.join(tmp, ".blobs"))
        files.make_dirs(os.path.join(tmp, SITE))
        linked, copied = clone(ctx, venv["package"], os.path.join(tmp, SITE, PACKAGE), set(entries(manifest)))
        place_files(manifest, tmp, received, here)
        shutil.rmtree(os.path.join(tmp, ".blobs"))
        seal(tmp, manifest, dict(venv, venv=args["venv"], linked=linked, copied=copied))
        with lock.alone(ctx):
            if is_whole(place, manifest):  # the helper of a link that broke was faster
                return {"staged": True, "linked": linked, "copied": copied, "received": len(received), "reused": 0}
            if os.path.isdir(place):  # it was there and damaged; nothing that runs loses its open files
                files.remove_tree(place)
            os.rename(tmp, place)
            files.fsync_dir(parent)
    finally:
        files.remove_entry(tmp)
    reused = len(wanted(manifest) - set(received))
    return {"staged": True, "linked": linked, "copied": copied, "received": len(received), "reused": reused}


# -- the manifest -----------------------------------------------------------------------------------------------------


def checked_manifest(manifest: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """The manifest and its digest; every path in it stays inside the overlay."""
    for path in list(entries(manifest)) + list(manifest["base"]):
        if not re.match(r"^[\w.+-]+(/[\w.+-]+)*$", path) or {".", ".."} & set(path.split("/")):
            raise Failure("HelperError", f"the engine's manifest names {path!r}, which is not a plain relative path")
    return manifest, hashlib.sha256(canonical(manifest)).hexdigest()


def canonical(manifest: dict[str, Any]) -> bytes:
    text = json.dumps(manifest, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return text.encode("utf-8") + b"\n"


def entries(manifest: dict[str, Any]) -> dict[str, str]:
    """path -> sha256 of everything in the overlay that is not the host's own SGLang."""
    return {path: v["sha256"] for part in ("patched", "new") for path, v in manifest[part].items()}


def wanted(manifest: dict[str, Any]) -> set[str]:
    return set(entries(manifest).values())


def is_whole(place: str, manifest: dict[str, Any]) -> bool:
    """Whether the engine is there with every file of the bundle as the manifest says."""
    try:
        with open(os.path.join(place, MANIFEST), "rb") as src:
            if src.read() != canonical(manifest):
                return False
        return all(files.sha256(os.path.join(place, SITE, path)) == sha for path, sha in entries(manifest).items())
    except OSError:
        return False


def blobs_here(ctx: Context) -> dict[str, str]:
    """sha256 -> path of what complete engines on this host already hold; each is checked again when it is used."""
    found: dict[str, str] = {}
    root = ctx.path("engines")
    for name in sorted(os.listdir(root)) if os.path.isdir(root) else []:
        manifest = None if name.startswith(".") else files.read_json(os.path.join(root, name, MANIFEST))
        for path, sha in entries(manifest).items() if isinstance(manifest, dict) else ():
            full = os.path.join(root, name, SITE, path)
            if sha not in found and os.path.isfile(full) and files.sha256(full) == sha:
                found[sha] = full
    return found


# -- the host's own SGLang --------------------------------------------------------------------------------------------


def installed_sglang(ctx: Context, venv: str) -> dict[str, Any]:
    """{version, package, tag} of the SGLang that this venv's Python would import."""
    python = os.path.join(venv, "bin", "python")
    if not os.access(python, os.X_OK):
        raise Failure(
            "RefusedError",
            f"there is no venv at {venv} (no {python})",
            "the engine is an overlay over the SGLang of that venv",
            "ddtree-ops bootstrap {host}",
        )
    ran = ctx.run(python, "-I", "-c", PROBE, timeout_s=60.0)
    try:
        found: dict[str, Any] = json.loads(ran.out)
    except ValueError:
        raise Failure(
            "RefusedError",
            f"{python} does not run: {(ran.err.strip() or 'no output')[-300:]}",
            "the server is started with that Python",
            "ddtree-ops bootstrap {host}",
        ) from None
    if not found["version"] or not found["package"]:
        raise Failure(
            "RefusedError",
            f"SGLang is not installed in {venv}",
            "the engine is an overlay over the SGLang of that venv",
            "ddtree-ops bootstrap {host}",
        )
    return found


def refuse_other_sglang(manifest: dict[str, Any], venv: dict[str, Any]) -> None:
    """The patches are made for one version, file by file."""
    found, made_for = venv["version"], manifest["sglang"]
    if found != made_for:
        raise Failure(
            "RefusedError",
            f"SGLang {found} is installed, this engine is made for {made_for}",
            "a patched file among the files of another version does not work",
            "ddtree-ops bootstrap {host}",
            installed=found,
            wanted=made_for,
        )
    differs = [path for path, sha in sorted(manifest["base"].items()) if sha != hash_in(venv["package"], path)]
    if differs:
        raise Failure(
            "RefusedError",
            f"these files of the installed SGLang are not those of {made_for}: {', '.join(differs)}",
            "the patches would undo somebody's change, or be undone by it",
            f"pip install --force-reinstall --no-deps sglang=={made_for}",
            files=differs,
        )


def hash_in(package: str, path: str) -> str | None:
    """The hash of ``sglang/...`` in the package at ``package``; None when there is no such file."""
    try:
        return files.sha256(os.path.join(os.path.dirname(package), path))
    except OSError:
        return None


def refuse_other_python(place: str, venv: dict[str, Any]) -> None:
    """An engine holds the native modules of the venv it was made from."""
    origin = files.read_json(os.path.join(place, ORIGIN)) or {}
    if origin.get("tag", venv["tag"]) != venv["tag"]:
        raise Failure(
            "RefusedError",
            f"this engine was staged here for {origin['tag']} ({origin.get('venv')}), the venv has {venv['tag']}",
            "SGLang's native modules are built for one Python",
            "use one Python version for all instances of this host",
        )


# -- making the folder ------------------------------------------------------------------------------------------------


def receive(ctx: Context, expected: set[str], folder: str) -> dict[str, str]:
    """Unpack the upload, each content named by its hash and checked against it -> sha256 -> path."""
    os.mkdir(folder, 0o700)
    got: dict[str, str] = {}
    try:
        with tarfile.open(fileobj=ctx.payload, mode="r|") as tar:
            for member in tar:
                source = tar.extractfile(member) if member.isreg() else None
                if source is None or member.name not in expected or member.size > MAX_BLOB:
                    raise Failure("HelperError", f"the upload contains {member.name!r}, which nobody asked for")
                data = source.read()
                if hashlib.sha256(data).hexdigest() != member.name:
                    raise Failure("HelperError", f"the upload contains damaged content for {member.name}")
                got[member.name] = os.path.join(folder, member.name)
                with open(got[member.name], "wb") as out:
                    out.write(data)
                ctx.progress(step="engine", received=len(got))
    except (tarfile.TarError, EOFError) as torn:
        raise Failure(
            "UnreachableError", f"the upload broke off: {torn}", "nothing of it was kept", "ddtree-ops deploy {host}"
        ) from torn
    return got


def clone(ctx: Context, package: str, target: str, replaced: set[str]) -> tuple[int, int]:
    """Link the package file by file (copy where links cannot be made), without the files to be replaced."""
    linked = copied = 0
    can_link = True
    for folder, names in walk(package):
        below = os.path.relpath(folder, package)
        os.mkdir(os.path.join(target, below) if below != "." else target, 0o755)
        for name in names:
            path = os.path.normpath(os.path.join(below, name))
            source, goal = os.path.join(folder, name), os.path.join(target, path)
            if os.path.join(PACKAGE, path) in replaced:
                continue
            is_link = os.path.islink(source)
            if not is_link and can_link:
                can_link = link(source, goal)
            if can_link and not is_link:
                linked += 1
            else:
                copy(source, goal)
                copied += 1
        ctx.progress(step="engine", linked=linked, copied=copied)
    return linked, copied


def walk(package: str) -> Iterator[tuple[str, list[str]]]:
    for folder, dirs, names in os.walk(package, followlinks=False):
        for linked_dir in [d for d in dirs if os.path.islink(os.path.join(folder, d))]:
            raise Failure(
                "RefusedError",
                f"{os.path.join(folder, linked_dir)} in the installed SGLang is a link to a folder",
                "only a plain installation can be copied",
                "pip install --force-reinstall --no-deps sglang",
            )
        # Compiled files stay behind: one of a file that was replaced must not shadow it, and the unit keeps its own.
        dirs[:] = sorted(d for d in dirs if d != "__pycache__")
        yield folder, sorted(names)


def link(source: str, goal: str) -> bool:
    try:
        os.link(source, goal)
    except OSError as error:
        if error.errno in NO_LINK:
            return False
        raise
    return True


def copy(source: str, goal: str) -> None:
    """Copy a file (what a link points at) and flush it."""
    shutil.copy2(source, goal)
    fd = os.open(goal, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def place_files(manifest: dict[str, Any], tmp: str, received: dict[str, str], here: dict[str, str]) -> None:
    """Write the bundle's files as new inodes, each checked as it is read."""
    for path, sha in sorted(entries(manifest).items()):
        source = received.get(sha) or here.get(sha)
        if source is None:
            raise Failure("HelperError", f"the upload lacks {path} ({sha[:12]})")
        with open(source, "rb") as src:
            data = src.read()
        if hashlib.sha256(data).hexdigest() != sha:
            raise Failure("HelperError", f"{source} changed while the engine was staged")
        goal = os.path.join(tmp, SITE, path)
        os.makedirs(os.path.dirname(goal), 0o755, exist_ok=True)
        files.write_new(goal, data)  # fails if anything, a link into the venv above all, already has the name


def seal(tmp: str, manifest: dict[str, Any], origin: dict[str, Any]) -> None:
    """Read everything back, flush every folder, write the manifest last."""
    for path, sha in sorted(entries(manifest).items()):
        if files.sha256(os.path.join(tmp, SITE, path)) != sha:
            raise Failure("HelperError", f"{path} was written and reads back as something else")
    files.write_new(os.path.join(tmp, ORIGIN), json.dumps(origin, indent=1, sort_keys=True).encode() + b"\n")
    for folder, _dirs, _names in os.walk(tmp):
        files.fsync_dir(folder)
    files.write_new(os.path.join(tmp, MANIFEST), canonical(manifest))
    files.fsync_dir(tmp)


OPS: dict[str, Op] = {
    "engine_missing": engine_missing,
    "stage_engine": stage_engine,
}
