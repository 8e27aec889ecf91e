"""systemctl, for our own units only; its exit codes are written down here and nowhere else."""

from __future__ import annotations

import os
import re
from typing import Any

from . import files
from .context import Context, Failure, Op, Ran, listdir

NOT_SYSTEMD = re.compile(r"not been booted with systemd|Failed to connect to (?:\S+ scope )?bus", re.I)

# verb -> (takes a unit, takes --no-block, exit codes that mean it was done). ``reset-failed`` of a unit that systemd
# has not loaded yet ends with 1, and 5 is "no such unit" for stop: in both cases there is nothing left to do.
VERBS: dict[str, tuple[bool, bool, tuple[int, ...]]] = {
    "daemon-reload": (False, False, (0,)),
    "reset-failed": (True, False, (0, 1)),
    "start": (True, True, (0,)),
    "restart": (True, True, (0,)),
    "stop": (True, True, (0, 5)),
    "kill": (True, False, (0, 1, 5)),
    "enable": (True, False, (0,)),
    "disable": (True, False, (0,)),
}

PROPERTIES = (
    "Id", "LoadState", "LoadError", "ActiveState", "SubState", "Result", "UnitFileState", "FragmentPath",
    "DropInPaths", "NeedDaemonReload", "InvocationID", "MainPID", "ControlGroup", "NRestarts", "ExecStart",
    "ExecMainPID", "ExecMainCode", "ExecMainStatus", "ExecMainStartTimestamp", "ActiveEnterTimestamp",
    "StateChangeTimestamp", "Job", "StatusText", "TimeoutStopUSec",
)  # fmt: skip


def systemctl(ctx: Context, args: dict[str, Any]) -> dict[str, Any]:
    """{verb, instance?} -> {ok, rc, out, err}; never waits for the server itself."""
    return act(ctx, args["verb"], args.get("instance", ""))


def act(ctx: Context, verb: str, instance: str) -> dict[str, Any]:
    if verb not in VERBS:
        raise Failure("HelperError", "systemctl {!r} is not one of {}".format(verb, ", ".join(VERBS)))
    takes_unit, no_block, good = VERBS[verb]
    flags = ["--no-block"] if no_block else ["--signal=KILL"] if verb == "kill" else []
    unit = [ctx.unit(instance)] if takes_unit else []
    ran = ctx.run("systemctl", *flags, verb, *unit, timeout_s=90.0)
    if ran.rc == 127 or NOT_SYSTEMD.search(ran.err):
        raise no_systemd(ctx, ran)
    if verb in ("enable", "disable"):
        flush_wants(ctx)
    return dict(ran.raw(), ok=ran.rc in good)


def flush_wants(ctx: Context) -> None:
    """systemd does not flush the links it makes; a power cut would forget that the instance starts at boot."""
    for name in listdir(ctx.unit_dir):
        if name.endswith(".wants"):
            files.fsync_dir(os.path.join(ctx.unit_dir, name))


def no_systemd(ctx: Context, ran: Ran) -> Failure:
    if ctx.scope == "user":
        repair = "on {host}: loginctl enable-linger $USER, then log in again"
    else:
        repair = "run it on a machine that systemd has booted"
    said = ran.err.strip().splitlines()
    return Failure(
        "RefusedError", "no systemd ({}) answers: {}".format(ctx.scope, said[0] if said else "systemctl: not found"),
        "instances are systemd units; without it nothing starts, restarts or stops them", repair, ran=ran.raw(),
    )  # fmt: skip


def systemd_runs(ctx: Context) -> bool:
    """sd_booted(3), or for scope user: whether the user's own manager has its socket."""
    if ctx.bin.get("systemctl"):
        return ctx.run("systemctl", "--version").rc == 0
    if ctx.scope == "system":
        return os.path.isdir("/run/systemd/system")
    return os.path.exists(os.path.join(os.environ["XDG_RUNTIME_DIR"], "systemd", "private"))


def show(ctx: Context, instance: str) -> str:
    """``systemctl show`` as it is, KEY=VALUE lines; empty if systemd does not answer."""
    return ctx.run("systemctl", "show", ctx.unit(instance), "-p", ",".join(PROPERTIES)).out


def shown(ctx: Context, instance: str) -> dict[str, str]:
    return parsed(show(ctx, instance))


def parsed(text: str) -> dict[str, str]:
    """KEY=VALUE lines."""
    return {key: value for key, eq, value in (line.partition("=") for line in text.splitlines()) if eq}


OPS: dict[str, Op] = {"systemctl": systemctl}
