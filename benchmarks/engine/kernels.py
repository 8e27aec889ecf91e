"""Time each kernel of a tree round against its bound and a torch baseline, at the 27B shapes.

    PYTHONPATH=patches/sglang-ddtree/src python benchmarks/engine/kernels.py --out results.json

Needs one CUDA GPU, torch, triton and numpy. Parity comes first: while one check of
``sglang_ddtree.kernels.checks`` is red, nothing is timed. Times are medians over replays of a CUDA graph
that holds many launches, so neither the host nor the launch latency of a lone kernel is in them. Layer
kernels run over the states of 48 layers in turn, so that no state is found in the cache.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
from sglang_ddtree.kernels import gdn
from sglang_ddtree.kernels.accept import accept_tree
from sglang_ddtree.kernels.buffers import AcceptBuffers, TreeBuffers, TreeCounters
from sglang_ddtree.kernels.build import build_tree
from sglang_ddtree.kernels.checks import Sizes, buffers_of, run_checks
from sglang_ddtree.kernels.mask import write_tree_mask
from sglang_ddtree.kernels.nested import count_nested
from sglang_ddtree.kernels.slots import prepare_round
from sglang_ddtree.kernels.topk import TopKWorkspace, draft_topk
from sglang_ddtree.reference import examples
from sglang_ddtree.reference import tree as ref_tree

DEPTHS, K, VOCAB, HIDDEN, LAYERS = 15, 8, 248320, 5120, 48
HEADS, VALUE_HEADS, DIM, CHANNELS = 16, 48, 128, 10240
CONTEXT = 2048
DEVICE = "cuda"
Launch = Callable[[], Any]


def microseconds(launches: list[Launch], repeats: int = 20, passes: int | None = None) -> float:
    """Median time of one pass over the launches, in a graph of several passes."""
    passes = passes or max(1, 40 // len(launches))
    for launch in launches:
        launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(passes):
            for launch in launches:
                launch()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / passes)
    return statistics.median(times)


def bandwidth() -> float:
    """Bytes per microsecond that this GPU's memory gives: the most of a large elementwise pass, which reads and writes,
    and a large sum, which reads. A copy is not asked: in a graph it is the copy engine's, seen at two thirds of them.
    """
    source = torch.ones(1 << 29, dtype=torch.float32, device=DEVICE)
    target = torch.empty_like(source)
    both = 2 * source.nbytes / microseconds([lambda: torch.add(source, 1.0, out=target)], repeats=10, passes=4)
    read = source.nbytes / microseconds([lambda: source.sum()], repeats=10, passes=4)
    return max(both, read)


def row(
    name: str, us: float, bound_us: float, bound: str, torch_us: float | None = None, **extra: Any
) -> dict[str, Any]:
    """One line of the report; what it is bound by is said beside the figure."""
    line = {"kernel": name, **extra, "us": round(us, 2), "bound_us": round(bound_us, 2), "bound": bound}
    if torch_us is not None:
        line["torch_us"] = round(torch_us, 2)
    print(json.dumps(line), flush=True)
    return line


def time_head(bs: int, speed: float) -> list[dict[str, Any]]:
    """One GEMM for all depths, then top-k and log-sum-exp."""
    rows = bs * DEPTHS
    hidden = torch.randn(rows, HIDDEN, device=DEVICE, dtype=torch.bfloat16)
    weight = torch.randn(VOCAB, HIDDEN, device=DEVICE, dtype=torch.bfloat16)
    logits = hidden @ weight.t()
    ids = torch.empty(rows, K, dtype=torch.int64, device=DEVICE)
    values, lse = torch.empty(rows, K, device=DEVICE), torch.empty(rows, device=DEVICE)
    workspace = TopKWorkspace.allocate(rows, VOCAB, K, DEVICE)

    def topk() -> None:
        draft_topk(logits, ids, values, lse, workspace=workspace)

    def torch_topk() -> None:
        logits.float().topk(K)
        torch.logsumexp(logits.float(), dim=-1)

    def gemm() -> None:
        torch.mm(hidden, weight.t(), out=logits)

    gemm_us, topk_us = microseconds([gemm]), microseconds([topk])
    both_us = microseconds([lambda: (gemm(), topk())])
    read_us = logits.numel() * 2 / speed
    return [
        row("head gemm", gemm_us, weight.numel() * 2 / speed, "read of the head's weights", batch=bs),
        row("topk + logsumexp", topk_us, read_us, "read of the logits", microseconds([torch_topk]), batch=bs),
        row("head gemm + topk", both_us, gemm_us, "the gemm alone", batch=bs, over_bound=round(both_us / gemm_us, 3)),
    ]


def heap_on_the_host(logp: torch.Tensor, ids: torch.Tensor, rows: int) -> float:
    """Microseconds of the usual way: copy to the host, build with a heap (links and mask included)."""
    start = time.perf_counter()
    host_logp, host_ids = logp.cpu().numpy(), ids.cpu().numpy()
    for r in range(len(host_logp)):
        tree = ref_tree.build_tree(host_logp[r], host_ids[r], 0, rows)
        ref_tree.ancestors(tree.parent, tree.num_nodes)
    return (time.perf_counter() - start) * 1e6


def time_round(bs: int, rows: int, floor: float) -> list[dict[str, Any]]:
    """Slots, build, mask and accept: bound by launch and latency, not by bytes."""
    rng = np.random.default_rng(rows)
    logp = torch.from_numpy(np.stack([examples.random_logp(rng, DEPTHS, K, 2.0) for _ in range(bs)])).to(DEVICE)
    ids = torch.from_numpy(np.stack([examples.random_ids(rng, DEPTHS, K, 9999) for _ in range(bs)])).to(DEVICE)
    lens = torch.full((bs,), CONTEXT, dtype=torch.int64, device=DEVICE)
    tree = TreeBuffers.allocate(bs, rows, DEVICE)
    mask = torch.zeros(bs * rows * (CONTEXT + rows), dtype=torch.uint8, device=DEVICE)
    block, positions = (torch.zeros(bs, DEPTHS + 1, dtype=torch.int64, device=DEVICE) for _ in range(2))
    slots = torch.zeros(bs, max(rows, DEPTHS + 1), dtype=torch.int64, device=DEVICE)
    table = torch.zeros(bs, 2 * CONTEXT, dtype=torch.int32, device=DEVICE)
    pool = torch.arange(bs, device=DEVICE)
    out = AcceptBuffers.allocate(bs, DEPTHS + 1, DEVICE)
    counters = TreeCounters.allocate(DEPTHS + 1, DEVICE)
    build_tree(logp, ids, lens, lens, tree)
    # Targets that follow the spine for half its depth.
    target = torch.where(tree.depth < DEPTHS // 2, tree.tokens.gather(1, tree.next_token.clamp(min=0)), -1)

    def prepare() -> None:
        prepare_round(lens, lens, pool, table, 5, block, positions, slots)

    def build() -> None:
        build_tree(logp, ids, lens, lens, tree)

    def write_mask() -> None:
        write_tree_mask(tree, lens, mask)

    def accept() -> None:
        accept_tree(target, tree, slots, lens, out, counters)

    bounds = torch.tensor([[0, 8], [8, 16], [16, rows - 1], [0, DEPTHS]], dtype=torch.int32, device=DEVICE)
    totals = torch.zeros((3, 4), dtype=torch.int64, device=DEVICE)

    def count() -> None:
        count_nested(out.accept_index, rows, 2, range(3), bounds, totals)

    def torch_mask() -> None:
        shape = (bs, rows, rows)
        words = tree.ancestors[:, :, torch.arange(rows, device=DEVICE) // 64]
        seen = (words >> (torch.arange(rows, device=DEVICE) % 64)) & 1
        mask.view(bs, rows, CONTEXT + rows)[:, :, CONTEXT:].copy_(seen.view(shape))

    size = {"batch": bs, "rows": rows}
    note = "an empty kernel"
    host_us = statistics.median([heap_on_the_host(logp, ids, rows) for _ in range(3)])
    lines = [
        row("prepare_round", microseconds([prepare]), floor, note, **size),
        row("build_tree", microseconds([build]), floor, note, host_heap_us=round(host_us, 1), **size),
        row("write_tree_mask", microseconds([write_mask]), floor, note, microseconds([torch_mask]), **size),
        row("accept_tree", microseconds([accept]), floor, note, **size),
        row("count_nested", microseconds([count]), floor, note, **size),
    ]
    total = microseconds([build, write_mask, accept])
    return [*lines, row("build + mask + accept", total, 3 * floor, "three empty kernels", **size)]


def time_hybrid(bs: int, rows: int, speed: float, state_dtype: torch.dtype) -> list[dict[str, Any]]:
    """Convolution and recurrence of 48 layers, and the commit of all of them."""
    rng = np.random.default_rng(rows)
    trees = [
        ref_tree.build_tree(examples.random_logp(rng, DEPTHS, K), examples.random_ids(rng, DEPTHS, K), 0, rows)
        for _ in range(bs)
    ]
    tree = buffers_of(trees, [CONTEXT] * bs, DEVICE)
    act = torch.bfloat16
    records = gdn.GdnRecords.allocate(LAYERS, bs, rows, HEADS, VALUE_HEADS, DIM, DIM, CHANNELS, act, DEVICE)
    states = torch.randn(LAYERS, bs + 1, VALUE_HEADS, DIM, DIM, device=DEVICE).to(state_dtype)
    conv_states = torch.randn(LAYERS, bs + 1, CHANNELS, 3, device=DEVICE).to(act)
    x = torch.randn(bs * rows, CHANNELS, device=DEVICE).to(act)
    weight = torch.randn(CHANNELS, 4, device=DEVICE).to(act)
    gates = torch.randn(2, bs * rows, VALUE_HEADS, device=DEVICE).to(act)
    head = torch.randn(VALUE_HEADS, device=DEVICE)
    slots = torch.arange(1, bs + 1, dtype=torch.int32, device=DEVICE)
    last = tree.num_nodes - 1
    q, k, v = x.split([HEADS * DIM, HEADS * DIM, VALUE_HEADS * DIM], dim=1)
    q, k, v = (t.unflatten(1, (-1, DIM))[None] for t in (q, k, v))

    def conv(layer: int) -> Launch:
        return lambda: gdn.conv_tree(x, conv_states[layer], weight, None, slots, tree.conv_ancestors, records.x[layer])

    def recurrence(layer: int) -> Launch:
        return lambda: gdn.gdn_tree(
            q, k, v, gates[0], gates[1], a_log=head, dt_bias=head, ssm_states=states[layer], state_indices=slots,
            ancestors=tree.ancestors, record=records.layer(layer),
        )  # fmt: skip

    def commit() -> None:
        gdn.commit_tree(records, tree.ancestors, tree.conv_ancestors, last, states, conv_states, slots)

    size = {"batch": bs, "rows": rows, "state": str(state_dtype).removeprefix("torch."), "layers": LAYERS}
    state_bytes = states[:, 1:].numel() * states.element_size()
    path = int(tree.depth.gather(1, last[:, None].long()).sum()) + bs
    conv_bytes = 3 * LAYERS * bs * rows * CHANNELS * 2
    gdn_bytes = state_bytes + conv_bytes + records.delta.numel() * 4
    replay_bytes = 2 * state_bytes + path * LAYERS * gdn.GdnRecords.bytes_per_row(HEADS, VALUE_HEADS, DIM, DIM, 0)
    accepted = torch.randn_like(states[:, 1:])

    def torch_commit() -> None:
        states[:, 1:].copy_(accepted)

    gdn_torch = LAYERS * microseconds([lambda: torch_recurrence(trees, q, k, v, gates, head, states[0])], passes=1)
    conv_torch = LAYERS * microseconds([lambda: torch_conv(tree, x, conv_states[0], weight)])
    launches = [(conv(i), recurrence(i)) for i in range(LAYERS)]
    return [
        row("conv_tree", microseconds([c for c, _ in launches]), conv_bytes / speed,
            "x read, out and record written", conv_torch, **size),
        row("gdn_tree", microseconds([g for _, g in launches]), gdn_bytes / speed,
            "states read once, rows in and out", gdn_torch, **size),
        row("commit_tree", microseconds([commit]), replay_bytes / speed,
            "states read and written once, records of the path", microseconds([torch_commit]), **size),
    ]  # fmt: skip


def torch_conv(tree: TreeBuffers, x: torch.Tensor, window: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The convolution as a gather of the window and the rows, then a product."""
    bs, rows = tree.tokens.shape
    history = torch.cat([window[1:].transpose(1, 2), x.view(bs, rows, -1)], dim=1)
    own = torch.arange(rows, device=DEVICE).expand(bs, rows)[..., None]
    at = torch.cat([tree.conv_ancestors.flip(-1), own], dim=-1).long() + 3
    taps = history[torch.arange(bs, device=DEVICE)[:, None, None], at]
    return torch.nn.functional.silu((taps.float() * weight.t().float()).sum(2)).to(x.dtype)


def torch_recurrence(
    trees: list[ref_tree.Tree],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gates: torch.Tensor,
    head: torch.Tensor,
    states: torch.Tensor,
) -> torch.Tensor:
    """The recurrence row by row with a state per row, as snapshots do it; all requests share a topology."""
    bs, rows = len(trees), len(trees[0].tokens)
    unit = torch.nn.functional.normalize
    q, k = (unit(t[0].float(), dim=-1).repeat_interleave(3, 1).view(bs, rows, VALUE_HEADS, DIM) for t in (q, k))
    a, b = gates.float().view(2, bs, rows, VALUE_HEADS)
    decay = torch.exp(-torch.exp(head) * torch.nn.functional.softplus(a + head))
    beta, value = torch.sigmoid(b), v[0].float().view(bs, rows, VALUE_HEADS, DIM)
    after: list[torch.Tensor] = []
    out = []
    for n in range(rows):
        before = (states[1:].float() if n == 0 else after[int(trees[0].parent[n])]) * decay[:, n, :, None, None]
        delta = beta[:, n, :, None] * (value[:, n] - (before @ k[:, n, :, :, None])[..., 0])
        after.append(before + delta[..., None] * k[:, n, :, None, :])
        out.append((after[n] @ q[:, n, :, :, None])[..., 0])
    return torch.stack(out, 1)


@triton.jit
def _empty_kernel(x_ptr):
    pass


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, help="write the report here as JSON")
    parser.add_argument("--commit", default="", help="commit of the sources, where git is not at hand")
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 8])
    parser.add_argument("--rows", type=int, nargs="*", default=[17, 33, 65])
    parser.add_argument("--skip", nargs="*", default=[], choices=["head", "round", "hybrid"])
    args = parser.parse_args()
    parity = run_checks(Sizes(DEVICE))
    print(json.dumps({"parity": parity}), flush=True)
    if any(isinstance(result, str) for result in parity.values()):
        print("parity is red: nothing is timed", file=sys.stderr)
        return 1
    x = torch.zeros(1, device=DEVICE)
    floor, speed = microseconds([lambda: _empty_kernel[(1,)](x)]), bandwidth()
    lines = [line for bs in args.batch if "head" not in args.skip for line in time_head(bs, speed)]
    for bs in args.batch:
        for rows in args.rows:
            lines += time_round(bs, rows, floor) if "round" not in args.skip else []
            kinds = (torch.float32, torch.bfloat16) if "hybrid" not in args.skip else ()
            for kind in kinds:
                lines += time_hybrid(bs, rows, speed, kind)
    report = {"provenance": provenance(args.commit, speed, floor), "parity": parity, "kernels": lines}
    if args.out:
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    return 0


def provenance(commit: str, speed: float, floor: float) -> dict[str, Any]:
    """Where and with what the figures were taken."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,clocks.max.sm,power.limit", "--format=csv,noheader"]
    smi = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip().splitlines()
    git = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    return {
        "gpu": smi[0] if smi else torch.cuda.get_device_name(),
        "capability": list(torch.cuda.get_device_capability()),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "commit": commit or git,
        "command": " ".join(sys.argv),
        "taken": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "memory_gb_s": round(speed / 1000, 1),
        "empty_kernel_us": round(floor, 2),
    }


if __name__ == "__main__":
    sys.exit(main())
