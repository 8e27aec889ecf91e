"""Who else may write where the layout lies: from owners and modes of folders to those that are open to others. Pure."""

from __future__ import annotations

import shlex
import stat
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from ddtree_ops.facts.answer import listing, mapping

WHY = "the helper, engines and units are run from there: who can write there can put anything in their place"
REPAIR = "chown -h {owner} {path} && chmod go-w {path}"
SHOWN = 5


@dataclass(frozen=True)
class OpenFolder:
    """A folder on the way to the layout, or of it, that others may write in; ``owner`` is who is to own it."""

    path: str
    who: tuple[str, ...]
    owner: str

    def __str__(self) -> str:
        return f"{self.path} may be written by {' and '.join(self.who)}"

    @property
    def words(self) -> dict[str, str]:
        """What fills in ``REPAIR``."""
        return {"owner": shlex.quote(self.owner), "path": shlex.quote(self.path)}


def open_folders(state: Mapping[str, Any]) -> tuple[OpenFolder, ...]:
    """Those of the helper's ``root_state`` that root and we do not have for ourselves.

    Above the layout a sticky folder (as /tmp is) lets others add names but not replace ours, whose owners are looked at
    too. Within the layout nobody else may add anything.
    """
    ours = {"0": "root", **mapping(state.get("ours"))}
    found = []
    for folder in map(mapping, listing(state.get("folders"))):
        mode, uid = folder.get("mode"), folder.get("uid")
        if not isinstance(mode, int) or not isinstance(uid, int):
            continue
        own = str(uid) in ours
        sticky = bool(mode & stat.S_ISVTX) and not folder.get("inside")
        who = [] if own else [f"its owner {folder.get('owner')}"]
        if mode & stat.S_IWGRP and not sticky and (members := _members(folder, {*ours.values(), folder.get("owner")})):
            who.append(members)
        if mode & stat.S_IWOTH and not sticky:
            who.append("every user")
        if who:
            owner = folder.get("owner") if own else state.get("user")
            found.append(OpenFolder(str(folder.get("path")), tuple(who), str(owner or "root")))
    return tuple(found)


def _members(folder: Mapping[str, Any], known: Collection[Any]) -> str:
    """The group with those who are in it; empty when nobody is but those who are ``known`` already."""
    members = folder.get("members")
    if members is None:
        return f"the group {folder.get('group')}"
    others = [str(name) for name in listing(members) if name not in known]
    more = f" and {len(others) - SHOWN} more" if len(others) > SHOWN else ""
    return f"the group {folder.get('group')} ({', '.join(others[:SHOWN])}{more})" if others else ""
