"""Which release is ``current``, and the unit file that systemd reads."""

from __future__ import annotations

import os
from typing import Any

from . import files, staging, state, units
from .context import Context, Failure, Op, listdir


def switch(ctx: Context, args: dict[str, Any]) -> dict[str, Any]:
    """{instance, release, expect?} -> {was, changed}. With ``expect``, refuses if another release is current.

    Asked again after a lost answer, it finds its work done.
    """
    instance, release = args["instance"], args["release"]
    was = state.current(ctx, instance)
    if "expect" in args and was not in (args["expect"], release):
        raise Failure(
            "MovedError", "{} is on release {}, not on {}".format(instance, was or "none", args["expect"] or "none"),
            "the plan was made for another state of this host", f"ddtree-ops plan {{host}}:{instance}",
        )  # fmt: skip
    complete_or_fail(ctx, instance, release)
    point_at(ctx, instance, release)
    return {"was": was, "changed": was != release}


def complete_or_fail(ctx: Context, instance: str, release: str) -> None:
    """A release may become current only if each of its files is what the manifest says and its engine is there."""
    place = ctx.release_dir(instance, release)
    wrong = staging.damage(place) if os.path.isdir(place) else ["it is not on the host"]
    manifest = files.read_json(os.path.join(place, staging.MANIFEST)) or {}
    engine = manifest.get("engine")
    if engine and files.read_json(os.path.join(ctx.engine_dir(engine), staging.MANIFEST)) is None:
        wrong.append(f"its engine {engine[:12]} is not on the host")
    if wrong:
        raise Failure(
            "RefusedError", "release {} of {} is not complete: {}".format(release[:12], instance, "; ".join(wrong[:5])),
            "only a complete release may become current", f"ddtree-ops deploy {{host}}:{instance}", files=wrong,
        )  # fmt: skip


def point_at(ctx: Context, instance: str, release: str | None) -> None:
    """Let ``current`` be ``release`` or nothing, and record what it was."""
    link = os.path.join(ctx.instance_dir(instance), "current")
    if os.path.lexists(link) and not os.path.islink(link):
        raise Failure(
            "RefusedError", f"{link} is a real folder, not a link to a release",
            "replacing it would lose what is in it",
            f"on {{host}}: mv {link} {link}.before && ddtree-ops deploy {{host}}:{instance}",
        )  # fmt: skip
    was = state.current(ctx, instance)
    if was == release:
        pass
    elif release is None:
        files.remove_link(link)
    else:
        files.point(link, os.path.join("releases", release))
    known = state.load(ctx, instance)
    if was == release == known["current"]:
        return
    known["current"] = release
    if was not in (None, release):
        known["previous"] = was
    state.save(ctx, instance, known)


def write_unit(ctx: Context, args: dict[str, Any]) -> dict[str, Any]:
    """{instance} -> {changed, path}: the unit of ``current`` takes its place; daemon-reload is due if changed."""
    instance = args["instance"]
    path = ctx.unit_path(instance)
    release = state.current(ctx, instance)
    if release is None:
        raise Failure("HelperError", f"{instance} has no current release whose unit could be written")
    if masked(ctx, instance):
        raise Failure(
            "RefusedError", f"{ctx.unit(instance)} is masked", "somebody forbade this unit to start",
            f"on {{host}}: systemctl unmask {ctx.unit(instance)}",
        )  # fmt: skip
    text = staging.read(os.path.join(ctx.release_dir(instance, release), "unit"))
    found = staging.read(path) if os.path.isfile(path) else None
    if found == text and not os.path.islink(path):
        return {"changed": False, "path": path}
    files.make_dirs(ctx.unit_dir)
    if found is not None:
        keep_if_foreign(ctx, instance, found)
    known = state.load(ctx, instance)
    if not known.get("unit_ours"):
        known["unit_ours"] = True
        state.save(ctx, instance, known)
    files.write_file(path, text)
    return {"changed": True, "path": path}


def masked(ctx: Context, instance: str) -> bool:
    path = ctx.unit_path(instance)
    return os.path.islink(path) and os.path.realpath(path) == "/dev/null"


def keep_if_foreign(ctx: Context, instance: str, found: bytes) -> None:
    """A unit that is no release's was written by somebody else, and nothing of theirs is lost.

    The one before our first is kept as ``found-unit``, with whether it ran: that is what a first deploy that fails
    returns to. A later one is an edit of ours; it is kept as ``edited-unit`` for a person to look at.
    """
    releases = os.path.join(ctx.instance_dir(instance), "releases")
    ours = [os.path.join(releases, name, "unit") for name in listdir(releases) if not name.startswith(".")]
    if any(os.path.isfile(unit) and staging.read(unit) == found for unit in ours):
        return
    known = state.load(ctx, instance)
    name = "edited-unit" if known.get("unit_ours") else "found-unit"
    if name == "found-unit":
        known["found_active"] = units.shown(ctx, instance).get("ActiveState") == "active"
        state.save(ctx, instance, known)
    files.write_file(os.path.join(ctx.instance_dir(instance), name), found)
    state.remember(ctx, instance, "note", text=f"the unit that was there is not of any release; kept as {name}")


OPS: dict[str, Op] = {"switch": switch, "write_unit": write_unit}
