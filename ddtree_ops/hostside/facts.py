"""Everything that preflight, plan and status need, as it was found, in one round trip.

Nothing is judged here: a missing program is an answer with rc 127, a missing folder is an empty list.
"""

from __future__ import annotations

import glob
import grp
import os
import platform
import pwd
import shutil
import stat as modes
import time
from typing import Any

from . import deadman, engine, files, lock, procs, staging, state, switch, units
from .context import DIGEST, Context, Op, listdir

GPU_QUERY = (
    "index,uuid,name,memory.total,memory.used,utilization.gpu,compute_cap,driver_version,mig.mode.current,"
    "ecc.mode.current,persistence_mode,pci.bus_id"
)
APP_QUERY = "gpu_uuid,pid,process_name,used_memory"


def facts(ctx: Context, args: dict[str, Any]) -> dict[str, Any]:
    """{instances?: [name], ports?: [n], venvs?: [path], paths?: [path]} -> the host as it is.

    ``instances`` adds names to those already on the host. See the functions below for each part.
    """
    names = sorted(set(ctx.instances()) | set(args.get("instances") or []))
    return {
        "at": time.time(),
        "host": host(ctx),
        "disk": disk(ctx.root),
        "lock": lock.read(ctx),
        "gpus": gpus(ctx),
        "tools": {name: shutil.which(name) for name in ("ninja", "nvcc", "nvidia-smi", "gcc", "docker")},
        "listeners": procs.listeners({int(p) for p in args.get("ports") or []}),
        "venvs": {path: venv(path) for path in args.get("venvs") or []},
        "paths": {path: stat(path) for path in args.get("paths") or []},
        "engines": [e for e in listdir(ctx.path("engines")) if DIGEST.match(e) and whole_engine(ctx, e)],
        "instances": {name: instance(ctx, name) for name in names},
    }


def whole_engine(ctx: Context, digest: str) -> bool:
    """A damaged engine counts as missing: the next deploy stages it again."""
    place = ctx.engine_dir(digest)
    manifest = files.read_json(os.path.join(place, engine.MANIFEST))
    return isinstance(manifest, dict) and engine.is_whole(place, manifest)


def host(ctx: Context) -> dict[str, Any]:
    return {
        "hostname": platform.node(),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "os_release": procs.text("/etc/os-release"),
        "python": platform.python_version(),
        "systemd": ctx.run("systemctl", "--version").raw(),
        "systemd_runs": units.systemd_runs(ctx),
        "system_state": ctx.run("systemctl", "is-system-running").out.strip(),
        "boot_id": procs.text("/proc/sys/kernel/random/boot_id").strip(),
        "uid": os.getuid(),
        "lingers": lingers() if ctx.scope == "user" else None,
        "user": os.environ.get("SUDO_USER") or os.environ.get("USER") or str(os.getuid()),
        "cpus": os.cpu_count(),
        "memory": procs.text("/proc/meminfo")[:200],
        "unit_dir": ctx.unit_dir,
        "root": ctx.root,
        "root_state": root_state(ctx.root),
    }


def lingers() -> bool:
    """Whether this user's systemd runs without a session of theirs (loginctl enable-linger)."""
    return os.path.exists("/var/lib/systemd/linger/" + pwd.getpwuid(os.getuid()).pw_name)


def root_state(root: str) -> dict[str, Any]:
    """Whether releases could be written: the nearest folder that exists, and whether it lets us; who else it lets."""
    path = root
    while not os.path.isdir(path) and path != "/":
        path = os.path.dirname(path)
    flags = os.statvfs(path).f_flag
    return {
        "exists": path == root,
        "nearest": path,
        "writable": os.access(path, os.W_OK),
        "read_only": bool(flags & os.ST_RDONLY),
        "ours": {str(uid): user_name(uid) for uid in (0, os.getuid(), int(os.environ.get("SUDO_UID") or 0))},
        "user": user_name(os.getuid()),
        "folders": folders(root),
    }


def folders(root: str) -> list[dict[str, Any]]:
    """Owner, group and mode of each folder on the way to ``root``, links among them, and of the layout's own."""
    inside = [root, *(os.path.join(root, name) for name in ("helper", "engines", "instances"))]
    inside += [os.path.realpath(path) for path in inside]
    way: list[str] = []
    for path in inside:
        lead_to(path, way)
    return [dict(folder(path, os.lstat(path)), inside=path in inside) for path in way if os.path.isdir(path)]


def lead_to(path: str, way: list[str]) -> None:
    """Add every folder that decides what ``path`` is, from the top, to ``way``; each once, so links in a ring end."""
    if path in way:
        return
    if path != "/":
        lead_to(os.path.dirname(path), way)
    way.append(path)
    if os.path.islink(path):
        lead_to(os.path.normpath(os.path.join(os.path.dirname(path), os.readlink(path))), way)


def folder(path: str, about: os.stat_result) -> dict[str, Any]:
    group, members = str(about.st_gid), None
    mode = 0 if modes.S_ISLNK(about.st_mode) else modes.S_IMODE(about.st_mode)  # a link's says nothing, its owner does
    if mode & modes.S_IWGRP:
        try:
            entry = grp.getgrgid(about.st_gid)
            group = entry.gr_name
            members = sorted({*entry.gr_mem, *(u.pw_name for u in pwd.getpwall() if u.pw_gid == about.st_gid)})
        except KeyError:
            pass
    return {
        "path": path,
        "mode": mode,
        "uid": about.st_uid,
        "owner": user_name(about.st_uid),
        "group": group,
        "members": members,
    }


def user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def disk(path: str) -> dict[str, Any]:
    """Space where the layout lies (or will lie)."""
    while not os.path.isdir(path):
        path = os.path.dirname(path)
    stats = os.statvfs(path)
    return {
        "path": path,
        "free": stats.f_bavail * stats.f_frsize,
        "total": stats.f_blocks * stats.f_frsize,
        "inodes_free": stats.f_favail,
    }


def gpus(ctx: Context) -> dict[str, Any]:
    csv = "--format=csv,noheader,nounits"
    query = ctx.run("nvidia-smi", "--query-gpu=" + GPU_QUERY, csv, timeout_s=20.0)
    if query.rc == 127:
        return {"query": query.raw(), "apps": None, "owners": {}}
    apps = ctx.run("nvidia-smi", "--query-compute-apps=" + APP_QUERY, csv, timeout_s=20.0)
    pids = [
        int(p)
        for p in (line.split(",")[1].strip() for line in apps.out.splitlines() if line.count(",") >= 3)
        if p.isdigit()
    ]
    return {"query": query.raw(), "apps": apps.raw(), "owners": {str(p): procs.about(p) for p in pids}}


def venv(path: str) -> dict[str, Any]:
    """A virtual environment: its Python, and the SGLang installed in it."""
    python = os.path.join(path, "bin", "python")
    infos = glob.glob(os.path.join(path, "lib", "python3*", "site-packages", "sglang-*.dist-info"))
    return {
        "exists": os.path.isdir(path),
        "python": python if os.access(python, os.X_OK) else None,
        "site": [os.path.dirname(info) for info in infos],
        "sglang": [os.path.basename(info)[len("sglang-") : -len(".dist-info")] for info in infos],
    }


def stat(path: str) -> dict[str, Any] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return {"dir": os.path.isdir(path), "size": found.st_size, "mtime": found.st_mtime}


def instance(ctx: Context, name: str) -> dict[str, Any]:
    """One instance: releases on disk, ``current``, the record, the unit on disk and as systemd loaded it."""
    folder = ctx.instance_dir(name)
    link = os.path.join(folder, "current")
    kind = "link" if os.path.islink(link) else "folder" if os.path.lexists(link) else "absent"
    unit = ctx.unit_path(name)
    show = units.show(ctx, name)
    return {
        "current": state.current(ctx, name),
        "current_kind": kind,
        "state": state.load(ctx, name),
        "armed": deadman.public(deadman.read(ctx, name)),
        "releases": {
            r: release(os.path.join(folder, "releases", r))
            for r in listdir(os.path.join(folder, "releases"))
            if DIGEST.match(r)
        },
        "unit_path": unit,
        "unit_text": procs.text(unit) if os.path.isfile(unit) else None,
        "unit_masked": switch.masked(ctx, name),
        "show": show,
        "processes": procs.of_unit(ctx.unit(name), units.parsed(show).get("ControlGroup", "")),
    }


def release(folder: str) -> dict[str, Any]:
    settings = files.read_json(os.path.join(folder, "settings.json"))
    return {
        "manifest": files.read_json(os.path.join(folder, staging.MANIFEST)),
        "settings": settings,
        "gates": files.read_json(os.path.join(folder, "gates.json")),
        "damage": staging.damage(folder),
        "staged": os.stat(folder).st_mtime,
    }


OPS: dict[str, Op] = {"facts": facts}
