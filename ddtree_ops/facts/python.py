"""A virtual environment by its files. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ddtree_ops.facts.answer import listing, mapping
from ddtree_ops.facts.cuda import parse_torch_cuda


@dataclass(frozen=True)
class VenvFacts:
    """What is in a venv; ``dists`` are the distributions that matter, by the version their metadata names."""

    exists: bool = False
    runs: bool = False
    python: str | None = None
    dists: Mapping[str, str] = field(default_factory=dict)
    torch: str | None = None
    cuda: str | None = None
    ninja: bool = False

    @property
    def sglang(self) -> str | None:
        return self.dists.get("sglang")


def parse_venv(raw: Any) -> VenvFacts:
    """The helper's answer about one venv."""
    found = mapping(raw)
    torch, cuda = parse_torch_cuda(str(found.get("torch_version") or ""))
    version = re.search(r"^version(?:_info)? *= *(\d+\.\d+(?:\.\d+)?)", str(found.get("cfg") or ""), re.M)
    dists = {str(name): str(v[0]) for name, those in mapping(found.get("dists")).items() if (v := listing(those))}
    return VenvFacts(
        exists=bool(found.get("exists")),
        runs=bool(found.get("runs")),
        python=version[1] if version else None,
        dists=dists,
        torch=torch or dists.get("torch"),
        cuda=cuda,
        ninja=bool(found.get("ninja")),
    )
