"""What is recorded of an instance: ``state.json`` (where it stands) and ``history.jsonl`` (what happened).

``current`` is the symbolic link itself; the record adds ``previous``, ``proven`` and which releases were taken back
and why, so that no such release is chosen again by itself.
"""

from __future__ import annotations

import os
import time
from typing import Any

from . import files
from .context import Context, Failure, Op, checked_digest

OUTCOMES = ("deployed", "proven", "taken-back", "rolled-back", "failed", "note")


def load(ctx: Context, instance: str) -> dict[str, Any]:
    known = files.read_json(os.path.join(ctx.instance_dir(instance), "state.json")) or {}
    return dict(
        {"schema": 1, "current": None, "previous": None, "proven": None, "taken_back": {}, "pinned": []}, **known
    )


def save(ctx: Context, instance: str, state: dict[str, Any]) -> None:
    folder = ctx.instance_dir(instance)
    files.make_dirs(folder)
    files.write_json(os.path.join(folder, "state.json"), state)


def current(ctx: Context, instance: str) -> str | None:
    """The release that ``current`` points at; None if there is no such link."""
    try:
        return os.path.basename(os.readlink(os.path.join(ctx.instance_dir(instance), "current")))
    except OSError:
        return None


def remember(ctx: Context, instance: str, what: str, **details: Any) -> None:
    folder = ctx.instance_dir(instance)
    files.make_dirs(folder)
    files.append_line(
        os.path.join(folder, "history.jsonl"), dict(details, at=time.time(), what=what, instance=instance)
    )


def record(ctx: Context, args: dict[str, Any]) -> dict[str, Any]:
    """{instance, release, outcome, gates?, details?} -> {state}.

    ``proven`` also keeps the gates' results beside the release and forgets that it was ever taken back; ``taken-back``
    marks it. Details (who, from where, numbers) go into the history as they are.
    """
    instance, release, outcome = args["instance"], checked_digest(args["release"]), args["outcome"]
    if outcome not in OUTCOMES:
        raise Failure("HelperError", "{!r} is not an outcome; known: {}".format(outcome, ", ".join(OUTCOMES)))
    state = load(ctx, instance)
    details = args.get("details") or {}
    if args.get("gates") is not None:
        files.write_json(os.path.join(ctx.release_dir(instance, release), "gates.json"), args["gates"])
    if outcome == "proven":
        state["proven"] = release
        state["taken_back"].pop(release, None)
    elif outcome == "taken-back":
        mark_taken_back(state, release, str(details.get("reason", "")))
    remember(ctx, instance, outcome, release=release, **details)
    save(ctx, instance, state)
    return {"state": state}


def mark_taken_back(state: dict[str, Any], release: str, reason: str) -> None:
    state["taken_back"][release] = {"at": time.time(), "reason": reason}
    if state["proven"] == release:
        state["proven"] = None


def history(ctx: Context, args: dict[str, Any]) -> dict[str, Any]:
    """{instance?, last?} -> {events}: of one instance or of all, oldest first."""
    names = [args["instance"]] if args.get("instance") else ctx.instances()
    events = [
        event
        for name in names
        for event in files.read_lines(os.path.join(ctx.instance_dir(name), "history.jsonl"))
    ]  # fmt: skip
    events.sort(key=lambda event: event.get("at", 0))
    return {"events": events[-int(args.get("last", 50)) :]}


OPS: dict[str, Op] = {"record": record, "history": history}
