"""What the deploy tests of the lab share: an inventory of their own, a look at a host's disk, the invariants."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ddtree_ops.lab.inventory import inventory_text
from ddtree_ops.lab.lab import Lab
from ddtree_ops.lab.machine import Machine


class Cli(Protocol):
    """The fixture ``cli``: runs ddtree-ops as a person would."""

    inventory: Path
    home: Path

    def __call__(
        self, *words: str, expect: int | Sequence[int] = 0, timeout: float = 300
    ) -> subprocess.CompletedProcess[str]: ...

    def start(self, *words: str) -> subprocess.Popen[str]: ...


# A small second instance on the other GPU, that no change of the first may touch.
OTHER = """
[hosts.{name}.instances.other]
mode = "linear"
gpus = [1]
port = 30001
"""

# Runs in the host: everything the invariants speak of, judged by the files alone.
LOOK = r"""
import hashlib, json, os, sys
ROOT = "/opt/ddtree"
def wrong(folder):
    try:
        manifest = json.load(open(os.path.join(folder, "manifest.json")))
    except (OSError, ValueError):
        return "no manifest"
    for name, record in manifest["files"].items():
        data = open(os.path.join(folder, name), "rb").read()
        if hashlib.sha256(data).hexdigest() != record["sha256"]:
            return name + " differs"
    if not os.path.exists("%s/engines/%s/manifest.json" % (ROOT, manifest["engine"])):
        return "no engine"
    return ""
seen = {"instances": {}, "lock": None}
base = ROOT + "/instances"
for name in sorted(os.listdir(base)) if os.path.isdir(base) else []:
    folder = os.path.join(base, name)
    releases = os.path.join(folder, "releases")
    there = {r: wrong(os.path.join(releases, r)) for r in os.listdir(releases) if not r.startswith(".")}
    link = os.path.join(folder, "current")
    unit = "/etc/systemd/system/sglang-ddtree-%s.service" % name
    text = open(unit).read() if os.path.exists(unit) else None
    of = [r for r in there if not there[r] and open(os.path.join(releases, r, "unit")).read() == text]
    state = os.path.join(folder, "state.json")
    seen["instances"][name] = {
        "current": os.path.basename(os.readlink(link)) if os.path.islink(link) else None,
        "real": os.path.lexists(link) and not os.path.islink(link), "releases": there,
        "armed": os.path.exists(os.path.join(folder, "armed.json")),
        "unit": text is not None, "unit_of": of[0] if of else None,
        "state": json.load(open(state)) if os.path.exists(state) else {},
    }
lock = ROOT + "/lock.json"
if os.path.exists(lock):
    seen["lock"] = json.load(open(lock))
print(json.dumps(seen))
"""


def two_instances(lab: Lab, machines: Sequence[Machine], folder: Path, neighbours: Sequence[str]) -> Path:
    """The lab's inventory with a second instance on some hosts; groups ``main`` and ``neighbours`` name them."""
    names, path = lab.names, folder / "fleet.toml"
    pairs = [(machine.name, machine.address) for machine in machines]
    text = inventory_text(pairs, path=str(path), identity=str(names.identity), known_hosts=str(names.known_hosts))
    mains = ", ".join(f'"{machine.name}:main"' for machine in machines)
    others = ", ".join(f'"{name}:other"' for name in neighbours)
    text = text.replace("[groups]\n", f"[groups]\nmain = [{mains}]\nneighbours = [{others}]\n")
    path.write_text(text + "".join(OTHER.format(name=name) for name in neighbours))
    return path


@dataclass(frozen=True)
class Disk:
    """A host's layout as its files say."""

    seen: dict[str, Any]

    @classmethod
    def of(cls, machine: Machine) -> Disk:
        return cls(json.loads(machine.inside("python3", "-c", LOOK).stdout))

    def instance(self, name: str) -> dict[str, Any]:
        found = self.seen["instances"].get(name)
        absent = {"unit": False, "unit_of": None, "real": False, "armed": False, "releases": {}, "state": {}}
        return found or {"current": None, **absent}

    def invariants(self) -> None:
        """``current`` is a complete, verified release or absent; the unit is some complete release's; the lock names
        its owner."""
        for name, there in self.seen["instances"].items():
            assert not there["real"], f"current of {name} is no link"
            assert there["current"] is None or there["releases"].get(there["current"]) == "", (name, there)
            assert not there["unit"] or there["unit_of"] is not None, f"the unit of {name} is no release's"
        lock = self.seen["lock"]
        assert lock is None or (lock["owner"] and lock["purpose"] and lock["expires"]), lock


def main_pid(machine: Machine, instance: str) -> int:
    unit = f"sglang-ddtree-{instance}.service"
    return int(machine.inside("systemctl", "show", unit, "-p", "MainPID", "--value").stdout.strip() or 0)


def running(machine: Machine, instance: str) -> str | None:
    """The release that the running server was started with."""
    pid = main_pid(machine, instance)
    if not pid:
        return None
    argv = machine.inside("cat", f"/proc/{pid}/cmdline", ok=(0, 1)).stdout.split("\0")
    # the process may have ended meanwhile, or not be the server yet
    return argv[argv.index("--weight-version") + 1] if "--weight-version" in argv else None


def until_said(client: subprocess.Popen[str], words: str) -> str:
    """What a command says up to the line with these words; an error if it ends without them."""
    assert client.stdout is not None
    said = ""
    for line in client.stdout:
        said += line
        if words in line:
            return said
    raise AssertionError(f"it never said {words!r}: {said}")


def result(cli: Cli, *words: str, expect: int | Sequence[int] = 0) -> dict[str, Any]:
    """The one JSON document of a command."""
    value: dict[str, Any] = json.loads(cli(*words, "--json", expect=expect).stdout)
    return value


def outcomes(cli: Cli, *words: str, expect: int | Sequence[int] = 0) -> dict[str, dict[str, Any]]:
    """The outcome of each target of a deploy or rollback."""
    found: Iterable[dict[str, Any]] = result(cli, *words, expect=expect)["outcomes"]
    return {outcome["target"]: outcome for outcome in found}
