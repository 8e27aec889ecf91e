"""Return to a release: what ``rollback`` does, what a failed deploy does, and what the host's own timer runs.

It may be killed anywhere and run again: what it means to do is recorded first and struck out last.
"""

from __future__ import annotations

import os
from typing import Any

from . import files, staging, state, switch, units
from .context import Context, Failure, Op

NONE = "none"


def take_back(ctx: Context, args: dict[str, Any]) -> dict[str, Any]:
    """{instance, to?: DIGEST | "none", reason?, details?, mark?, invocation?} -> {was, to, restarted, stopped, ...}.

    Asked again after it was done, it changes nothing: what is already back and runs is not restarted. Without
    ``to`` it is the last proven release, else the one before, else none. ``mark`` (default true): the release that is
    left is marked as taken back. ``invocation``: the InvocationID seen before the change; if it still runs,
    the old server was never touched and is left in peace.
    """
    instance = args["instance"]
    known = state.load(ctx, instance)
    was = state.current(ctx, instance)
    pending = known.get("taking_back") or {}
    to = args.get("to") or pending.get("to") or choose(ctx, instance, known, was)
    if to != NONE:
        switch.complete_or_fail(ctx, instance, to)
    left = pending.get("left", was)
    known["taking_back"] = {"to": to, "left": left}
    if args.get("mark", True) and left and left != to:
        state.mark_taken_back(known, left, str(args.get("reason", "")))
    if known["proven"] is None and proven_once(ctx, instance, known, to):
        known["proven"] = to
    state.save(ctx, instance, known)

    switch.point_at(ctx, instance, None if to == NONE else to)
    again = was == to and not pending
    done = stop_for_good(ctx, instance) if to == NONE else start_again(ctx, instance, args.get("invocation"), again)

    known = state.load(ctx, instance)
    known.pop("taking_back", None)
    state.remember(
        ctx, instance, "taken-back", release=left, to=None if to == NONE else to,
        reason=args.get("reason", ""), **(args.get("details") or {}),
    )  # fmt: skip
    state.save(ctx, instance, known)
    return dict(done, was=left, to=None if to == NONE else to)


def proven_once(ctx: Context, instance: str, known: dict[str, Any], release: str) -> bool:
    """Whether ``release`` was proven and never taken back: leaving one that was proven after it makes it the last."""
    if release == NONE or release in known["taken_back"]:
        return False
    return os.path.isfile(os.path.join(ctx.release_dir(instance, release), "gates.json"))


def choose(ctx: Context, instance: str, known: dict[str, Any], was: str | None) -> str:
    """The last proven release, else the one before, if it is whole, is another one and was never taken back."""
    for release in (known.get("proven"), known.get("previous")):
        if not release or release == was or release in known["taken_back"]:
            continue
        if not staging.damage(ctx.release_dir(instance, release)):
            return str(release)
    return NONE


def start_again(ctx: Context, instance: str, invocation: str | None, again: bool) -> dict[str, Any]:
    changed = switch.write_unit(ctx, {"instance": instance})["changed"]
    now = units.shown(ctx, instance)
    if changed or now.get("NeedDaemonReload") == "yes":
        succeed(units.act(ctx, "daemon-reload", instance))
    untouched = bool(invocation) and now.get("InvocationID") == invocation and now.get("ActiveState") == "active"
    if again and not changed and now.get("ActiveState") in ("active", "activating"):
        untouched = True
    if not untouched:
        units.act(ctx, "reset-failed", instance)
        succeed(units.act(ctx, "restart", instance))
    return {"unit_changed": changed, "restarted": not untouched, "stopped": False}


def stop_for_good(ctx: Context, instance: str) -> dict[str, Any]:
    """No release is left: the unit that was there before ours comes back (and runs, if it did), else there is none."""
    succeed(units.act(ctx, "stop", instance))
    before = os.path.join(ctx.instance_dir(instance), "found-unit")
    found = os.path.isfile(before)
    if found:
        files.write_file(ctx.unit_path(instance), staging.read(before))
    elif not switch.masked(ctx, instance):
        units.act(ctx, "disable", instance)
        files.remove_link(ctx.unit_path(instance))
    succeed(units.act(ctx, "daemon-reload", instance))
    units.act(ctx, "reset-failed", instance)
    known = state.load(ctx, instance)
    start = found and bool(known.get("found_active"))
    if start:
        succeed(units.act(ctx, "restart", instance))
    known.pop("unit_ours", None)
    state.save(ctx, instance, known)
    return {"unit_changed": True, "restarted": start, "stopped": not start}


def succeed(done: dict[str, Any]) -> None:
    if not done["ok"]:
        raise Failure(
            "NotRolledBackError", "{} failed: {}".format(" ".join(done["argv"]), (done["err"] or done["out"]).strip()),
            "the release is taken back on disk, but systemd did not follow", "ddtree-ops status {host}", ran=done,
        )  # fmt: skip


OPS: dict[str, Op] = {"take_back": take_back}
