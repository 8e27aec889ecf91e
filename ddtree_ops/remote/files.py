"""put and get for every remote that can run a command: whole or absent, checked where the file ends up."""

from __future__ import annotations

import hashlib
import secrets
import shlex
from collections.abc import Callable, Sequence
from typing import BinaryIO, Protocol

from ddtree_ops.errors import DdtreeError, DeadlineError, RefusedError, UnreachableError
from ddtree_ops.remote.base import Completed

# Runs on the host, Python >= 3.8: read it all, check size and sha256, write beside the place, flush, rename, flush.
PUT = """\
import hashlib, os, sys, time
os.umask(0o022)
path, size, sha, mode = sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4], 8)
data = sys.stdin.buffer.read()
if len(data) != size or hashlib.sha256(data).hexdigest() != sha:
    sys.exit("torn: %d of %d bytes arrived" % (len(data), size))
folder = os.path.dirname(os.path.abspath(path))
os.makedirs(folder, exist_ok=True)
for name in os.listdir(folder):  # what an upload left that was killed; a living one is never an hour old
    old = os.path.join(folder, name)
    if name.startswith(".tmp-put-") and os.stat(old).st_mtime < time.time() - 3600:
        os.unlink(old)
tmp = os.path.join(folder, ".tmp-put-" + os.urandom(8).hex())
fd = os.open(tmp, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
try:
    with os.fdopen(fd, "wb") as out:
        out.write(data)
        out.flush()
        os.fchmod(out.fileno(), mode)
        os.fsync(out.fileno())
    os.rename(tmp, path)
except BaseException:
    os.unlink(tmp)
    raise
fd = os.open(folder, os.O_RDONLY)
os.fsync(fd)
"""


class Runs(Protocol):
    @property
    def name(self) -> str: ...

    def run(
        self,
        argv: Sequence[str],
        *,
        deadline_s: float,
        stdin: bytes | BinaryIO | None = None,
        sudo: bool = False,
        on_line: Callable[[str], None] | None = None,
    ) -> Completed: ...


class FilesOverRun:
    """Gives a remote its ``put`` and ``get``, each in one round trip and, if asked, with the rights of sudo."""

    def put(self: Runs, data: bytes, path: str, *, mode: int = 0o644, deadline_s: float, sudo: bool = False) -> None:
        sha = hashlib.sha256(data).hexdigest()
        argv = ["python3", "-I", "-c", PUT, path, str(len(data)), sha, f"{mode:o}"]
        done = self.run(argv, deadline_s=deadline_s, stdin=data, sudo=sudo)
        if done.rc == 0:
            return
        if done.err_text.startswith("torn: "):
            raise UnreachableError(f"the upload of {path} broke off: {done.err_text.strip()}", self.name)
        raise explain(done, self.name) or RefusedError(
            f"{path} could not be written: {last_line(done)}", self.name, "nothing was changed there"
        )

    def get(self: Runs, path: str, *, deadline_s: float, sudo: bool = False, limit: int = 64 << 20) -> bytes:
        mark = secrets.token_hex(16)  # before it a login shell may have written a greeting
        argv = ["sh", "-c", 'printf %s "$1"; exec head -c "$2" -- "$3"', "sh", mark, str(limit + 1), path]
        done = self.run(argv, deadline_s=deadline_s, sudo=sudo)
        if done.rc != 0:
            raise explain(done, self.name) or RefusedError(f"{path} could not be read: {last_line(done)}", self.name)
        data = done.out.partition(mark.encode())[2]
        if len(data) > limit:
            raise RefusedError(f"{path} is larger than {limit} bytes", self.name)
        return data


def bounded(argv: Sequence[str], deadline_s: float, *, sudo: bool) -> list[str]:
    """``argv`` under a time limit of its own on the far side, as root if asked.

    The limit is inside sudo: a user may not kill what sudo runs for them. ``-n`` never asks for a password.
    """
    limited = ["timeout", "-k", "5", str(max(1, round(deadline_s + 0.5))), *argv]
    return ["sudo", "-n", "--", *limited] if sudo else limited


def ended(done: Completed, host: str, deadline_s: float) -> Completed:
    """The command's answer, unless ``timeout`` had to end it (124, or 137 if it would not go)."""
    if done.rc in (124, 137):
        raise DeadlineError(
            f"{done.argv[0]} took longer than {deadline_s:.0f} s and was ended", host,
            "each step on the host is whole or did not happen", f"ddtree-ops status {host}",
        )  # fmt: skip
    return done


def explain(done: Completed, host: str) -> DdtreeError | None:
    """Why a command could not even begin (or had to be killed): no sudo, no python3, too slow. None if it began."""
    said = done.err_text
    if "sudo:" in said and done.rc != 0:
        line = next((line for line in said.splitlines() if "sudo:" in line), "")
        missing = "not found" in line
        why = "changing units and /opt needs root; ddtree-ops never types a password"
        allow = "echo 'USER ALL=(root) NOPASSWD: ALL' >/etc/sudoers.d/ddtree-ops"
        repair = f"on {host}, as root: {'apt-get install sudo' if missing else allow}"
        if "password is required" in line or "a terminal is required" in line:
            line = "sudo asks for a password"
        return RefusedError(line.removeprefix("sudo: ").strip() or "sudo failed", host, why, repair, {"sudo": said})
    if done.rc == 127 and "python3" in said:
        return RefusedError(
            "python3 is not on the host", host, "the helper that makes every step atomic is a Python program",
            f"on {host}: apt-get install python3-minimal",
        )  # fmt: skip
    if done.rc in (126, 127):
        return RefusedError(f"{shlex.join(done.argv[:3])} could not run: {last_line(done)}", host)
    return None


def last_line(done: Completed) -> str:
    lines = [line for line in (done.err_text or done.text).splitlines() if line.strip()]
    return lines[-1].strip() if lines else f"exit status {done.rc}, and it said nothing"
