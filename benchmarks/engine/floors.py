"""The floor of each stage of a round, by arithmetic, beside what a profile of the same shapes showed.

    PYTHONPATH=.:patches/sglang-ddtree/src python -m benchmarks.engine.floors

Prints the tables of docs/engine-performance.md. A floor is the time that the bytes of a stage need at the
memory's nominal speed: nothing that reads them once can be faster. Needs neither a GPU nor torch.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sglang_ddtree.parity import models

from benchmarks.gpu.tables import rows_of
from ddtree_ops.shapes import Recurrence, parse_model

H200_BYTES_PER_US = 4.8e6  # NVIDIA's data sheet: 4.8 TB/s
RESULTS = Path(__file__).parents[1] / "results" / "gpu.json"
BF16, FP32 = 2, 4
# A fragment of a kernel's name -> the stage it works for. Matrix products are whatever cuBLAS calls nvjet. The profile
# has the requests' prefill in it, whose recurrence is in chunks.
PREFILL = "prefill"
STAGES = (
    (PREFILL, ("chunk_", "recompute_w_u", "_causal_conv1d_fwd", "gdn_prefill")),
    ("recurrence", ("delta_rule", "gdn_tables", "gdn_tree")),
    ("convolution", ("causal_conv1d", "conv_tree")),
    ("state commit", ("mamba_state_scatter", "conv_window_scatter", "commit_")),
    ("attention", ("_fwd_kernel", "_fwd_grouped_kernel")),
    ("tree and head", ("_topk_chunks", "_topk_merge", "_build_tree", "_accept", "_mask", "_prepare")),
    ("matrix products", ("nvjet", "splitKreduce")),
)


@dataclass(frozen=True)
class Shape:
    """Sizes of a target and its drafter, read from their configurations; one GPU, bfloat16 weights."""

    target: dict[str, Any]
    drafter: dict[str, Any]

    @property
    def recurrent_layers(self) -> int:
        return int(self.target["layer_types"].count("linear_attention"))

    @property
    def recurrent_layer(self) -> Recurrence:
        """One Gated DeltaNet layer, by the sizes the memory planner uses."""
        recurrence = parse_model(json.dumps(self.target), "the target").recurrence
        assert recurrence is not None
        return replace(recurrence, layers=1)

    @property
    def channels(self) -> int:
        """C, of the convolution: queries, keys and values of the recurrence."""
        return self.recurrent_layer.conv_channels()

    @property
    def state_bytes(self) -> int:
        """One layer's recurrent state of one request, float32."""
        return self.recurrent_layer.state_bytes(FP32)

    @property
    def record_bytes(self) -> int:
        """What a row leaves in a layer without snapshots."""
        return self.recurrent_layer.record_bytes(BF16)

    @property
    def head_bytes(self) -> int:
        return int(BF16 * self.target["vocab_size"] * self.target["hidden_size"])

    def layer_bytes(self, kind: str) -> int:
        """Weights of one target layer."""
        t = self.target
        hidden, values = t["hidden_size"], t["linear_num_value_heads"] * t["linear_value_head_dim"]
        if kind == "linear_attention":
            mixer = hidden * (self.channels + values + 2 * t["linear_num_value_heads"]) + values * hidden
        else:
            query = t["num_attention_heads"] * t["head_dim"]
            mixer = hidden * (2 * query + 2 * t["num_key_value_heads"] * t["head_dim"]) + query * hidden
        return int(BF16 * (mixer + 3 * hidden * t["intermediate_size"]))

    @property
    def target_bytes(self) -> int:
        """Weights of all layers, without embedding and head."""
        return sum(self.layer_bytes(kind) for kind in self.target["layer_types"])

    @property
    def drafter_bytes(self) -> int:
        """Weights of the drafter's layers and of the product that takes in the target's features."""
        d = self.drafter
        hidden, query = d["hidden_size"], d["num_attention_heads"] * d["head_dim"]
        layer = hidden * (query + 2 * d["num_key_value_heads"] * d["head_dim"]) + query * hidden
        features = len(d["dflash_config"]["target_layer_ids"]) * hidden * hidden
        return int(BF16 * (d["num_hidden_layers"] * (layer + 3 * hidden * d["intermediate_size"]) + features))


def shape(name: str) -> Shape:
    return Shape(models.MODELS[name], models.MODELS[f"{name}-drafter"])


def stage_bytes(s: Shape, rows: int, path: int) -> dict[str, int]:
    """Bytes that each stage of a round must move for one request of ``rows`` verify rows, ``path`` of them accepted.

    Snapshots: the state is read once and written once a row. Records: read once, a record a row, and at the commit
    the states are read and written once. Keys and values of the context are left out: they grow with its length.
    """
    layers = s.recurrent_layers
    snapshots = layers * s.state_bytes * (1 + rows)
    records = layers * (s.state_bytes + rows * s.record_bytes)
    convolution = layers * rows * s.channels * BF16
    return {
        "drafter": s.drafter_bytes,
        "head, drafting": s.head_bytes,
        "target's layers": s.target_bytes,
        "head, verifying": s.head_bytes,
        "recurrence with snapshots": snapshots,
        "recurrence with records": records,
        "convolution": 2 * convolution,
        "commit with snapshots": layers * 2 * s.state_bytes,
        "commit with records": layers * (2 * s.state_bytes + path * s.record_bytes),
    }


def microseconds(moved: int) -> float:
    return moved / H200_BYTES_PER_US


def stage_of(kernel: str) -> str:
    """The stage a kernel's name belongs to; 'rest' are norms, copies, activations and other small ones."""
    return next((stage for stage, parts in STAGES if any(part in kernel for part in parts)), "rest")


def by_stage(kernels: list[dict[str, Any]]) -> dict[str, float]:
    """Microseconds of a round per stage, of a profile's kernel list."""
    total = dict.fromkeys([name for name, _ in STAGES] + ["rest"], 0.0)
    for kernel in kernels:
        total[stage_of(kernel["name"])] += kernel["us_per_round"]
    return total


def floor_table(name: str, rows: tuple[int, ...] = (16, 17, 33, 65), path: int = 5) -> str:
    found = [stage_bytes(shape(name), n, path) for n in rows]
    lines = [f"| µs at 4.8 TB/s | {' | '.join(f'{n} rows' for n in rows)} |", "| --- |" + " --- |" * len(rows)]
    lines += [f"| {stage} | {' | '.join(f'{microseconds(f[stage]):,.0f}' for f in found)} |" for stage in found[0]]
    return "\n".join(lines)


def seen_table(rows: list[dict[str, Any]], target: str, batch: int) -> str:
    """Where a round's time went in each arm that timed this target and batch. A profile keeps its 40 longest kernels,
    at least 97 % of it on these shapes. The prefill's own kernels are left out; its products, one pass in 24 rounds,
    are not.
    """
    stages = [name for name, _ in STAGES if name != PREFILL] + ["rest"]
    lines = [f"| arm | ms a round | {' | '.join(stages)} |", "| --- |" + " --- |" * (len(stages) + 1)]
    for row in (one for one in rows if one["arm"].startswith(f"{target}/")):
        found = {job["job"]: job for job in row.get("measured", []) if job["batch"] == batch}
        if "timed" not in found or "profiled" not in found:
            continue
        split = by_stage(found["profiled"]["kernels"])
        cells = " | ".join(f"{split[stage]:,.0f}" for stage in stages)
        lines.append(f"| {row['arm'].partition('/cost-')[2]} | {found['timed']['ms_per_round']:.2f} | {cells} |")
    return "\n".join(lines)


def tables() -> dict[str, str]:
    """The generated parts of docs/engine-performance.md by the name of their markers."""
    costs = rows_of(json.loads(RESULTS.read_text()), ("costs", "costs-slice"))
    return {
        "floors-12": floor_table("shape-27b-12"),
        "floors-64": floor_table("shape-27b"),
        "seen-64": seen_table(costs, "shape-27b", 1),
        "seen-12": seen_table(costs, "shape-27b-12", 1),
        "seen-12-of-eight": seen_table(costs, "shape-27b-12", 8),
    }


if __name__ == "__main__":
    for title, table in tables().items():
        print(f"<!-- {title} -->\n{table}\n")
