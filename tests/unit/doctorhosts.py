"""Hosts for the doctor's tests: the helper's raw answers, in the formats that systemd, nvidia-smi and docker use."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from ddtree_ops.model import Address, HostSpec, Mode, Settings
from ddtree_ops.proofs import engine_rules

HERE = Path(__file__).parent / "fixtures"
VENV = "/opt/sglang/venv"
MODEL = "/models/target"
DRAFTER = "/models/drafter"
CACHE = "/var/cache/ddtree"


def settings(**change: Any) -> Settings:
    given: dict[str, Any] = {
        "instance": "tree", "mode": Mode.TREE, "gpus": (0,), "port": 30001, "model": MODEL, "drafter": DRAFTER,
        "venv": VENV, "budget": 16, "max_running_requests": 4, "extra_args": ("--disable-radix-cache",),
    }  # fmt: skip
    return Settings(**(given | change))


def host(**change: Any) -> HostSpec:
    return HostSpec(**({"name": "ct200", "address": Address(host="ct200"), "gpus": 8} | change))


def answer(out: str = "", rc: int = 0, err: str = "") -> dict[str, Any]:
    return {"argv": [], "rc": rc, "out": out, "err": err}


def smi(name: str) -> str:
    return (HERE / "nvidia-smi" / name).read_text()


def config(name: str) -> str:
    return (HERE / "configs" / f"{name}.json").read_text()


def gpus(csv: str, *, rc: int = 0, err: str = "", on_bus: int | None = None, **more: Any) -> dict[str, Any]:
    count = sum(1 for line in csv.splitlines() if line[:1].isdigit())
    return {
        "query": answer(csv, rc, err),
        "on_bus": count if on_bus is None else on_bus,
        "module": True,
        "apps": answer(),
        "owners": {},
    } | more


def model_folder(name: str, gigabytes: float) -> dict[str, Any]:
    return {
        "exists": True,
        "readable": True,
        "config": config(name),
        "index": ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"],
        "files": {"model-00001-of-00002.safetensors": 1, "model-00002-of-00002.safetensors": 1},
        "weights": {
            "model.layers": {"BF16": int(gigabytes * 1e9)},
            "lm_head.weight": {"BF16": 1 << 20},
            "mtp.layers": {"BF16": int(3e9)},
        },
    }


def proof(**changes: Any) -> dict[str, Any]:
    """What a self-test of the engine as it is here leaves on this host, by itself with states kept as records."""
    kept, tp = changes.get("states", "records"), changes.get("tp", 1)
    record = {
        "schema": 1,
        "engine": engine_rules().engine_digest(states=kept, tp=tp),
        "states": kept,
        "architecture": "Qwen3_5ForCausalLM",
        "backend": "triton",
        "compute_capability": "12.0",
        "driver": "580.95.05",
        "max_budget": 64,
        "passed": True,
    }
    return record | changes


def healthy() -> dict[str, Any]:
    """CT200 as it should be: eight RTX PRO 6000, Debian 12, everything in place."""
    return copy.deepcopy(
        {
            "at": 1_800_000_000.0,
            "host": {
                "systemd": answer("systemd 252 (252.39-1~deb12u2)\n+PAM +AUDIT\n"),
                "systemd_runs": True,
                "root_state": {"exists": True, "nearest": "/opt/ddtree", "writable": True, "read_only": False},
            },
            "disk": {"path": "/opt/ddtree", "free": 400 << 30, "total": 900 << 30, "inodes_free": 50_000_000},
            "clock": answer("Timezone=Etc/UTC\nNTP=yes\nNTPSynchronized=yes\n"),
            "kernel_log": answer("-- No entries --\n", 1),
            "gpus": gpus(smi("rtx-pro-6000-x8.csv")),
            "nvcc": answer("nvcc: NVIDIA (R) Cuda compiler driver\nCuda compilation tools, release 13.0, V13.0.88\n"),
            "tools": {"ninja": None, "nvcc": "/usr/local/cuda/bin/nvcc", "gcc": "/usr/bin/gcc", "g++": "/usr/bin/g++"},
            "venvs": {
                VENV: {
                    "exists": True,
                    "runs": True,
                    "cfg": "home = /usr/bin\nversion = 3.11.2\n",
                    "dists": {"sglang": ["0.5.17"], "torch": ["2.11.0"]},
                    "torch_version": "__version__ = '2.11.0+cu130'\ncuda: Optional[str] = '13.0'\n",
                    "ninja": True,
                }
            },
            "models": {MODEL: model_folder("shape-27b", 54), DRAFTER: model_folder("shape-27b-dflash", 3.46)},
            "caches": {CACHE: {"exists": True, "mount": "/", "type": "ext4"}},
            "listeners": [],
            "port_range": "32768\t60999\n",
            "reserved_ports": "\n",
            "containers": None,
            "memory_logs": {"sglang-ddtree-tree.service": None},
            "proofs": {"/opt/ddtree/proofs/rtx-pro-6000.json": proof()},
        }
    )
