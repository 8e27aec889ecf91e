"""A host in a temporary folder: the real helper through ``remote/local.py``, with a stand-in for systemctl."""

from __future__ import annotations

import hashlib
import io
import json
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddtree_ops.agent import Agent
from ddtree_ops.model import Address, HostSpec
from ddtree_ops.remote.local import LocalRemote

FAKES = Path(__file__).parent / "fakes"


@dataclass
class HelperHost:
    """``agent`` talks to the helper, which changes ``root`` and ``units``; ``systemd`` is the stand-in's state."""

    agent: Agent
    root: Path
    units: Path
    systemd: Path

    def calls(self) -> list[list[str]]:
        log = self.systemd / "calls.jsonl"
        return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []

    def changes(self) -> list[list[str]]:
        """The systemctl calls that change something."""
        return [c[1:] for c in self.calls() if c[0] == "systemctl" and c[1] not in ("show", "--version")]

    def do(self, op: str, payload: bytes | None = None, **args: Any) -> dict[str, Any]:
        return self.agent.call(op, args, payload, deadline_s=120)

    def state(self, instance: str) -> dict[str, Any]:
        return dict(json.loads((self.root / "instances" / instance / "state.json").read_text()))

    def current(self, instance: str) -> str | None:
        link = self.root / "instances" / instance / "current"
        return link.readlink().name if link.is_symlink() else None


def helper_host(folder: Path) -> HelperHost:
    systemd, units, root = folder / "systemd", folder / "units", folder / "root"
    systemd.mkdir(parents=True)
    spec = HostSpec(name="here", address=Address(host="localhost"), transport="local", root=str(root), sudo=False)
    fake = [sys.executable, str(FAKES / "systemctl.py"), str(systemd)]
    bins = {name: [*fake, name] for name in ("systemctl", "journalctl", "systemd-run")}
    bins["nvidia-smi"] = ["/nonexistent/smi"]
    agent = Agent(LocalRemote("here"), spec, bins=bins, unit_dir=str(units))
    return HelperHost(agent, root, units, systemd)


def release_tar(
    unit: str, *, engine: str | None = None, spoil: bool = False, settings: bytes = b"{}\n"
) -> tuple[str, bytes]:
    """A release's digest and tar. ``spoil`` changes a byte after the manifest was made."""
    parts = {"unit": unit.encode(), "settings.json": settings}
    manifest = {"files": {n: hashlib.sha256(d).hexdigest() for n, d in parts.items()}, "engine": engine}
    data = json.dumps(manifest, sort_keys=True).encode()
    if spoil:
        parts["unit"] += b"#"
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for name, content in {"manifest.json": data, **parts}.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return hashlib.sha256(data).hexdigest(), packed.getvalue()


def deployed(host: HelperHost, unit: str) -> str:
    """A release with this unit, staged, current and started; its digest."""
    digest, tar = release_tar(unit)
    host.do("stage_release", tar, instance="qwen", release=digest)
    host.do("switch", instance="qwen", release=digest)
    host.do("write_unit", instance="qwen")
    host.do("systemctl", verb="restart", instance="qwen")
    return digest
