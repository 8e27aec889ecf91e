"""Compile every kernel for a real GPU, without one: run as a script, prints one JSON object.

The wrappers are called with CPU tensors; each launch goes as far as Triton goes before it needs a GPU, with the bundled
ptxas for the architecture given as argument. So what is compiled is what a worker would launch, specialised on aligned
pointers, multiples of 16 and ones: what is known to be aligned may be loaded in wider pieces and ahead of its use, and
that takes registers and shared memory.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import triton
from sglang_ddtree.kernels import accept, buffers, build, gdn, mask, nested, sample, shadow, slots, topk
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

ARCH = int(sys.argv[1])
REPORT: list[dict[str, Any]] = []
_LAUNCH = JITFunction.run


class _NoGpu:
    """What a launch asks the driver of the GPU it is for."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", ARCH, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0


def _compile_instead(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
    del warmup
    binary = _LAUNCH(self, *args, grid=grid, warmup=True, **kwargs)
    REPORT.append({"kernel": self.__name__, "arch": ARCH, "shared": binary.metadata.shared, "grid": list(grid)}
                  | _resources(binary.asm["cubin"]))  # fmt: skip


def _resources(cubin: bytes) -> dict[str, int]:
    """Registers and stack of the kernel, as cuobjdump reads them."""
    import re
    import subprocess
    import tempfile

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = triton.knobs.nvidia.cuobjdump.path
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found, text
    return {"registers": int(found[1]), "stack": int(found[2])}


def round_kernels() -> None:
    """The launches of one round, at the sizes of the 27B shapes."""
    bs, depths, k, vocab = 2, 15, 8, 248320
    for rows in (2, 17, 65):
        tree = buffers.TreeBuffers.allocate(bs, rows, "cpu")
        out = buffers.AcceptBuffers.allocate(bs, depths + 1, "cpu")
        i64 = torch.zeros(bs, dtype=torch.int64)
        block = torch.zeros(bs, depths + 1, dtype=torch.int64)
        slot = torch.zeros(bs, max(rows, depths + 1), dtype=torch.int64)
        table = torch.zeros(bs, 128, dtype=torch.int32)
        slots.prepare_round(i64, i64, i64, table, 5, block, block.clone(), slot)
        logp = torch.zeros(bs, depths, k)
        build.build_tree(logp, torch.zeros(bs, depths, k, dtype=torch.int64), i64, i64, tree)
        mask.write_tree_mask(tree, i64, torch.zeros(bs * rows * (rows + 1), dtype=torch.uint8))
        target = torch.zeros(bs, rows, dtype=torch.int64)
        accept.accept_tree(target, tree, slot, i64, out, buffers.TreeCounters.allocate(depths + 1, "cpu"))
        ring = shadow.ShadowRing.allocate(4, depths, rows, "cpu")
        shadow.shadow_step(ring, tree, i64, i64, i64, out.out_tokens, out.commit_lens)
        bounds, totals = torch.zeros(5, 2, dtype=torch.int32), torch.zeros(3, 5, dtype=torch.int64)
        nested.count_nested(out.accept_index, rows, 2, range(3), bounds, totals)
    rows = bs * depths
    logits = torch.zeros(rows, vocab, dtype=torch.bfloat16)
    ids, values, lse = torch.zeros(rows, k, dtype=torch.int64), torch.zeros(rows, k), torch.zeros(rows)
    topk.draft_topk(logits, ids, values, lse)
    topk.merge_topk(ids[None].repeat(2, 1, 1), values[None].repeat(2, 1, 1), lse[None].repeat(2, 1), ids, values)
    topk.draft_topk(logits[:, :100], ids, values, lse)
    one, i32 = torch.ones(bs), torch.ones(bs, dtype=torch.int32)
    params = sample.SamplingParams(one, i32, one, one, torch.zeros(bs, dtype=torch.int64), max_top_k=20)
    drawn = torch.zeros(rows, dtype=torch.int64)
    sample.sample_targets(logits.float(), drawn.clone(), params, drawn)
    free = sample.SamplingParams(one, i32, one, one, torch.zeros(bs, dtype=torch.int64), filtered=False)
    sample.sample_targets(logits.float(), drawn.clone(), free, drawn)


def hybrid_kernels() -> None:
    """The launches of a hybrid layer and of the commit: at the sizes of the 27B shapes; in float32, as the parity suite
    has them; at the sizes that a sanitizer gets through.
    """
    half, full = torch.bfloat16, torch.float32
    wide, suite, small = (16, 48, 128, 10240), (4, 8, 128, 2048), (1, 2, 16, 40)
    cases = [(wide, rows, half, full) for rows in (1, 17, 65)] + [(wide, 33, half, half)]
    cases += [(suite, rows, full, full) for rows in (17, 65)] + [(small, 17, half, half)]
    for sizes, rows, act, state in cases:
        layer(*sizes, rows, act, state)
    for rows in (17, 33, 65):
        layer(*wide, rows, half, full, bs=8)
        layer(*suite, rows, full, full, bs=16)


def layer(
    heads: int,
    value_heads: int,
    dim: int,
    channels: int,
    rows: int,
    act: torch.dtype,
    state: torch.dtype,
    bs: int = 2,
) -> None:
    tree = buffers.TreeBuffers.allocate(bs, rows, "cpu")
    records = gdn.GdnRecords.allocate(1, bs, rows, heads, value_heads, dim, dim, channels, act, "cpu")
    x, weight = torch.zeros(bs * rows, channels, dtype=act), torch.zeros(channels, 4, dtype=act)
    conv_states = torch.zeros(1, 3, channels, 3, dtype=act)
    states = torch.zeros(1, 3, value_heads, dim, dim, dtype=state)
    index, i64 = torch.zeros(bs, dtype=torch.int32), torch.zeros(bs, dtype=torch.int64)
    gdn.conv_tree(x, conv_states[0], weight, None, index, tree.conv_ancestors, records.x[0])
    mixed = torch.zeros(bs * rows, (2 * heads + value_heads) * dim, dtype=act)
    q, k, v = mixed.split([heads * dim, heads * dim, value_heads * dim], dim=1)
    q, k, v = (t.unflatten(1, (n, dim))[None] for t, n in ((q, heads), (k, heads), (v, value_heads)))
    gate, one = torch.zeros(bs * rows, value_heads, dtype=act), torch.zeros(value_heads)
    gdn.gdn_tree(q, k, v, gate, gate, a_log=one, dt_bias=one, ssm_states=states[0], state_indices=index,
                 ancestors=tree.ancestors, record=records.layer(0))  # fmt: skip
    for tracked in (None, i64):
        gdn.commit_tree(
            records, tree.ancestors, tree.conv_ancestors, index, states, conv_states, index, tracked, tracked
        )


def main() -> None:
    driver.set_active(_NoGpu())
    JITFunction.run = _compile_instead  # type: ignore[method-assign]
    round_kernels()
    hybrid_kernels()
    print(json.dumps(REPORT))


if __name__ == "__main__":
    main()
