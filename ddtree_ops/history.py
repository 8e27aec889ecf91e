"""What happened on a host, and what lies there: history, releases by name, the difference of two, prune, unlock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ddtree_ops.connection import Connection
from ddtree_ops.errors import LockedError, UsageError
from ddtree_ops.facts.host import InstanceFacts
from ddtree_ops.model import Settings
from ddtree_ops.plan import Change, settings_diff, unit_diff
from ddtree_ops.release import short
from ddtree_ops.rollback import named

NAMES = ("current", "previous", "proven")


@dataclass(frozen=True)
class Difference:
    """What differs between two releases of one instance."""

    target: str
    a: str
    b: str
    engines: tuple[str | None, str | None]
    settings: tuple[Change, ...]
    unit: str


def events(connection: Connection, instances: Sequence[Settings], last: int) -> list[dict[str, Any]]:
    """The newest ``last`` events of each instance, oldest first."""
    found = []
    for settings in instances:
        answer = connection.call("history", {"instance": settings.instance, "last": last})
        found += [{**event, "host": connection.host.name} for event in answer["events"]]
    return sorted(found, key=lambda event: float(event.get("at", 0)))


def resolve(target: str, there: InstanceFacts, name: str) -> str:
    """``current``, ``previous``, ``proven`` or the beginning of a release's name to the release."""
    if name not in NAMES:
        return named(target, there, name)
    release: str | None = getattr(there, name)
    if release is None or release not in there.releases:
        raise UsageError(
            f"{target} has no {name} release",
            host=target,
            why=f"on the host: {', '.join(sorted(map(short, there.releases))) or 'none'}",
            next=f"ddtree-ops history {target}",
        )
    return release


def difference(connection: Connection, settings: Settings, a: str, b: str) -> Difference:
    """Compare two releases that lie on the host."""
    instance, target = settings.instance, f"{connection.host.name}:{settings.instance}"
    there = connection.facts([settings]).instance(instance)
    one, two = resolve(target, there, a), resolve(target, there, b)
    old, new = there.releases[one], there.releases[two]
    texts = [connection.unit_of(instance, release) for release in (one, two)]
    changed = settings_diff(old.settings, new.settings) if new.settings is not None else ()
    return Difference(target, one, two, (old.engine, new.engine), changed, unit_diff(texts[0], texts[1], instance))


def unlock(connection: Connection, by: str, *, force: bool) -> dict[str, Any] | None:
    """Free the host's lock; one that is alive only by force. Returns whose it was."""
    lock = connection.facts([]).lock
    if lock is None:
        return None
    if lock.live and not force:
        raise LockedError(
            f"the lock is held by {lock.owner} (pid {lock.pid}) for: {lock.purpose}",
            host=connection.host.name,
            why="if that command still runs, freeing its lock lets two changes meet",
            next=f"ddtree-ops unlock {connection.host.name} --force",
        )
    was: dict[str, Any] | None = connection.call("unlock", {"force": True, "by": by})["was"]
    return was


def prune(connection: Connection, instances: Sequence[Settings], keep: int, *, dry_run: bool) -> dict[str, Any]:
    """Remove what nothing needs, under the lock; a dry run only says what that is."""
    asked = {"keep": keep, "instances": [settings.instance for settings in instances], "dry_run": dry_run}
    with connection.locked("prune", 0.0, lambda _line: None, lambda: None):
        return connection.call("prune", asked, deadline_s=120.0)
