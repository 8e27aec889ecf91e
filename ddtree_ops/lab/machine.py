"""One lab host: a real systemd with a disk, a cable and an address of its own, and ways to break it.

A host is a process tree in one control group, below a supervisor (``boot.sh``) that holds its mounts. Taking it
down is therefore killing the group: the kernel unmounts and frees the loop device when the last process is gone.
"""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import struct
import subprocess
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from ddtree_ops.clock import Deadline, SystemClock
from ddtree_ops.errors import RefusedError, UnreachableError, UsageError
from ddtree_ops.lab import root as disks
from ddtree_ops.lab.names import nets_lock
from ddtree_ops.lab.standin.faults import FAULTS_FILE, PREFIX, variables
from ddtree_ops.lab.system import cgroup2, locked, process_start, run

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ddtree_ops.clock import Clock
    from ddtree_ops.lab.names import HostNames

BOOT_S = 90.0
STOP_S = 20.0
# ioctl of <linux/fs.h>: stop the file system where it stands, without writing back the journal or any page
FS_IOC_SHUTDOWN = 0x8004587D
NOLOGFLUSH = 2


@dataclass
class Machine:
    """A host of a lab. ``net`` is the third number of its address."""

    names: HostNames
    net: int
    clock: Clock = field(default_factory=SystemClock)

    @property
    def name(self) -> str:
        return self.names.name

    @property
    def address(self) -> str:
        return self.names.address(self.net)

    # ---- power and disk

    def create(self, image: Path, public_key: str) -> None:
        """Give the host a disk and what makes it itself: name, machine id, host key, who may log in."""
        directory = self.names.dir
        for part in ("disk", "root", "seed/etc/ssh"):
            (directory / part).mkdir(parents=True, exist_ok=True)
        seed = directory / "seed"
        host_key = seed / "etc/ssh/ssh_host_ed25519_key"
        if not host_key.exists():
            run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", self.name, "-f", host_key)
            (seed / "etc/hostname").write_text(f"{self.name}\n")
            (seed / "etc/hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 {self.name}\n")
            (seed / "etc/machine-id").write_text(f"{uuid4().hex}\n")
            for home in ("root", "home/ops", "home/visitor"):
                self._authorize(seed / home, public_key)
        if not (directory / "disk.img").exists():
            disks.copy_disk(image, directory / "disk.img")

    def _authorize(self, home: Path, public_key: str) -> None:
        owner = {"ops": 1000, "visitor": 1001}.get(home.name, 0)
        keys = home / ".ssh" / "authorized_keys"
        keys.parent.mkdir(parents=True)
        keys.write_text(public_key)
        for path, mode in ((home, 0o700), (keys.parent, 0o700), (keys, 0o600)):
            path.chmod(mode)
            os.chown(path, owner, owner)

    def host_key(self) -> str:
        """The line of known_hosts for this host."""
        public = (self.names.dir / "seed/etc/ssh/ssh_host_ed25519_key.pub").read_text().split()
        return f"{self.address} {public[0]} {public[1]}\n"

    def supervisor(self) -> int | None:
        """The process that holds the host's mounts, None when the host is off."""
        try:
            pid, start = (self.names.dir / "supervisor").read_text().split()
        except (OSError, ValueError):
            return None
        return int(pid) if process_start(int(pid)) == start else None

    @property
    def on(self) -> bool:
        return self.supervisor() is not None

    def boot(self, base: Path) -> None:
        """Power on. Returns at once; ``wait`` tells when the host is up."""
        if self.on:
            return
        self._await(self._loops_gone, STOP_S, "its disk is still attached to a loop device")
        (cgroup2() / self.names.cgroup).mkdir(parents=True, exist_ok=True)
        directory = self.names.dir
        (directory / "supervisor").unlink(missing_ok=True)
        script = resources.files("ddtree_ops.lab").joinpath("boot.sh")
        with (directory / "console.log").open("a") as console, resources.as_file(script) as boot:
            subprocess.run(
                ["setsid", "--fork", "unshare", "--mount", "--propagation", "private", "sh", str(boot), self.name,
                 self.names.netns, self.names.cgroup, str(directory / "disk.img"), str(directory), str(base)],
                stdin=subprocess.DEVNULL, stdout=console, stderr=console, timeout=10, check=True,
            )  # fmt: skip
            self._await((directory / "supervisor").exists, 10, "its supervisor did not start")

    def _loops_gone(self) -> bool:
        return not run("losetup", "-j", self.names.dir / "disk.img").stdout.strip()

    def wait(self, seconds: float = BOOT_S) -> None:
        """Until ssh answers and systemd says that the boot is over."""
        deadline = Deadline.after(seconds, self.clock)
        said = ""
        while not deadline.passed:
            if not self.on:
                raise self._failed("it went off while booting")
            done = self.ssh("systemctl is-system-running --wait", timeout=max(1.0, deadline.left))
            said = done.stdout.strip() or done.stderr.strip()
            if said in ("running", "degraded"):  # degraded: a unit failed, which may be what a test is about
                return
            self.clock.sleep(0.1)
        raise self._failed(f"not up after {seconds:.0f} s ({said or 'no answer'})")

    def _failed(self, found: str) -> UnreachableError:
        console = self.names.dir / "console.log"
        tail = console.read_text(errors="replace")[-1500:].strip() if console.exists() else ""
        return UnreachableError(
            found + (f"; its console says: {tail}" if tail else ""),
            host=self.name,
            why="a lab host that does not boot tests nothing",
            next="ddtree-ops lab down",
        )

    def _await(self, done: Callable[[], bool], seconds: float, otherwise: str) -> None:
        deadline = Deadline.after(seconds, self.clock)
        while not done():
            if deadline.passed:
                raise self._failed(otherwise)
            self.clock.sleep(0.02)

    def kill(self) -> None:
        """SIGKILL every process of the host at once. The cable stays plugged in: its peers get resets."""
        supervisor = self.supervisor()
        if supervisor is not None:
            with suppress(ProcessLookupError):
                os.killpg(supervisor, signal.SIGKILL)  # it leads the group; what it is about to start goes with it
        self._await(self._killed, STOP_S, "processes of it do not end")

    def _killed(self) -> bool:
        group = cgroup2() / self.names.cgroup
        with suppress(FileNotFoundError):
            (group / "cgroup.kill").write_text("1")
        return not self.on and not self._populated(group)

    def _populated(self, group: Path) -> bool:
        try:
            return "populated 1" in (group / "cgroup.events").read_text()
        except OSError:
            return False

    def powercut(self) -> None:
        """The plug is pulled: the cable is silent, and what was not synced to the disk is lost."""
        self.cut()
        supervisor = self.supervisor()
        if supervisor is not None:
            mounted = os.open(self._disk(supervisor), os.O_RDONLY)
            try:
                fcntl.ioctl(mounted, FS_IOC_SHUTDOWN, struct.pack("I", NOLOGFLUSH))
            finally:
                os.close(mounted)
        self.kill()

    def _disk(self, supervisor: int) -> Path:
        """The host's mounted disk, seen through the mount namespace of its supervisor."""
        return Path(f"/proc/{supervisor}/root{self.names.dir}/disk")

    def free_bytes(self) -> int:
        """What is free on the host's disk."""
        free = os.statvfs(self._disk(self._require_on()))
        return free.f_bavail * free.f_frsize

    def fill(self, leave_mib: int = 0) -> None:
        """Take the free space of the host's disk, except ``leave_mib``."""
        disk = self._disk(self._require_on())
        with (disk / "fill").open("ab") as handle:
            step = 1 << 30
            while step >= 4096:
                room = self.free_bytes() - (leave_mib << 20)
                size = min(step, room - room % 4096)
                try:
                    if size < 4096:
                        break
                    os.posix_fallocate(handle.fileno(), os.fstat(handle.fileno()).st_size, size)
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
                    step = size // 2

    def empty(self) -> None:
        """Give back what ``fill`` took."""
        (self._disk(self._require_on()) / "fill").unlink(missing_ok=True)

    def _require_on(self) -> int:
        supervisor = self.supervisor()
        if supervisor is None:
            raise RefusedError(
                "the host is off", host=self.name, why="only a running host can do this", next="ddtree-ops lab up"
            )
        return supervisor

    # ---- cable

    def plug(self) -> None:
        """The network namespace (it outlives the host) and the cable to the lab's bridge."""
        if Path(f"/run/netns/{self.names.netns}").exists() and self._link_exists():
            return
        self.unplug()
        link, netns = self.names.link, self.names.netns
        with locked(nets_lock()):
            run("ip", "netns", "add", netns)
        run("ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", netns)
        run("ip", "link", "set", link, "master", self.names.lab.bridge, "up")
        run("ip", "-n", netns, "link", "set", "lo", "up")
        run("ip", "-n", netns, "addr", "add", f"{self.address}/24", "dev", "eth0")
        run("ip", "-n", netns, "link", "set", "eth0", "up")
        run("ip", "-n", netns, "route", "add", "default", "via", f"10.77.{self.net}.1")

    def unplug(self) -> None:
        """Remove cable and namespace. The link first: left to the namespace, the kernel frees it later."""
        if self._link_exists():
            run("ip", "link", "del", self.names.link)
        if Path(f"/run/netns/{self.names.netns}").exists():
            run("ip", "netns", "del", self.names.netns)

    def _link_exists(self) -> bool:
        return Path(f"/sys/class/net/{self.names.link}").exists()

    def cut(self) -> None:
        """Unplug the cable; nobody is told."""
        run("ip", "link", "set", self.names.link, "down")

    def heal(self) -> None:
        run("ip", "link", "set", self.names.link, "up")

    # ---- stalls

    def freeze(self) -> None:
        """Stop every process of the host where it stands; the kernel still answers for it."""
        self._require_on()
        self._set_frozen("1")

    def thaw(self) -> None:
        self._set_frozen("0")

    def _set_frozen(self, value: str) -> None:
        (cgroup2() / self.names.cgroup / "payload/cgroup.freeze").write_text(value)

    # ---- commands

    def ssh_argv(self, *command: str, user: str = "root", tty: bool = False) -> list[str]:
        """The ssh command for this host; with the lab's own key and known_hosts, nothing of the caller's."""
        lab = self.names.lab
        options = (
            "BatchMode=yes", "StrictHostKeyChecking=yes", "GlobalKnownHostsFile=none", "IdentitiesOnly=yes",
            f"UserKnownHostsFile={lab.known_hosts}", "LogLevel=ERROR", "ConnectTimeout=3",
            "ServerAliveInterval=1", "ServerAliveCountMax=3",
        )  # fmt: skip
        flags = [word for option in options for word in ("-o", option)]
        return [
            "ssh", "-F", "none", "-i", str(lab.identity), *flags, *(["-t"] if tty else []),
            f"{user}@{self.address}", *command,
        ]  # fmt: skip

    def ssh(self, line: str, *, timeout: float = 30, user: str = "root") -> subprocess.CompletedProcess[str]:
        """Run a line of shell through ssh; rc 255 when the host cannot be reached or ``timeout`` passes."""
        argv = self.ssh_argv(line, user=user)
        try:
            return subprocess.run(
                argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
                timeout=timeout, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return subprocess.CompletedProcess(argv, 255, "", f"no end after {timeout:.0f} s")

    def inside(self, *command: str, timeout: float = 30, ok: Sequence[int] = (0,)) -> subprocess.CompletedProcess[str]:
        """Run a command in the host without its network: works while the cable is cut."""
        return run("nsenter", "--target", str(self.leader()), "--all", "--", *command, timeout=timeout, ok=ok)

    def faults(self) -> dict[str, str]:
        """The faults of the stand-in server that this host's file sets, by name without prefix."""
        lines = self.inside("cat", FAULTS_FILE, ok=(0, 1)).stdout.splitlines()
        return variables(dict(line.split("=", 1) for line in lines if "=" in line))

    def set_faults(self, words: Sequence[str] | None) -> dict[str, str]:
        """Replace the host's faults by these ``NAME=VALUE`` words; they hold from the server's next start on."""
        pairs = [word.partition("=") for word in words or ()]
        try:
            if not all(equals for _, equals, _ in pairs):
                raise ValueError("a fault is written NAME=VALUE")
            values = variables({f"{PREFIX}{name.removeprefix(PREFIX)}": value for name, _, value in pairs})
        except ValueError as error:
            raise UsageError(
                str(error), host=self.name, why="a misspelt fault tests nothing", next="see docs/lab.md"
            ) from error
        text = "".join(f"{PREFIX}{name}={value}\n" for name, value in values.items())
        self.inside("sh", "-c", 'mkdir -p "${1%/*}" && printf %s "$2" >"$1"', "sh", FAULTS_FILE, text)
        return values

    def leader(self) -> int:
        """The host's PID 1, as this machine counts."""
        self._require_on()
        procs = cgroup2() / self.names.cgroup / "payload/init.scope/cgroup.procs"
        return int(procs.read_text().split()[0])

    # ---- all of it

    def state(self) -> dict[str, Any]:
        """What a person wants to know about the host, without asking the host itself."""
        freeze = cgroup2() / self.names.cgroup / "payload/cgroup.freeze"
        flags = Path(f"/sys/class/net/{self.names.link}/flags")
        frozen = freeze.exists() and freeze.read_text().strip() == "1"
        return {
            "name": self.name,
            "address": self.address,
            "power": ("frozen" if frozen else "on") if self.on else "off",
            "cable": ("plugged" if int(flags.read_text(), 16) & 1 else "cut") if flags.exists() else "none",
        }

    def destroy(self) -> None:
        """Power off and leave nothing: no process, mount, link, namespace, control group or file."""
        self.kill()
        self.unplug()
        group = cgroup2() / self.names.cgroup
        if group.is_dir():
            for directory in sorted(group.rglob("*/"), key=lambda path: len(path.parts), reverse=True):
                directory.rmdir()
            group.rmdir()
        self._await(self._loops_gone, STOP_S, "its disk is still attached to a loop device")
        run("rm", "-rf", "--one-file-system", self.names.dir, timeout=60)
