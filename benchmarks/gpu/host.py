"""Where the figures were taken: `python -m benchmarks.gpu.host --out DIR` writes DIR/host.json, before anything else.

Wrong are a missing GPU, a missing package and a plugin that SGLang does not find; another version is told, not judged.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

LINKS = ("nvidia-smi", "topo", "-m")
SMI = ("nvidia-smi", "--query-gpu=name,driver_version,memory.total,clocks.max.sm,power.limit", "--format=csv,noheader")
PACKAGES = ("torch", "triton", "sglang", "transformers", "numpy")


def version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def smi(command: Sequence[str] = SMI) -> list[str]:
    """Its lines; none where it is missing, fails or hangs."""
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in ran.stdout.splitlines()]


def gpu_count(environ: Mapping[str, str], seen: Sequence[str]) -> int:
    """How many GPUs a stage may use, without an import of torch: those that nvidia-smi lists, as `seen`, or fewer where
    CUDA_VISIBLE_DEVICES names fewer.
    """
    named = environ.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return len(seen)
    chosen: list[str] = []
    for word in map(str.strip, named.split(",")):
        if not word or word.startswith("-"):
            break  # CUDA ignores what stands behind a device that is none
        chosen.append(word)
    return min(len(seen), len(chosen))


def torch_facts() -> dict[str, Any]:
    try:
        import torch
    except ImportError as error:
        return {"error": str(error)}
    if not torch.cuda.is_available():
        return {"cuda": torch.version.cuda, "gpu": None}
    return {
        "cuda": torch.version.cuda,
        "gpu": torch.cuda.get_device_name(),
        "capability": ".".join(map(str, torch.cuda.get_device_capability())),
        "gpus": torch.cuda.device_count(),
        "memory_gib": round(torch.cuda.get_device_properties(0).total_memory / 2**30, 1),
    }


def facts() -> dict[str, Any]:
    found = {name: version(name) for name in PACKAGES}
    torch, plugins = torch_facts(), importlib.metadata.entry_points(group="sglang.srt.plugins")
    wrong = [f"{name} is not installed" for name in ("torch", "triton", "sglang") if found[name] is None]
    if "error" not in torch and torch["gpu"] is None:
        wrong.append("torch sees no CUDA GPU")
    if not any(point.name == "ddtree" for point in plugins):
        wrong.append("SGLang would not find the plugin: the overlay is not on PYTHONPATH")
    return {"python": platform.python_version(), "machine": platform.machine(), "packages": found, "torch": torch,
            "smi": smi(), "links": smi(LINKS), "wrong": wrong}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    found = facts()
    (out / "host.json").write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))
    return int(bool(found["wrong"]))


if __name__ == "__main__":
    sys.exit(main())
