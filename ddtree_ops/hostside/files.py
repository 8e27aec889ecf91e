"""Changes to files that are whole or did not happen, also under ``kill -9`` and a power cut.

The order is always: write beside the place, flush the file, rename, flush the folder.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import stat
from typing import Any

TMP = ".tmp-"
TRASH = ".trash-"
RESERVE, RESERVE_BYTES = "reserve", 1 << 20
FULL = (errno.ENOSPC, errno.EDQUOT)


def fsync_dir(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_dirs(path: str) -> None:
    """``mkdir -p`` whose new entries are flushed to disk. Their mode is 0755: ``__main__`` sets the umask."""
    missing: list[str] = []
    while path and not os.path.isdir(path):
        missing.append(path)
        path = os.path.dirname(path)
    for part in reversed(missing):
        try:
            os.mkdir(part, 0o755)
        except FileExistsError:
            continue
        fsync_dir(os.path.dirname(part))


def temporary(path: str) -> str:
    """A name beside ``path`` that says whose it is; what a killed predecessor left there is removed."""
    folder, base = os.path.split(path)
    prefix = TMP + base + "."
    for name in os.listdir(folder):
        if name.startswith(prefix) and not at_work(name):
            remove_entry(os.path.join(folder, name))
    return os.path.join(folder, f"{prefix}{os.getpid()}-{begun(os.getpid())}-{os.urandom(6).hex()}")


def begun(pid: int) -> str:
    """When a process began, in the kernel's ticks: what tells it from one that has its number later."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as src:
            return src.read().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def at_work(name: str) -> bool:
    """Whether another helper that still runs made this: that of a link that broke may outlive its client."""
    made = re.search(r"\.(\d+)-(\d+)-[0-9a-f]{12}$", name)
    return made is not None and int(made[1]) != os.getpid() and begun(int(made[1])) == made[2]


def write_file(path: str, data: bytes, mode: int = 0o644) -> None:
    """Replace ``path`` by rename."""
    tmp = temporary(path)
    try:
        write_new(tmp, data, mode)
        os.rename(tmp, path)
    except BaseException:
        remove_entry(tmp)
        raise
    fsync_dir(os.path.dirname(path))


def write_new(path: str, data: bytes, mode: int = 0o644) -> None:
    """Create ``path`` (which must not exist) and flush it; its mode does not depend on the umask."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(fd, "wb") as out:
        out.write(data)
        out.flush()
        os.fchmod(out.fileno(), mode)
        os.fsync(out.fileno())


def write_json(path: str, value: Any, mode: int = 0o644) -> None:
    write_file(path, to_json(value), mode)


def to_json(value: Any) -> bytes:
    return json.dumps(value, indent=1, sort_keys=True).encode() + b"\n"


def read_json(path: str) -> Any | None:
    """The file's JSON; None when there is no such file or it is not JSON."""
    try:
        with open(path, "rb") as src:
            return json.loads(src.read().decode("utf-8"))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None


def append_line(path: str, value: dict[str, Any]) -> None:
    """Append one JSON line and flush it. A line that a power cut tore is closed first, so it spoils only itself."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        size = os.fstat(fd).st_size
        torn = size > 0 and os.pread(fd, 1, size - 1) != b"\n"
        line = json.dumps(value, sort_keys=True, separators=(",", ":")).encode() + b"\n"
        rest = memoryview(b"\n" + line if torn else line)
        while rest:  # a disk that becomes full takes a part, and says so at the next write only
            rest = rest[os.write(fd, rest) :]
        os.fsync(fd)
    finally:
        os.close(fd)
    fsync_dir(os.path.dirname(path))


def read_lines(path: str, last: int = 1000) -> list[dict[str, Any]]:
    """The last JSON lines of an append-only file; a torn line is left out."""
    try:
        with open(path, "rb") as src:
            lines = src.read().splitlines()
    except FileNotFoundError:
        return []
    found: list[dict[str, Any]] = []
    for line in lines[-last:]:
        try:
            found.append(json.loads(line.decode("utf-8")))
        except ValueError:
            continue
    return found


def point(link: str, target: str) -> None:
    """Make ``link`` a symbolic link to ``target``, replacing the link that was there by rename."""
    tmp = temporary(link)
    os.symlink(target, tmp)
    os.rename(tmp, link)
    fsync_dir(os.path.dirname(link))


def remove_all(path: str) -> None:
    import shutil  # rarely needed, and slow to import

    shutil.rmtree(path, ignore_errors=True)


def remove_entry(path: str) -> None:
    """Remove a file, link or folder that may be absent."""
    try:
        if stat.S_ISDIR(os.lstat(path).st_mode):
            remove_all(path)
        else:
            os.unlink(path)
    except FileNotFoundError:
        return


def remove_tree(path: str) -> None:
    """Remove a folder so that nobody ever sees half of it: it leaves its name first."""
    folder, base = os.path.split(path)
    trash = os.path.join(folder, TRASH + base + "." + os.urandom(6).hex())
    try:
        os.rename(path, trash)
    except FileNotFoundError:
        return
    fsync_dir(folder)
    remove_all(trash)


def remove_link(path: str) -> bool:
    """Remove a file or link; whether it was there."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return False
    fsync_dir(os.path.dirname(path))
    return True


def sweep(folder: str) -> list[str]:
    """Remove what killed predecessors left in ``folder``; the caller holds the host's lock."""
    left = [n for n in os.listdir(folder) if n.startswith((TMP, TRASH))] if os.path.isdir(folder) else []
    left = [name for name in left if not at_work(name)]
    for name in left:
        remove_entry(os.path.join(folder, name))
    return left


def sha256(path: str) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as src:
        for block in iter(lambda: src.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()


def make_reserve(folder: str) -> None:
    """Keep some space that a full disk cannot take: taking back and pruning must work on one. Best effort."""
    path = os.path.join(folder, RESERVE)
    if os.path.exists(path):
        return
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.posix_fallocate(fd, 0, RESERVE_BYTES)
        finally:
            os.close(fd)
    except OSError:  # the disk is full already, or its file system cannot promise space
        remove_link(path)


def use_reserve(folder: str) -> bool:
    """Give the space back for what has to be written now; whether there was any."""
    return remove_link(os.path.join(folder, RESERVE))


def ask_again_on_full_disk(error: Exception, folder: str) -> None:
    """Raise ``error`` if the whole operation will be asked for again with the space that was kept."""
    if isinstance(error, OSError) and error.errno in FULL and os.path.exists(os.path.join(folder, RESERVE)):
        raise error


def explain(error: OSError) -> dict[str, str] | None:
    """found, why, next for the errors of a host that is full, read-only or not ours; None for any other."""
    where = error.filename or "the disk"
    if error.errno in FULL:
        return {
            "found": f"no space left for {where}",
            "why": "each step is whole or did not happen; this one can be asked for again when there is space",
            "next": "ddtree-ops prune {host}",
        }
    if error.errno == errno.EROFS:
        return {
            "found": f"{where} is on a read-only file system",
            "why": "nothing can be staged or switched there",
            "next": "ddtree-ops doctor {host}",
        }
    if error.errno in (errno.EACCES, errno.EPERM):
        return {
            "found": f"no permission for {where}",
            "why": f"the helper runs as uid {os.getuid()}",
            "next": "ddtree-ops bootstrap {host}",
        }
    return None
