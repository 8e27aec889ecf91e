"""``rollback``: back to the last proven release, to a named one, or to another mode with the engine that is there.

A rollback is a deploy of a release that lies on the host already: same steps, same proof, same way back.
"""

from __future__ import annotations

from collections.abc import Iterable

from ddtree_ops.errors import RefusedError, UsageError
from ddtree_ops.facts.host import HostFacts, InstanceFacts
from ddtree_ops.model import HostSpec, Mode, Settings
from ddtree_ops.plan import last_good
from ddtree_ops.release import Release, short


def choose(host: HostSpec, there: InstanceFacts, to: str | None) -> str:
    """The release to return to; refuses with the reason if there is none."""
    target = f"{host.name}:{there.name}"
    if to is not None:
        return named(target, there, to)
    if there.current is None:
        raise RefusedError(
            "nothing is deployed here",
            host=target,
            why="there is nothing to roll back from",
            next=f"ddtree-ops deploy {target}",
        )
    good = last_good(there, there.current)
    if good is None:
        raise RefusedError(
            "there is no other proven release to return to",
            host=target,
            why=why_none(there),
            next=f"ddtree-ops history {target}",
        )
    return good


def named(target: str, there: InstanceFacts, to: str) -> str:
    """A release by the beginning of its name. Naming one that was taken back is allowed: a person chose it."""
    found = [release for release in there.releases if release.startswith(to)]
    if len(found) != 1:
        have = ", ".join(sorted(map(short, there.releases))) or "none"
        what = "no release" if not found else f"{len(found)} releases"
        raise UsageError(
            f"{what} of {target} begin{'' if len(found) > 1 else 's'} with {to!r}",
            host=target,
            why=f"on the host: {have}",
            next=f"ddtree-ops history {target}",
        )
    damage = there.releases[found[0]].damage
    if damage:
        raise RefusedError(
            f"release {short(found[0])} is damaged: {'; '.join(damage)}",
            host=target,
            why="only a complete release may become current",
            next=f"ddtree-ops deploy {target}",
        )
    return found[0]


def why_none(there: InstanceFacts) -> str:
    """Why no other release can be returned to, one reason for each that is there."""

    def reasons() -> Iterable[str]:
        for name, release in sorted(there.releases.items()):
            if name == there.current:
                continue
            if name in there.taken_back:
                yield f"{short(name)} was taken back: {there.taken_back[name] or 'no reason recorded'}"
            elif release.damage:
                yield f"{short(name)} is damaged"
            else:
                yield f"{short(name)} was never proven"

    return "; ".join(reasons()) or "only the current release is on the host"


def release_on_host(facts: HostFacts, instance: str, release: str, unit: str) -> Release:
    """A release as it lies on the host."""
    there = facts.instance(instance)
    on_disk = there.releases[release]
    if on_disk.settings is None or on_disk.engine is None:
        raise RefusedError(
            f"release {short(release)} was written by another version of ddtree-ops",
            host=f"{facts.host}:{instance}",
            why="its settings cannot be read, so it could not be judged healthy",
            next=f"ddtree-ops deploy {facts.host}:{instance}",
        )
    return Release(id=release, engine=on_disk.engine, settings=on_disk.settings, unit=unit)


def other_mode(facts: HostFacts, instance: str, mode: Mode) -> tuple[Settings, str]:
    """The settings of what is there in another mode, and the engine that is there: the mode changes, nothing else."""
    target = f"{facts.host}:{instance}"
    there = facts.instance(instance)
    settings = there.settings
    on_disk = there.releases.get(there.current or "")
    engine = on_disk.engine if on_disk else None
    if settings is None or engine is None:
        raise RefusedError(
            "nothing is deployed here whose mode could be changed",
            host=target,
            why="a mode is changed with the engine and settings that are there",
            next=f"ddtree-ops deploy {target} --mode {mode}",
        )
    if mode.speculates and not settings.drafter:
        raise UsageError(
            f"mode {mode} needs a drafter, and the release that is there has none",
            host=target,
            next=f"ddtree-ops deploy {target} --mode {mode}",
        )
    return settings.model_copy(update={"mode": mode}), engine
