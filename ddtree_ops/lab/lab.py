"""A lab: several hosts on one bridge, under one name. Every step may be repeated, in any state."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddtree_ops.clock import SystemClock
from ddtree_ops.errors import RefusedError, UsageError
from ddtree_ops.lab import root as disks
from ddtree_ops.lab.inventory import inventory_text
from ddtree_ops.lab.machine import Machine
from ddtree_ops.lab.names import DEFAULT_LAB, MAX_HOSTS, LabNames, nets_lock, state_dir
from ddtree_ops.lab.system import THIS_MACHINE, cgroup2, locked, require_commands, require_inotify, require_root, run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ddtree_ops.clock import Clock

DISK_MIB = 2048


def _silent(_: str) -> None:
    pass


def choose_net(lab: str, taken: Iterable[int]) -> int:
    """The third number of the lab's addresses: 0 for the default lab, else the first that nobody uses."""
    used = set(taken)
    if lab == DEFAULT_LAB:
        if 0 in used:
            raise RefusedError(
                "10.77.0.1 is already an address of this machine",
                host=THIS_MACHINE,
                why="the default lab's hosts are 10.77.0.11 and up",
                next="ddtree-ops lab up --lab NAME, which takes other addresses",
            )
        return 0
    free = next((net for net in range(1, 255) if net not in used), None)
    if free is None:
        raise RefusedError("no free network in 10.77.0.0/16", host=THIS_MACHINE, next="ddtree-ops lab down")
    return free


@dataclass
class Lab:
    """One lab. ``say`` gets a line for the person at every slow step."""

    names: LabNames = field(default_factory=LabNames)
    say: Callable[[str], None] = _silent
    clock: Clock = field(default_factory=SystemClock)

    # ---- what is there

    @property
    def _record(self) -> Path:
        return self.names.dir / "lab.json"

    @property
    def exists(self) -> bool:
        return self._record.is_file()

    @property
    def net(self) -> int:
        if not self.exists:
            raise RefusedError(
                f"there is no lab called {self.names.lab!r}", host=THIS_MACHINE, next="ddtree-ops lab up"
            )
        return int(json.loads(self._record.read_text())["net"])

    def machines(self) -> list[Machine]:
        """The lab's hosts, by number."""
        if not self.exists:
            return []
        found = [path.name for path in (self.names.dir / "hosts").glob("lab*")]
        names = sorted((self.names.host_by_name(name) for name in found), key=lambda host: host.index)
        return [Machine(host, self.net, self.clock) for host in names]

    def machine(self, name: str) -> Machine:
        """A host by name; one that was never up is a usage error that lists those there are."""
        names = self.names.host_by_name(name)
        if not self.exists or not names.dir.is_dir():
            have = ", ".join(machine.name for machine in self.machines()) or "none"
            raise UsageError(f"this lab has no host {name}", why=f"its hosts: {have}", next="ddtree-ops lab up -n N")
        return Machine(names, self.net, self.clock)

    def status(self) -> dict[str, Any]:
        """The lab as data: addresses, files, and the state of each host."""
        return {
            "lab": self.names.lab,
            "inventory": str(self.names.inventory),
            "identity": str(self.names.identity),
            "known_hosts": str(self.names.known_hosts),
            "hosts": [machine.state() for machine in self.machines()],
        }

    # ---- up

    def up(self, count: int = 2, disk_mib: int = DISK_MIB) -> list[Machine]:
        """Have ``count`` hosts running; those that run stay as they are. What it made is unmade if it fails."""
        if not 1 <= count <= MAX_HOSTS:
            raise UsageError(f"{count} is not a number of hosts from 1 to {MAX_HOSTS}", next="ddtree-ops lab up -n 2")
        require_root()
        require_commands(self.say)
        require_inotify(self.say)
        base = disks.base_root(self.say)
        image = disks.disk_image(disk_mib, self.say)
        fresh = not self.exists
        try:
            self._network()
            machines = [Machine(self.names.host(index), self.net, self.clock) for index in range(1, count + 1)]
            self._start(machines, base, image)
        except BaseException:
            # an interrupted first `up` would leave half a lab behind; a lab that was there before is kept
            if fresh:
                self.down()
            raise
        return machines

    def _network(self) -> None:
        with locked(nets_lock()):
            if not self.exists:
                net = choose_net(self.names.lab, self._nets_taken())
                self.names.dir.mkdir(parents=True, exist_ok=True)
                self.names.dir.chmod(0o700)
                self._write(self._record, json.dumps({"net": net}))
            if not Path(f"/sys/class/net/{self.names.bridge}").exists():
                run("ip", "link", "add", self.names.bridge, "type", "bridge")
                run("ip", "addr", "add", f"10.77.{self.net}.1/24", "dev", self.names.bridge)
                run("ip", "link", "set", self.names.bridge, "up")
        if not self.names.identity.exists():
            run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "ddtree-lab", "-f", self.names.identity)

    def _nets_taken(self) -> list[int]:
        links = json.loads(run("ip", "-json", "-4", "addr", "show").stdout or "[]")
        addresses = [info["local"] for link in links for info in link.get("addr_info", [])]
        taken = [int(address.split(".")[2]) for address in addresses if address.startswith("10.77.")]
        records = [json.loads(path.read_text()) for path in state_dir().glob("*/lab.json")]
        return taken + [record["net"] for record in records]

    def _start(self, machines: list[Machine], base: Path, image: Path) -> None:
        public_key = self._public_key()
        off = [machine for machine in machines if not machine.on]
        for machine in off:
            machine.create(image, public_key)
        self._write_files()
        for machine in off:
            machine.plug()
            machine.heal()
            machine.boot(base)
        if off:
            self.say(f"booting {', '.join(machine.name for machine in off)}")
        # no `with`: an interrupt must not wait for hosts that are about to be taken down, which ends their threads
        pool = ThreadPoolExecutor(max_workers=8)
        try:
            list(pool.map(lambda machine: machine.wait(), off))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _public_key(self) -> str:
        return self.names.identity.with_suffix(".pub").read_text()

    def _write_files(self) -> None:
        """What others need to reach the hosts: their keys, and an inventory that names them."""
        machines, names = self.machines(), self.names
        self._write(names.known_hosts, "".join(machine.host_key() for machine in machines))
        text = inventory_text(
            [(machine.name, machine.address) for machine in machines],
            path=str(names.inventory),
            identity=str(names.identity),
            known_hosts=str(names.known_hosts),
            lab="" if names.lab == DEFAULT_LAB else names.lab,
        )
        self._write(names.inventory, text)

    def _write(self, path: Path, text: str) -> None:
        partial = path.with_suffix(".partial")
        partial.write_text(text)
        partial.rename(path)

    def power_on(self, machine: Machine) -> None:
        """Boot a host that is off, with the disk it has, and wait for it."""
        machine.heal()
        machine.boot(disks.base_root(self.say))
        machine.wait()

    def renew(self, machine: Machine) -> None:
        """Give a host a new disk, as if it were just installed; name, address and keys stay."""
        require_root()
        machine.kill()
        old = machine.names.dir / "disk.img"
        size_mib = old.stat().st_size >> 20 if old.exists() else DISK_MIB
        old.unlink(missing_ok=True)
        machine.create(disks.disk_image(size_mib, self.say), self._public_key())
        self.power_on(machine)

    # ---- down

    def down(self) -> bool:
        """Leave nothing of this lab; True if there was something. One host's failure does not keep the others."""
        require_root()
        machines = {machine.names.index: machine for machine in self.machines()}
        for index in self._left_in_kernel():
            machines.setdefault(index, Machine(self.names.host(index), 0, self.clock))
        failed: list[Exception] = []
        for machine in machines.values():
            try:
                machine.destroy()
            except Exception as error:  # noqa: BLE001 - reported below, after the other hosts are down too
                failed.append(error)
        bridge = Path(f"/sys/class/net/{self.names.bridge}").exists()
        if failed:
            raise failed[0]
        if bridge:
            run("ip", "link", "del", self.names.bridge)
        group = cgroup2() / self.names.cgroup
        if group.is_dir():
            group.rmdir()
        there = bool(machines) or bridge or self.names.dir.exists()
        with locked(nets_lock()):
            shutil.rmtree(self.names.dir, ignore_errors=True)
            spaces = Path("/run/netns")  # `ip netns add` mounts it on itself at first use
            if spaces.is_mount() and not any(spaces.iterdir()):
                run("umount", spaces, ok=(0, 32))
        return there

    def _left_in_kernel(self) -> set[int]:
        """Numbers of hosts that left a link or a namespace, also when the record of the lab is gone."""
        links = [path.name for path in Path("/sys/class/net").glob(f"dd{self.names.tag}-*")]
        spaces = [path.name for path in Path("/run/netns").glob(f"ddtree-{self.names.lab}-lab*")]
        numbers = [name.rpartition("-")[2].removeprefix("lab") for name in links + spaces]
        return {int(number) for number in numbers if number.isdigit()}
