"""Make a bare host ready for a deploy: look, resolve what is missing, say how much it is, send it, install it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ddtree_ops.bundle.wheelhouse import DEFAULT_REQUIREMENTS, Platform, Wheelhouse, resolve
from ddtree_ops.connection import Connection
from ddtree_ops.errors import RefusedError, UnreachableError
from ddtree_ops.model import HostSpec, Settings

BATCH_BYTES = 256 << 20
SLOWEST_BYTES_PER_S = 1 << 20
INSTALL_DEADLINE_S = 3600.0
RETRIES = 5

Say = Callable[[str], None]


@dataclass(frozen=True)
class Wish:
    """What a bootstrap should bring about; ``offline`` means that the host has no index of its own."""

    venv: str
    user: str | None = None
    requirements: tuple[str, ...] = DEFAULT_REQUIREMENTS
    offline: bool = False
    deps: bool = True
    python: str | None = None


@dataclass(frozen=True)
class Prospect:
    """What a bootstrap will do to this host: shown before anything is sent."""

    host: HostSpec
    wish: Wish
    wheelhouse: Wheelhouse
    facts: dict[str, Any]

    @property
    def missing(self) -> tuple[str, ...]:
        """What must be sent; nothing to a venv that is complete, whose wheels are gone again."""
        return () if self.installed else tuple(self.facts["missing"])

    @property
    def send_bytes(self) -> int:
        return self.wheelhouse.size(self.missing)

    @property
    def installed(self) -> bool:
        """Whether the venv is complete for exactly this wish."""
        marker = self.facts["venv"]["marker"] or {}
        wheels = self.wheelhouse.wheels if self.wish.offline else {}
        return (
            self.facts["venv"]["state"] == "complete"
            and sorted(marker.get("requirements", ())) == sorted(self.wish.requirements)
            and marker.get("wheels") == wheels
        )

    @property
    def complete(self) -> bool:
        """Whether nothing at all is left to do, as far as a look can tell."""
        return self.installed and self.facts["user"] is not False

    def lines(self) -> tuple[str, ...]:
        """What will be done, one line each."""
        python, venv = self.facts["python"], self.facts["venv"]["state"]
        made = [f"create user {self.wish.user}"] if self.facts["user"] is False else []
        if venv == "absent":
            made.append(f"make {self.wish.venv} with Python {python['version']} ({python['path']})")
        if self.missing:
            made.append(f"send {len(self.missing)} wheels, {self.send_bytes / 1e6:.1f} MB")
        if not self.installed:
            source = "the wheels sent, without any index" if self.wish.offline else "the host's own index"
            made.append(f"install {', '.join(self.wish.requirements)} from {source}")
        return tuple(made)


def look(connection: Connection, wish: Wish, *, find: Callable[..., Wheelhouse] = resolve) -> Prospect:
    """Ask the host what it is, resolve for it, and ask what of that it lacks. Changes nothing on the host."""
    asked = {"venv": wish.venv, "user": wish.user, "python": wish.python}
    first = connection.call("bootstrap_facts", asked)
    platform = platform_of(first, connection.host.name)
    # With an index of its own the host fetches by itself; only pip is sent, so that it needs neither pip nor ensurepip.
    wheelhouse = find(platform, wish.requirements, deps=wish.deps) if wish.offline else find(platform, (), deps=False)
    facts = connection.call("bootstrap_facts", asked | {"wheels": wheelhouse.wheels})
    prospect = Prospect(connection.host, wish, wheelhouse, facts)
    refuse(prospect)
    return prospect


def platform_of(facts: dict[str, Any], host: str) -> Platform:
    """Which wheels run there."""
    major, dot, minor = str(facts["glibc"]).partition(".")
    if not (dot and major.isdigit() and minor.isdigit()) or facts["machine"] not in ("x86_64", "aarch64"):
        raise RefusedError(
            f"it has no glibc, or is no x86_64 or aarch64 machine (glibc {facts['glibc']!r}, {facts['machine']})",
            host,
            "SGLang has wheels for those only",
        )
    return Platform(facts["python"]["version"], (int(major), int(minor)), facts["machine"])


def refuse(prospect: Prospect) -> None:
    """What stands against it, before anything is sent."""
    facts, host = prospect.facts, prospect.host.name
    if facts["venv"]["state"] == "foreign":
        raise RefusedError(
            f"{prospect.wish.venv} exists and was not made by ddtree-ops",
            host,
            "somebody's venv is never changed",
            f"if SGLang is in it: ddtree-ops doctor {host}",
        )
    # installed, wheels take about three times their size; until then they lie beside it
    needed = 4 * prospect.send_bytes
    if not prospect.complete and facts["free"] < needed:
        raise RefusedError(
            f"{facts['free'] >> 20} MiB free, about {needed >> 20} MiB are needed",
            host,
            "wheels and what is installed from them lie side by side",
            f"ddtree-ops prune {host}",
        )


def carry_out(connection: Connection, prospect: Prospect, say: Say) -> list[str]:
    """Send what is missing, in parts that stay when the link breaks; then install. Returns what was done."""
    wish, wheelhouse = prospect.wish, prospect.wheelhouse
    send(connection, prospect, say)
    args = {
        "venv": wish.venv,
        "user": wish.user,
        "python": wish.python,
        "requirements": list(wish.requirements),
        "wheels": wheelhouse.wheels,
        "offline": wish.offline,
        "no_deps": not wish.deps,
    }
    done = connection.call("bootstrap", args, deadline_s=INSTALL_DEADLINE_S, on_event=lambda e: _said(e, say))
    return list(done["did"])


def send(connection: Connection, prospect: Prospect, say: Say) -> None:
    """Each wheel that arrived whole stays on the host, so that a broken link costs one wheel, not all."""
    wheels, missing = prospect.wheelhouse.wheels, list(prospect.missing)
    failures = 0
    while missing:
        batch = take(prospect.wheelhouse, missing)
        seconds = 60.0 + prospect.wheelhouse.size(batch) / SLOWEST_BYTES_PER_S
        payload: Any = prospect.wheelhouse.stream(batch)
        args = {"wheels": {name: wheels[name] for name in batch}}
        try:
            connection.call("stage_wheels", args, payload, deadline_s=seconds, on_event=lambda e: _said(e, say))
        except UnreachableError as broken:
            failures += 1
            if failures > RETRIES:
                raise
            say(f"{broken.found}; going on with what is missing")
        left = connection.call(
            "bootstrap_facts", {"venv": prospect.wish.venv, "wheels": {n: wheels[n] for n in missing}}
        )
        missing = list(left["missing"])


def take(wheelhouse: Wheelhouse, missing: Sequence[str]) -> list[str]:
    """The first wheels that make up a batch; one that is larger than a batch goes alone."""
    batch: list[str] = []
    for name in missing:
        if batch and wheelhouse.size([*batch, name]) > BATCH_BYTES:
            break
        batch.append(name)
    return batch


@dataclass(frozen=True)
class Options:
    """What is the same for every host of a run."""

    offline: bool = False
    create_user: bool = False
    requirements: tuple[str, ...] = DEFAULT_REQUIREMENTS
    deps: bool = True
    python: str | None = None
    dry_run: bool = False

    def wishes(self, settings: Sequence[Settings]) -> list[Wish]:
        """One for each venv of these instances."""
        pairs = dict.fromkeys((each.venv, each.user if self.create_user else None) for each in settings)
        return [Wish(venv, user, self.requirements, self.offline, self.deps, self.python) for venv, user in pairs]


def one_host(connection: Connection, settings: Sequence[Settings], options: Options, say: Say) -> dict[str, Any]:
    """Everything for one host: what will be done is said before anything is sent."""
    host = connection.host.name
    found: dict[str, Any] = {"host": host, "will": [], "did": []}
    for wish in options.wishes(settings):
        prospect = look(connection, wish)
        found["will"] += prospect.lines()
        for line in prospect.lines() or (f"{wish.venv} is complete",):
            say(f"{host}: {line}")
        if options.dry_run or prospect.complete:
            continue
        with connection.locked(f"bootstrap {wish.venv}", 0.0, say, lambda: None):
            found["did"] += carry_out(connection, prospect, lambda line: say(f"{host}: {line}"))
    return found


def _said(event: dict[str, Any], say: Say) -> None:
    if event.get("line"):
        say(str(event["line"]))
