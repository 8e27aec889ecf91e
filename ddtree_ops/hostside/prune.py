"""Remove releases and engines that nothing needs; what could still be returned to stays."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from . import deadman, files, staging, state
from .context import DIGEST, Context, Op, listdir

MONTH_S = 30 * 86400


def prune(ctx: Context, args: dict[str, Any]) -> dict[str, Any]:
    """{keep: N, instances?, dry_run?} -> {releases: {instance: [digest]}, engines: [digest]} removed.

    Of each instance the newest N stay, and current, previous, proven, pinned ones and what an armed timer would
    return to, however old. An engine stays while any release of any instance on the host needs it.
    """
    dry = bool(args.get("dry_run"))
    names = args.get("instances") or ctx.instances()
    removed: dict[str, list[str]] = {}
    for name in names:
        folder = os.path.join(ctx.instance_dir(name), "releases")
        releases = [r for r in listdir(folder) if DIGEST.match(r)]
        releases.sort(key=lambda r: os.stat(os.path.join(folder, r)).st_mtime, reverse=True)
        needed = still_needed(ctx, name) | set(releases[: int(args.get("keep", 3))])
        removed[name] = [r for r in releases if r not in needed]
        if not dry:
            files.sweep(folder)
            for release in removed[name]:
                files.remove_tree(os.path.join(folder, release))
    gone = {(name, release) for name in removed for release in removed[name]}
    engines = unused_engines(ctx, gone)
    if not dry:
        old_helpers(ctx)
        files.sweep(ctx.path("engines"))
        for engine in engines:
            files.remove_tree(ctx.engine_dir(engine))
    return {"releases": removed, "engines": engines}


def old_helpers(ctx: Context) -> None:
    """Helpers of other versions that nobody pushed for a month; another version's operator pushes its own again."""
    for name in listdir(ctx.path("helper")):
        path = ctx.path("helper", name)
        if path != os.path.abspath(sys.argv[0]) and os.stat(path).st_mtime < time.time() - MONTH_S:
            os.unlink(path)


def still_needed(ctx: Context, instance: str) -> set[str]:
    known = state.load(ctx, instance)
    armed = deadman.read(ctx, instance) or {}
    pending = known.get("taking_back") or {}
    needed = [state.current(ctx, instance), known["current"], known["previous"], known["proven"]]
    return {r for r in needed + list(known["pinned"]) + [armed.get("to"), pending.get("to")] if r}


def unused_engines(ctx: Context, gone: set[tuple[str, str]]) -> list[str]:
    used = set()
    for name in ctx.instances():
        for release in listdir(os.path.join(ctx.instance_dir(name), "releases")):
            if DIGEST.match(release) and (name, release) not in gone:
                manifest = files.read_json(os.path.join(ctx.release_dir(name, release), staging.MANIFEST)) or {}
                used.add(manifest.get("engine"))
    return [e for e in listdir(ctx.path("engines")) if DIGEST.match(e) and e not in used]


OPS: dict[str, Op] = {"prune": prune}
