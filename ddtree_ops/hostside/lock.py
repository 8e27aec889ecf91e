"""The lock of a host: who changes it, since when, what for, and until when that claim holds.

One lock for the whole host, ``<root>/lock.json``. It appears by link(2), whole or not at all. It ends by the host's
clock: a client that died does not block the next one for longer than its lease, and taking such a lock over is
recorded. A kernel lock on ``lock.guard`` orders the helpers that look at it at the same instant, one on
``change.guard`` the operations that change something: the client that holds the lock may ask again while the helper of
a link that broke is still at work, and the host's own switch acts under the same claim. The kernel frees both when
their holder dies.

A lease is counted by the clock that nobody sets, as long as the host is not rebooted; after that, and for people, by
the wall clock.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from typing import Any, Iterator

from . import files
from .context import Context, Failure, Op

LEASE_S = 120.0


@contextlib.contextmanager
def kernel_lock(ctx: Context, name: str) -> Iterator[None]:
    files.make_dirs(ctx.root)
    fd = os.open(ctx.path(name), os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


@contextlib.contextmanager
def guarded(ctx: Context) -> Iterator[str]:
    """The path of the lock, while no other helper looks at it."""
    with kernel_lock(ctx, "lock.guard"):
        yield ctx.path("lock.json")


def alone(ctx: Context) -> contextlib.AbstractContextManager[None]:
    """While no other operation changes this host; waits for one that does, at most as long as the operation may take.

    Not for the time that a payload takes to arrive: a helper may wait for one that never comes.
    """
    return kernel_lock(ctx, "change.guard")


def lease(seconds: float) -> dict[str, Any]:
    """The end of a claim: by the wall clock, and by the one that nobody sets."""
    return {
        "expires": time.time() + seconds,
        "until": {"boot": boot_id(), "at": time.monotonic() + seconds},
    }


def left_s(held: dict[str, Any]) -> float:
    """Seconds that a claim still holds; not more than 0 when it is over."""
    until = held.get("until") or {}
    if until.get("boot") == boot_id():
        return float(until["at"]) - time.monotonic()
    return float(held.get("expires", 0)) - time.time()


def lock(ctx: Context, args: dict[str, Any]) -> dict[str, Any]:
    """Take the lock: {token, owner, pid, client, purpose, lease_s} -> {lock, took_over}.

    The caller makes the token, so that asking again after a lost answer finds one's own lock. ``client``
    names the operator's machine, so that only that machine may judge whether ``pid`` still lives.
    """
    wanted = {
        "token": str(args["token"]),
        "owner": str(args["owner"]),
        "pid": args.get("pid"),
        "client": args.get("client"),
        "purpose": str(args.get("purpose", "")),
        "since": time.time(),
        **lease(float(args.get("lease_s", LEASE_S))),
    }
    with guarded(ctx) as path:
        held = files.read_json(path)
        if held is None and os.path.exists(path):
            held = {"owner": "nobody (the lock file is damaged)", "expires": 0}
        if held is not None and held.get("token") == wanted["token"]:
            return {"lock": public(held), "took_over": None}
        if held is not None and not ended(held):
            raise held_by(held)
        if held is None:
            publish(path, wanted)
        else:
            wanted["took_over_from"] = public(held)
            files.write_json(path, wanted)
        files.make_reserve(ctx.root)
    if held is not None:
        audit(ctx, "lock-taken-over", by=wanted["owner"], was=public(held))
    return {"lock": public(wanted), "took_over": public(held) if held else None}


def publish(path: str, value: dict[str, Any]) -> None:
    tmp = files.temporary(path)
    files.write_new(tmp, files.to_json(value))
    try:
        os.link(tmp, path)
    finally:
        os.unlink(tmp)
    files.fsync_dir(os.path.dirname(path))


def unlock(ctx: Context, args: dict[str, Any]) -> dict[str, Any]:
    """Free the lock: {token} frees one's own, {force: true, by} anybody's, {..., only: LOCK} that one. -> {was}."""
    with guarded(ctx) as path:
        held = files.read_json(path)
        if args.get("only") is not None and (held is None or held.get("since") != args["only"].get("since")):
            return {"was": None}  # it was freed meanwhile, and perhaps taken by somebody else
        if held is not None and not args.get("force") and held.get("token") != args.get("token"):
            raise held_by(held)
        files.remove_link(path)
        files.sweep(ctx.root)
    if held is not None and args.get("force"):
        audit(ctx, "lock-freed-by-force", by=args.get("by", ""), was=public(held))
    return {"was": public(held) if held else None}


def renew(ctx: Context, args: dict[str, Any]) -> dict[str, Any]:
    """Hold on to the lock: {token, lease_s} -> {lock}."""
    return {"lock": public(require(ctx, str(args["token"]), float(args.get("lease_s", LEASE_S))))}


def require(ctx: Context, token: str | None, lease_s: float) -> dict[str, Any]:
    """The lock, renewed for at least ``lease_s``; LockedError if it is not held by ``token`` (any more)."""
    with guarded(ctx) as path:
        held = files.read_json(path)
        if held is None or not token or held.get("token") != token:
            seized = files.read_json(ctx.path("seized.json")) or {}
            if token and seized.get("token") == token:
                raise Failure("RolledBackError", seized["why"], "", "ddtree-ops history {host}")
            if held is not None and not ended(held):
                raise held_by(held)
            raise Failure(
                "LockedError",
                "this change does not hold the host's lock (any more)",
                "another change may have begun in between, so this one stops here",
                "ddtree-ops status {host}",
            )
        if left_s(held) < lease_s:
            held.update(lease(lease_s))
            files.write_json(path, held)
    return dict(held)


def seize(ctx: Context, token: str | None, owner: str, purpose: str) -> str:
    """Take the lock for the host itself: if it is free, its lease ended, or it is held by ``token``."""
    mine = {
        "token": os.urandom(16).hex(), "owner": owner, "pid": os.getpid(), "purpose": purpose,
        "since": time.time(), "boot": boot_id(), **lease(3 * LEASE_S),
    }  # fmt: skip
    with guarded(ctx) as path:
        held = files.read_json(path)
        if held is not None and not ended(held) and held.get("token") != token:
            raise held_by(held)
        files.write_json(path, mine)
    return str(mine["token"])


def ended(held: dict[str, Any]) -> bool:
    """Whether a claim no longer holds: its lease is over, or it is the host's own (``boot``) and its process is gone.

    Only of a process of this host can that be known; one that a power cut ended must not keep its successor waiting.
    """
    if left_s(held) <= 0:
        return True
    boot = held.get("boot")
    return bool(boot) and (boot != boot_id() or not os.path.exists("/proc/{}".format(held.get("pid"))))


def boot_id() -> str:
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as src:
        return src.read().strip()


def say_seized(ctx: Context, token: str | None, why: str) -> None:
    """Leave word for the holder of ``token``, who will find the lock gone and should know that nothing is broken."""
    files.write_json(ctx.path("seized.json"), {"token": token, "why": why, "at": time.time()}, 0o600)


def read(ctx: Context) -> dict[str, Any] | None:
    """The lock as anybody may see it, and whether its lease still runs."""
    held = files.read_json(ctx.path("lock.json"))
    return dict(public(held), live=not ended(held)) if held else None


def public(held: dict[str, Any]) -> dict[str, Any]:
    """Without the token: that is what makes the lock one's own."""
    return {k: v for k, v in held.items() if k not in ("token", "until")}


def held_by(held: dict[str, Any]) -> Failure:
    """Who, since when, what for, and the command that ends it."""
    since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(held.get("since", 0)))
    until = time.strftime("%H:%M:%S UTC", time.gmtime(held.get("expires", 0)))
    pid = ", pid {}".format(held["pid"]) if held.get("pid") else ""
    return Failure(
        "LockedError",
        "locked by {}{} since {} for: {}".format(held.get("owner"), pid, since, held.get("purpose") or "(not said)"),
        f"two changes at once would undo each other; the claim ends at {until} unless it is renewed",
        "ddtree-ops unlock {host}",
        lock=public(held),
    )


def audit(ctx: Context, what: str, **details: Any) -> None:
    """One line in the host's own log of what was done to it."""
    files.make_dirs(ctx.root)
    files.append_line(ctx.path("audit.jsonl"), dict(details, at=time.time(), what=what))


OPS: dict[str, Op] = {"lock": lock, "unlock": unlock, "renew": renew}
