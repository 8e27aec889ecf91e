"""This machine, as the lab needs it: bounded commands, packages, root, a cgroup2 tree.

Every command has a deadline, and an unexpected exit status is an error that quotes what the command said.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ddtree_ops.errors import RefusedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

THIS_MACHINE = "this machine"
INOTIFY_INSTANCES = 2048

# command the lab runs -> the Debian package that holds it
PACKAGES = {
    "mmdebstrap": "mmdebstrap",
    "systemd-nspawn": "systemd-container",
    "ip": "iproute2",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
    "mkfs.ext4": "e2fsprogs",
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "losetup": "mount",
}


def path() -> str:
    """Where commands are looked for; `su` without `-` leaves the system's own directories out."""
    return os.environ.get("PATH", "/usr/bin:/bin") + ":/usr/local/sbin:/usr/sbin:/sbin"


def run(
    *argv: str | os.PathLike[str], timeout: float = 30, ok: Sequence[int] = (0,), env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command of this machine; an exit status outside ``ok`` or a passed deadline is a RefusedError."""
    words = [os.fspath(word) for word in argv]
    words[0] = shutil.which(words[0], path=path()) or words[0]
    try:
        done = subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
            env={**os.environ, "PATH": path(), **(env or {})},
            check=False,
        )
    except FileNotFoundError as error:
        raise RefusedError(
            f"{words[0]} is not installed", host=THIS_MACHINE, why="the lab needs it", next="ddtree-ops lab up"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise RefusedError(
            f"`{' '.join(words)}` did not end in {timeout:.0f} s", host=THIS_MACHINE, why="the lab needs it to end"
        ) from error
    if done.returncode not in ok:
        said = (done.stderr or done.stdout).strip()[-2000:]
        raise RefusedError(
            f"`{' '.join(words)}` ended with {done.returncode}: {said}",
            host=THIS_MACHINE,
            why="the lab cannot be built without it",
            next="ddtree-ops lab down",
        )
    return done


def require_root() -> None:
    """The lab mounts, makes links and boots systems: only root may."""
    if os.geteuid() != 0:
        raise RefusedError(
            "the lab needs root",
            host=THIS_MACHINE,
            why="it boots real systems: mounts, network namespaces and control groups are root's",
            next="run it as root; or use this machine's own systemd, without a lab: ddtree-ops deploy local",
        )


def require_commands(say: Callable[[str], None]) -> None:
    """Install by name, through this machine's apt, the packages whose commands are missing."""
    missing = sorted({package for command, package in PACKAGES.items() if shutil.which(command, path=path()) is None})
    if not missing:
        return
    if shutil.which("apt-get") is None:
        raise RefusedError(
            f"missing here: {', '.join(missing)}",
            host=THIS_MACHINE,
            why="the lab boots its hosts with them, and this machine has no apt to install them with",
            next="run the lab on Debian 12, or use this machine's own systemd: ddtree-ops deploy local",
        )
    say(f"installing {', '.join(missing)}")
    env = {"DEBIAN_FRONTEND": "noninteractive"}
    run("apt-get", "update", "-qq", timeout=300, env=env)
    run("apt-get", "install", "-y", "-qq", "--no-install-recommends", *missing, timeout=600, env=env)


def require_inotify(say: Callable[[str], None]) -> None:
    """Every systemd holds inotify instances, and the kernel counts those of all hosts together, as root's.

    The usual 128 are enough for about fifteen hosts; past that their boots fail in odd places.
    """
    knob = Path("/proc/sys/fs/inotify/max_user_instances")
    if int(knob.read_text()) < INOTIFY_INSTANCES:
        say(f"raising fs.inotify.max_user_instances to {INOTIFY_INSTANCES} until the next reboot")
        knob.write_text(f"{INOTIFY_INSTANCES}\n")


def parse_cgroup2(mountinfo: str) -> Path | None:
    """The first writable cgroup2 mount in the text of /proc/self/mountinfo that shows the tree's root."""
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        fields = left.split()
        if right.startswith("cgroup2 ") and fields[3] == "/" and "rw" in fields[5].split(","):
            return Path(fields[4])
    return None


def cgroup2() -> Path:
    """Where this machine shows its cgroup2 tree."""
    found = parse_cgroup2(Path("/proc/self/mountinfo").read_text())
    if found is None:
        raise RefusedError(
            "no writable cgroup2 mount",
            host=THIS_MACHINE,
            why="each lab host is one control group",
            next="mount -t cgroup2 none /sys/fs/cgroup/unified",
        )
    return found


def debian() -> tuple[str, Path]:
    """This Debian's code name and the apt sources file that names its archive."""
    release = dict(line.split("=", 1) for line in Path("/etc/os-release").read_text().splitlines() if "=" in line)
    name = release.get("VERSION_CODENAME", "").strip('"')
    sources = [Path("/etc/apt/sources.list.d/debian.sources"), Path("/etc/apt/sources.list")]
    found = [path for path in sources if path.is_file() and "deb" in path.read_text()]
    if release.get("ID", "").strip('"') != "debian" or not name or not found:
        raise RefusedError(
            "this is not a Debian machine with apt sources",
            host=THIS_MACHINE,
            why="the hosts' base root is built with this machine's own packages",
            next="run the lab on Debian 12, or use this machine's own systemd: ddtree-ops deploy local",
        )
    return name, found[0]


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an advisory lock on a file; a second process waits until the first lets go or dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def process_start(pid: int) -> str | None:
    """The start time of a process as the kernel counts it, None when it is gone. Tells a reused pid apart."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else fields[19]
