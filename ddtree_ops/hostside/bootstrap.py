"""Making a bare host ready: the service's user, the layout's folders, the venv with SGLang. Every step may be repeated.

A venv is only ever made by us or left alone: one that exists without our marker belongs to somebody. The marker inside
says what is being installed and, at the end, that it was; a bootstrap that was killed is taken up where it stopped.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import subprocess
import tarfile
from typing import Any

from . import facts, files
from .context import Context, Failure, Op

WHEELS = "wheels"
MARKER = "ddtree-bootstrap.json"
WHEEL_NAME = re.compile(r"^[A-Za-z0-9_.+-]+\.whl$")
USER_NAME = re.compile(r"^[a-z_][a-z0-9_-]{0,31}$")
PYTHONS = ("python3.12", "python3.11", "python3.13", "python3.10", "python3")
CHUNK = 1 << 20


def bootstrap_facts(ctx: Context, args: dict[str, Any]) -> dict[str, Any]:
    """{venv, user?, python?, wheels: {name: sha256}} -> what is there and what is missing. Reads only."""
    python = find_python(ctx, args.get("python"))
    wheels = args.get("wheels") or {}
    return {
        "python": python,
        "glibc": platform.libc_ver()[1],
        "machine": platform.machine(),
        "user": user_exists(ctx, args["user"]) if args.get("user") else None,
        "venv": venv_state(args["venv"]),
        "root": facts.root_state(ctx.root),
        "free": facts.disk(args["venv"])["free"],
        "missing": [name for name, sha in sorted(wheels.items()) if not has_wheel(ctx, name, sha)],
    }


def stage_wheels(ctx: Context, args: dict[str, Any]) -> dict[str, Any]:
    """{wheels: {name: sha256}} and a tar of some of them -> {staged}. Each one stays that came through whole."""
    folder = ctx.path(WHEELS)
    files.make_dirs(folder)
    files.sweep(folder)
    staged = 0
    try:
        with tarfile.open(fileobj=ctx.payload, mode="r|") as tar:
            for member in tar:
                wanted = (args.get("wheels") or {}).get(member.name)
                source = tar.extractfile(member) if member.isreg() else None
                if source is None or wanted is None or not WHEEL_NAME.match(member.name):
                    raise Failure("HelperError", f"the upload contains {member.name!r}, which nobody asked for")
                take_wheel(source, os.path.join(folder, member.name), member.name, wanted)
                staged += 1
                ctx.progress(step="wheels", line=f"{member.name} arrived", bytes=member.size)
    except (tarfile.TarError, EOFError) as torn:
        raise Failure(
            "UnreachableError",
            f"the upload broke off after {staged} wheels: {torn}",
            "those stay; the same command sends the rest",
            "ddtree-ops bootstrap {host}",
        ) from torn
    return {"staged": staged}


def bootstrap(ctx: Context, args: dict[str, Any]) -> dict[str, Any]:
    """{venv, requirements, wheels: {name: sha256}, offline, user?, python?} -> {did: [line]}; nothing done twice."""
    did: list[str] = []
    if args.get("user"):
        did += make_user(ctx, args["user"])
    for name in ("", "engines", "instances"):
        path = ctx.path(name) if name else ctx.root
        if not os.path.isdir(path):
            files.make_dirs(path)
            did.append(f"created {path}")
    did += make_venv(ctx, args)
    return {"did": did}


# -- looking ----------------------------------------------------------------------------------------------------------


def find_python(ctx: Context, wanted: str | None) -> dict[str, Any]:
    """{path, version} of the Python that makes the venv: the one named, or the first that SGLang has wheels for."""
    for name in (wanted,) if wanted else PYTHONS:
        path = shutil.which(name)
        if path is None:
            continue
        ran = ctx.run(path, "-I", "-c", "import sys, venv; print('%d.%d' % sys.version_info[:2])", timeout_s=20.0)
        version = ran.out.strip()
        if ran.rc == 0 and version in ("3.10", "3.11", "3.12", "3.13"):
            return {"path": path, "version": version}
    raise Failure(
        "RefusedError",
        f"there is no {wanted or 'Python 3.10 to 3.13'} with its venv module",
        "SGLang has wheels for those only",
        "apt-get install python3 python3-venv",
    )


def user_exists(ctx: Context, user: str) -> bool:
    if not USER_NAME.match(user):
        raise Failure("UsageError", f"{user!r} is not a user name", "the service would run as that user")
    return ctx.run("getent", "passwd", user).rc == 0


def venv_state(venv: str) -> dict[str, Any]:
    """Whose the venv is and how far it is: absent, foreign, partial or complete; with the marker's content."""
    marker = files.read_json(os.path.join(venv, MARKER))
    if not os.path.isdir(venv) or not os.listdir(venv):
        return {"state": "absent", "marker": None}
    if not isinstance(marker, dict):
        return {"state": "foreign", "marker": None}
    return {"state": "complete" if marker.get("complete") else "partial", "marker": marker}


def has_wheel(ctx: Context, name: str, sha: str) -> bool:
    if not WHEEL_NAME.match(name):
        raise Failure("HelperError", f"{name!r} is not the name of a wheel")
    path = ctx.path(WHEELS, name)
    return os.path.isfile(path) and files.sha256(path) == sha


# -- doing ------------------------------------------------------------------------------------------------------------


def take_wheel(source: Any, path: str, name: str, wanted: str) -> None:
    """Write one wheel beside its place, check it, flush it, rename it."""
    tmp = files.temporary(path)
    digest = hashlib.sha256()
    try:
        with open(tmp, "wb") as out:
            for block in iter(lambda: source.read(CHUNK), b""):
                digest.update(block)
                out.write(block)
            out.flush()
            os.fsync(out.fileno())
        if digest.hexdigest() != wanted:
            raise Failure("HelperError", f"the upload contains damaged content for {name}")
        os.chmod(tmp, 0o644)
        os.rename(tmp, path)
    except BaseException:
        files.remove_entry(tmp)
        raise
    files.fsync_dir(os.path.dirname(path))


def make_user(ctx: Context, user: str) -> list[str]:
    """A system user without a home, a password or a shell; in the groups that own GPU devices, where there are such."""
    if user_exists(ctx, user):
        return []
    groups = [g for g in ("video", "render") if ctx.run("getent", "group", g).rc == 0]
    more = ["--groups", ",".join(groups)] if groups else []
    ran = ctx.run(
        "useradd", "--system", "--no-create-home", "--home-dir", "/nonexistent", "--shell", "/usr/sbin/nologin",
        *more, user,
    )  # fmt: skip
    if ran.rc != 0:
        raise Failure(
            "RefusedError", f"useradd: {ran.err.strip() or ran.rc}", "the service runs as it", f"useradd -r {user}"
        )
    return [f"created user {user}"]


def make_venv(ctx: Context, args: dict[str, Any]) -> list[str]:
    """The venv with what is required in it, unless it is complete for exactly that."""
    venv, wheels = args["venv"], args.get("wheels") or {}
    goal = {"requirements": sorted(args["requirements"]), "wheels": wheels if args.get("offline") else {}}
    found = venv_state(venv)
    if found["state"] == "foreign":
        raise Failure(
            "RefusedError",
            f"{venv} exists and was not made by ddtree-ops",
            "somebody's venv is never changed",
            "set another venv in the inventory, or move that one away",
        )
    if found["state"] == "complete" and {key: found["marker"].get(key) for key in goal} == goal:
        return []
    did = []
    files.make_dirs(venv)
    write_marker(venv, goal, complete=False)
    if not os.access(os.path.join(venv, "bin", "python"), os.X_OK):  # absent, or a bootstrap was killed this early
        python = find_python(ctx, args.get("python"))["path"]
        step(ctx, [python, "-m", "venv", "--without-pip", venv], "the venv could not be made")
        did.append(f"created {venv} with {python}")
    install(ctx, args, venv)
    os.sync()  # pip flushes nothing: after a power cut a marker that says complete would stand beside empty files
    write_marker(venv, goal, complete=True)
    for name in args.get("wheels") or {}:  # gigabytes that nothing needs any more
        files.remove_link(ctx.path(WHEELS, name))
    return [*did, f"installed {', '.join(goal['requirements'])}"]


def write_marker(venv: str, goal: dict[str, Any], complete: bool) -> None:
    files.write_json(os.path.join(venv, MARKER), dict(goal, complete=complete))


def install(ctx: Context, args: dict[str, Any], venv: str) -> None:
    """pip runs out of its own wheel: the host needs neither pip nor ensurepip."""
    wheels = args.get("wheels") or {}
    bad = [name for name, sha in sorted(wheels.items()) if not has_wheel(ctx, name, sha)]
    pip = next((name for name in sorted(wheels) if name.startswith("pip-")), None)
    if bad or pip is None:
        lacks = ", ".join(bad[:5]) or "pip's wheel"
        raise Failure(
            "RefusedError", f"wheels are missing: {lacks}", "pip is run out of its wheel", "ddtree-ops bootstrap {host}"
        )
    argv = [os.path.join(venv, "bin", "python"), os.path.join(ctx.path(WHEELS), pip, "pip"), "install"]
    argv += ["--no-input", "--disable-pip-version-check", "--progress-bar=off", "--no-warn-script-location"]
    argv += ["--no-deps"] if args.get("no_deps") else []
    if args.get("offline"):
        argv += ["--no-index", "--find-links", ctx.path(WHEELS), "--only-binary", ":all:"]
    step(ctx, [*argv, *args["requirements"]], "pip could not install SGLang")


def step(ctx: Context, argv: list[str], found: str) -> None:
    """Run a command, its lines as progress; a failure says its last words."""
    env = dict(os.environ, LC_ALL="C.UTF-8", PYTHONNOUSERSITE="1")
    process = subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=env,
        start_new_session=True,
    )
    last: list[str] = []
    try:
        assert process.stdout is not None
        for raw in process.stdout:
            line = raw.decode("utf-8", "replace").rstrip()
            last = [*last[-19:], line]
            ctx.progress(step="install", line=line)
        code = process.wait()
    except BaseException:
        os.killpg(process.pid, 9)
        process.wait()
        raise
    if code != 0:
        errors = [line for line in last if line.startswith("ERROR")] or last[-3:]
        raise Failure(
            "RefusedError",
            f"{found}: {' '.join(errors)[-400:] or f'exit status {code}'}",
            "what was installed so far stays; the same command goes on from there",
            "ddtree-ops bootstrap {host}",
            output=last,
        )


OPS: dict[str, Op] = {
    "bootstrap_facts": bootstrap_facts,
    "stage_wheels": stage_wheels,
    "bootstrap": bootstrap,
}
