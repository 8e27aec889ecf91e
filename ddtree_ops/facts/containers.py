"""Containers that hold GPUs, and whether a daemon-reload could take the GPUs from them. Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from ddtree_ops.facts.answer import Answer, listing, mapping


@dataclass(frozen=True)
class GpuContainers:
    """The running containers with GPUs, and docker's cgroup driver (``systemd`` or ``cgroupfs``)."""

    names: tuple[str, ...] = ()
    driver: str = ""

    @property
    def at_risk(self) -> bool:
        """systemd rebuilds the device rules of the containers it manages when it reloads."""
        return bool(self.names) and self.driver == "systemd"


def parse_containers(raw: Any) -> GpuContainers:
    """The helper's ``containers`` answer; empty without docker."""
    found = mapping(raw)
    names = [name for line in Answer.of(found.get("inspect")).out.splitlines() if (name := _gpu_container(line))]
    return GpuContainers(tuple(names), Answer.of(found.get("driver")).out.strip())


def _gpu_container(line: str) -> str | None:
    """The name of a container that asked for GPUs, of a line with id, name, device requests and runtime as JSON."""
    values: list[Any] = []
    decoder, at = json.JSONDecoder(), 0
    try:
        while at < len(line):
            value, at = decoder.raw_decode(line, at)
            values.append(value)
            at += 1
    except ValueError:
        return None
    if len(values) != 4:
        return None
    identity, name, requests, runtime = values
    wanted = [r for r in listing(requests) if isinstance(r, dict) and "gpu" in json.dumps(r.get("Capabilities"))]
    return str(name or identity).lstrip("/") if wanted or runtime == "nvidia" else None
