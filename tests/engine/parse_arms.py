"""Resolve command lines with SGLang's own ServerArgs as on a GPU host: `parse_arms.py SGLANG < JSON`, JSON out.

In: {name: [argv, whether to list text-only Qwen3.5 among the architectures whose states are cached, and perhaps the
arm's environment]}. Out: by name the settings that SGLang arrived at, or {"error": why}. A process of its own,
because it pretends to have two H200s.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

SHOWN = ("speculative_num_draft_tokens", "disable_overlap_schedule", "disable_radix_cache", "mem_fraction_static",
         "uses_mamba_radix_cache", "mamba_radix_cache_strategy", "context_length", "max_running_requests", "tp_size",
         "disable_custom_all_reduce", "flashinfer_allreduce_fusion_backend", "enable_nccl_nvls", "enable_symm_mem",
         "enable_torch_symm_mem", "enable_mscclpp")  # fmt: skip


def resolved(asked: Mapping[str, Any], sglang: Path) -> dict[str, Any]:
    """What this file says of the questions, run as a process on SGLang's sources."""
    ran = subprocess.run([sys.executable, __file__, str(sglang)], input=json.dumps(asked), capture_output=True,
                         text=True, cwd=Path(__file__).parents[2], timeout=300,
                         env={**os.environ, "TRITON_INTERPRET": "1"}, check=False)  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-3000:]
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return found


def pretend_an_h200() -> None:
    import torch
    from sglang.srt import server_args

    card = SimpleNamespace(total_memory=140 << 30, major=9, minor=0, multi_processor_count=132, name="NVIDIA H200")
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: 2
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    torch.cuda.get_device_name = lambda *_: card.name
    torch.cuda.get_device_properties = lambda *_: card  # type: ignore[assignment,return-value]
    server_args.is_cuda = lambda: True


def settle(argv: list[str], cached_states: bool, environ: Mapping[str, str]) -> dict[str, Any]:
    from sglang.srt.arg_groups.overrides import resolved_view
    from sglang.srt.server_args import prepare_server_args
    from sglang_ddtree import config
    from sglang_ddtree.parity.arm import cache_states_of_text_models

    os.environ.clear()  # a server leaves its settings there for the processes it starts
    os.environ.update(environ)
    if cached_states:
        cache_states_of_text_models()
    try:
        args = prepare_server_args(argv)
        view, own = resolved_view(args), config.of(args)
    except (Exception, SystemExit) as error:  # noqa: BLE001  whatever stops a server is the finding
        return {"error": f"{type(error).__name__}: {error}"}
    kept = own.states if own is not None and own.tree else None
    return {name: getattr(view, name) for name in SHOWN} | {"states": kept}


def main() -> None:
    import sglang_setup

    sglang_setup.load(Path(sys.argv[1]))
    pretend_an_h200()
    ours, found = dict(os.environ), {}
    for name, (argv, cached, *environ) in json.load(sys.stdin).items():
        found[name] = settle(argv, cached, ours | dict(*environ))
    print(json.dumps(found))


if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2] / "patches/sglang-ddtree/src")]
    main()
