"""What an operation gets: where things lie on this host, how to run a command, how to report."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from typing import Any, BinaryIO, Callable, Dict, Sequence

NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")
DIGEST = re.compile(r"^[0-9a-f]{8,64}$")
KILLED_S = 1.0
HANGING: list[subprocess.Popen[bytes]] = []


class Failure(Exception):
    """An error with a kind of ``ddtree_ops.errors``: what was found, why it matters, what to run next.

    ``{host}`` in ``next`` becomes the host's name in the inventory.
    """

    def __init__(self, kind: str, found: str, why: str = "", next: str = "", **data: Any) -> None:
        super().__init__(found)
        self.kind, self.found, self.why, self.next, self.data = kind, found, why, next, data


# An operation: what it was asked, to what it answers. (Evaluated at run time, also by Python 3.8: hence Dict.)
Op = Callable[["Context", Dict[str, Any]], Dict[str, Any]]


class Ran:
    """A command that ended (or was not found: rc 127, or was cut off: rc 124)."""

    def __init__(self, argv: Sequence[str], rc: int, out: str, err: str) -> None:
        self.argv, self.rc, self.out, self.err = list(argv), rc, out, err

    def raw(self) -> dict[str, Any]:
        return {"argv": self.argv, "rc": self.rc, "out": self.out, "err": self.err}


class Context:
    """One request on this host."""

    def __init__(self, request: dict[str, Any], payload: BinaryIO, answers: BinaryIO) -> None:
        self.root = os.path.abspath(os.path.expanduser(request["root"]))
        self.scope: str = request.get("scope", "system")
        self.host: str = request.get("host") or "HOST"
        self.lock: str | None = request.get("lock")
        self.deadline = time.monotonic() + float(request.get("deadline_s") or 600.0)
        self.unit_dir = request.get("unit_dir") or (
            "/etc/systemd/system" if self.scope == "system" else os.path.expanduser("~/.config/systemd/user")
        )
        self.bin: dict[str, list[str]] = request.get("bin") or {}
        self.payload = payload
        self._answers = answers
        if self.scope == "user":
            os.environ.setdefault("XDG_RUNTIME_DIR", f"/run/user/{os.getuid()}")

    # -- places ---------------------------------------------------------------------------------------------------

    def path(self, *parts: str) -> str:
        return os.path.join(self.root, *parts)

    def instance_dir(self, instance: str) -> str:
        return self.path("instances", checked_name(instance))

    def release_dir(self, instance: str, release: str) -> str:
        return os.path.join(self.instance_dir(instance), "releases", checked_digest(release))

    def engine_dir(self, engine: str) -> str:
        return self.path("engines", checked_digest(engine))

    def instances(self) -> list[str]:
        return sorted(n for n in listdir(self.path("instances")) if NAME.match(n))

    @staticmethod
    def unit(instance: str) -> str:
        return f"sglang-ddtree-{checked_name(instance)}.service"

    def unit_path(self, instance: str) -> str:
        return os.path.join(self.unit_dir, self.unit(instance))

    # -- reports --------------------------------------------------------------------------------------------------

    def emit(self, event: dict[str, Any], must_arrive: bool = False) -> None:
        """Write one JSON line. A client that went away does not stop a change half way, unless ``must_arrive``."""
        try:
            # A name that is not UTF-8 arrives with question marks, not as something that no terminal can print.
            line = json.dumps(event, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "replace")
            self._answers.write(line + b"\n")
            self._answers.flush()
        except OSError:
            if must_arrive:
                raise

    def progress(self, **what: Any) -> None:
        self.emit(dict(what, event="progress"))

    # -- commands -------------------------------------------------------------------------------------------------

    @property
    def left_s(self) -> float:
        return max(0.1, self.deadline - time.monotonic())

    def command(self, name: str, *args: str) -> list[str]:
        """``name`` with its arguments, for this scope: systemctl and journalctl talk to the user's own manager."""
        argv = list(self.bin.get(name, [name]))
        if self.scope == "user" and name in ("systemctl", "journalctl", "systemd-run"):
            argv.append("--user")
        return argv + list(args)

    def run(self, name: str, *args: str, timeout_s: float = 30.0) -> Ran:
        """Run a command and keep everything it said; a program that cannot run and one that hangs are answers too."""
        argv = self.command(name, *args)
        env = dict(os.environ, LC_ALL="C.UTF-8", SYSTEMD_PAGER="", SYSTEMD_COLORS="0")
        try:
            child = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env
            )
        except FileNotFoundError:
            return Ran(argv, 127, "", f"{argv[0]}: not found")
        except OSError as error:  # no permission, not a program, no memory
            return Ran(argv, 126, "", f"{argv[0]}: {error.strerror}")
        limit = min(timeout_s, self.left_s)
        try:
            out, err = child.communicate(timeout=limit)
        except BaseException as ended:
            child.kill()
            for pipe in (child.stdout, child.stderr):
                assert pipe is not None
                pipe.close()
            try:
                child.wait(timeout=KILLED_S)  # no longer: one that hangs in its driver does not even end by that
            except subprocess.TimeoutExpired:
                HANGING.append(child)
            if isinstance(ended, subprocess.TimeoutExpired):
                return Ran(argv, 124, "", f"{argv[0]}: no answer within {limit:.0f} s")
            raise
        return Ran(argv, child.returncode, out.decode("utf-8", "replace"), err.decode("utf-8", "replace"))


def checked_name(name: str) -> str:
    if not isinstance(name, str) or not NAME.match(name):
        raise Failure("UsageError", f"{name!r} is not an instance name", "it becomes a folder and a unit name")
    return name


def checked_digest(digest: str) -> str:
    if not isinstance(digest, str) or not DIGEST.match(digest):
        raise Failure("HelperError", f"{digest!r} is not a digest", "it becomes a folder name")
    return digest


def listdir(path: str) -> list[str]:
    """Names in a folder; none when there is no such folder."""
    try:
        return sorted(os.listdir(path))
    except (FileNotFoundError, NotADirectoryError):
        return []


def who_runs() -> str:
    return f"{sys.executable} on Python {sys.version.split()[0]}"
