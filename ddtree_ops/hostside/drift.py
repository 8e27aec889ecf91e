"""Everything that was put on the host or recorded, beside what is there now. Reads only; judges nothing.

Files are read in full: a size and a date say nothing about what somebody edited.
"""

from __future__ import annotations

import base64
import csv
import glob
import hashlib
import io
import os
from typing import Any, Iterator

from . import deadman, engine, facts, files, procs, state, units
from .context import Context, Op

MOST = 50  # of one kind of difference; more of them say no more


def drift(ctx: Context, args: dict[str, Any]) -> dict[str, Any]:
    """{instances: [name]} -> {instances: {name: ...}, engines: {digest: ...}, venvs: {path: ...}}."""
    found = {name: instance(ctx, name) for name in args["instances"]}
    engines = {each["engine"] for each in found.values() if each["engine"]}
    pairs = {(each["venv"], each["engine"]) for each in found.values() if each["venv"]}
    return {
        "instances": found,
        "engines": {digest: staged_engine(ctx, digest) for digest in sorted(engines)},
        "venvs": {venv: installed(ctx, venv, digest) for venv, digest in sorted(pairs)},
    }


def instance(ctx: Context, name: str) -> dict[str, Any]:
    """The current release, its unit on disk and loaded, what else changes that unit, and the process that runs."""
    seen = facts.instance(ctx, name)
    current = seen["current"]
    manifest = (seen["releases"].get(current) or {}).get("manifest") or {}
    settings = (seen["releases"].get(current) or {}).get("settings") or {}
    shown = units.parsed(seen["show"])
    link = os.path.join(ctx.instance_dir(name), "current")
    return {
        "current": current,
        "current_kind": seen["current_kind"],
        "switched": os.lstat(link).st_mtime if os.path.islink(link) else None,
        "recorded": seen["state"]["current"],
        "damage": {release: there["damage"] for release, there in seen["releases"].items() if there["damage"]},
        "engine": manifest.get("engine"),
        "venv": settings.get("venv"),
        "unit_wanted": procs.text(os.path.join(ctx.release_dir(name, current), "unit")) if current else None,
        "unit_path": seen["unit_path"],
        "unit_text": seen["unit_text"],
        "unit_masked": seen["unit_masked"],
        "show": seen["show"],
        "drop_ins": {path: procs.text(path) for path in shown.get("DropInPaths", "").split()},
        "main": main_process(int(shown.get("MainPID") or 0)),
        "armed": deadman.public(deadman.read(ctx, name)),
        "taking_back": state.load(ctx, name).get("taking_back"),
    }


def main_process(pid: int) -> dict[str, Any] | None:
    """The server: its words, when it began, where it looks for modules. Other variables may hold secrets."""
    if not pid:
        return None
    about = procs.about(pid)  # first: it waits until the process runs its own program, with an environment of its own
    words = procs.text(f"/proc/{pid}/environ").split("\0")
    path = next((word.partition("=")[2] for word in words if word.startswith("PYTHONPATH=")), None)
    try:
        program = os.readlink(f"/proc/{pid}/exe")
    except OSError:
        program = ""
    return dict(about, python_path=path, program=program)


def staged_engine(ctx: Context, digest: str) -> dict[str, Any]:
    """The bundle's files against the engine's manifest, and that manifest against its name."""
    place = ctx.engine_dir(digest)
    manifest = files.read_json(os.path.join(place, engine.MANIFEST))
    if manifest is None:
        return {"present": False, "damage": []}
    wrong = []
    if hashlib.sha256(engine.canonical(manifest)).hexdigest() != digest:
        wrong.append(f"{engine.MANIFEST} was changed")
    for path, sha in sorted(engine.entries(manifest).items()):
        wrong += differs(os.path.join(place, engine.SITE, path), sha, path)
    return {"present": True, "damage": wrong[:MOST], "sglang": manifest.get("sglang")}


def installed(ctx: Context, venv: str, digest: str | None) -> dict[str, Any]:
    """SGLang in the venv against pip's own RECORD, and the engine's linked copy of it against the same."""
    sites = glob.glob(os.path.join(venv, "lib", "python3*", "site-packages"))
    infos = [info for site in sites for info in glob.glob(os.path.join(site, "sglang-*.dist-info"))]
    if not infos:
        return {"present": False, "versions": [], "damage": [], "linked": []}
    site = os.path.dirname(infos[0])
    recorded = dict(record(procs.text(os.path.join(infos[0], "RECORD"))))
    wrong = [line for path, sha in sorted(recorded.items()) for line in differs(os.path.join(site, path), sha, path)]
    linked: list[str] = []
    engine_site = os.path.join(ctx.engine_dir(digest), engine.SITE) if digest is not None else ""
    if digest is not None:
        manifest = files.read_json(os.path.join(ctx.engine_dir(digest), engine.MANIFEST))
        ours = set(engine.entries(manifest)) if manifest else set()
        for path, sha in sorted(recorded.items()) if manifest else ():
            if path not in ours:
                linked += differs(os.path.join(engine_site, path), sha, path)
    versions = [os.path.basename(info)[len("sglang-") : -len(".dist-info")] for info in infos]
    return {
        "present": True,
        "versions": versions,
        "site": site,
        "engine_site": engine_site,
        "damage": wrong[:MOST],
        "linked": linked[:MOST],
    }


def record(text: str) -> Iterator[tuple[str, str]]:
    """path -> sha256 (in hexadecimal) of SGLang's own modules, from RECORD's ``path,sha256=BASE64,size`` lines."""
    for row in csv.reader(io.StringIO(text)):
        if len(row) == 3 and row[0].startswith("sglang/") and row[1].startswith("sha256="):
            value = row[1][len("sha256=") :]
            yield row[0], base64.urlsafe_b64decode(value + "=" * (-len(value) % 4)).hex()


def differs(path: str, sha: str, name: str) -> list[str]:
    try:
        return [] if files.sha256(path) == sha else [f"{name} was changed"]
    except OSError:
        return [f"{name} is missing"]


OPS: dict[str, Op] = {"drift": drift}
