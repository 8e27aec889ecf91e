"""One round costs a fixed handful of launches, whatever the batch, depth and budget, and never asks the host."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from sglang_ddtree.kernels import accept, buffers, build, gdn, mask, sample, slots, topk
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import InterpretedFunction


class TorchOps(TorchDispatchMode):
    """Names of the torch operators that ran, views and allocations left out."""

    FREE = ("aten.view", "aten.empty", "aten.slice", "aten.select", "aten.reshape", "aten._unsafe_view", "aten.t.",
            "aten.unsqueeze", "aten.transpose", "aten.detach", "aten.expand", "aten.split", "aten.alias")  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not str(func).startswith(self.FREE):
            self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[list[str], list[str]]]:
    """Kernel launches and torch operators of the block; launches are counted, not run."""
    launches: list[str] = []

    def launch(self: InterpretedFunction, *_: Any, **__: Any) -> None:
        launches.append(self.fn.__name__)

    with monkeypatch.context() as patch, TorchOps() as ops:
        patch.setattr(InterpretedFunction, "run", launch)
        yield launches, ops.seen


def one_round(bs: int, depths: int, rows: int, monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], list[str]]:
    k, vocab, hidden = 4, 9000, 32
    states = torch.zeros(bs * depths, hidden)
    head = torch.zeros(vocab, hidden)
    ids, logp = torch.zeros(bs * depths, k, dtype=torch.int64), torch.zeros(bs * depths, k)
    lse = torch.zeros(bs * depths)
    workspace = topk.TopKWorkspace.allocate(bs * depths, vocab, k, "cpu")
    tree = buffers.TreeBuffers.allocate(bs, rows, "cpu")
    out = buffers.AcceptBuffers.allocate(bs, depths + 1, "cpu")
    counters = buffers.TreeCounters.allocate(depths + 1, "cpu")
    lens = torch.zeros(bs, dtype=torch.int64)
    block = torch.zeros(bs, depths + 1, dtype=torch.int64)
    slot = torch.zeros(bs, max(rows, depths + 1), dtype=torch.int64)
    table = torch.zeros(bs, 64, dtype=torch.int32)
    cells = torch.zeros(bs * rows * (64 + rows), dtype=torch.uint8)
    target = torch.zeros(bs, rows, dtype=torch.int64)
    with counted(monkeypatch) as (launches, ops):
        slots.prepare_round(lens, lens, lens, table, 1, block, block, slot)
        topk.draft_topk(states @ head.t(), ids, logp, lse, workspace=workspace)
        build.build_tree(logp.view(bs, depths, k), ids.view(bs, depths, k), lens, lens, tree)
        mask.write_tree_mask(tree, lens, cells)
        accept.accept_tree(target, tree, slot, lens, out, counters)
    return launches, ops


@pytest.mark.parametrize(("bs", "depths", "rows"), [(1, 15, 17), (8, 15, 65), (3, 7, 9)])
def test_a_greedy_round_is_one_gemm_and_six_launches(
    bs: int, depths: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches, ops = one_round(bs, depths, rows, monkeypatch)
    assert launches == [
        "_prepare_round_kernel",
        "_topk_chunks_kernel",
        "_topk_merge_chunks_kernel",
        "_build_tree_kernel",
        "_tree_mask_kernel",
        "_accept_kernel",
    ]
    assert ops == ["aten.mm.default"], "one GEMM for all depths, nothing else, nothing read back"


@pytest.mark.parametrize(("options", "launches"), [({"max_top_k": 20}, 3), ({"filtered": False}, 2)])
def test_sampling_adds_a_fixed_number_of_launches(
    options: dict[str, Any], launches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    bs, rows = 4, 17
    one = torch.ones(bs)
    params = sample.SamplingParams(one, one.int(), one, one * 0, torch.zeros(bs, dtype=torch.int64), **options)
    logits, positions = torch.zeros(bs * rows, 9000), torch.zeros(bs * rows, dtype=torch.int64)
    out = torch.zeros(bs * rows, dtype=torch.int64)
    with counted(monkeypatch) as (seen, ops):
        sample.sample_targets(logits, positions, params, out)
    assert len(seen) == launches
    assert ops == []


def test_hybrid_layers_add_three_launches_each_and_the_commit_two(monkeypatch: pytest.MonkeyPatch) -> None:
    bs, rows, layers, dim, channels = 2, 17, 3, 16, 24
    tree = buffers.TreeBuffers.allocate(bs, rows, "cpu")
    records = gdn.GdnRecords.allocate(layers, bs, rows, 1, 2, dim, dim, channels, torch.float32, "cpu")
    q, v = torch.zeros(1, bs * rows, 1, dim), torch.zeros(1, bs * rows, 2, dim)
    gate, head = torch.zeros(bs * rows, 2), torch.zeros(2)
    states, conv_states = torch.zeros(layers, 3, 2, dim, dim), torch.zeros(layers, 3, channels, 3)
    index, x = torch.zeros(bs, dtype=torch.int32), torch.zeros(bs * rows, channels)
    with counted(monkeypatch) as (seen, ops):
        for i in range(layers):
            gdn.conv_tree(x, conv_states[i], torch.zeros(channels, 4), None, index, tree.conv_ancestors, records.x[i])
            gdn.gdn_tree(q, q, v, gate, gate, a_log=head, dt_bias=head, ssm_states=states[i], state_indices=index,
                         ancestors=tree.ancestors, record=records.layer(i))  # fmt: skip
        gdn.commit_tree(records, tree.ancestors, tree.conv_ancestors, index, states, conv_states, index)
    layer = ["conv_tree_kernel", "gdn_tables_kernel", "gdn_tree_kernel"]
    assert seen == layer * layers + ["commit_state_kernel", "commit_conv_kernel"]
    assert [op for op in ops if not op.startswith("aten.zeros")] == []


def test_the_count_sees_a_host_sync_and_a_gemm_per_depth(monkeypatch: pytest.MonkeyPatch) -> None:
    with counted(monkeypatch) as (_, ops):
        x = torch.ones(3, 4)
        for _ in range(2):
            x @ x.t()
        x.sum().item()
    assert ops.count("aten.mm.default") == 2
    assert "aten._local_scalar_dense.default" in ops


@pytest.fixture
def benchmark_script() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "engine" / "kernels.py"
    spec = importlib.util.spec_from_file_location("kernel_benchmark", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_benchmark_reports_nothing_while_parity_is_red(
    benchmark_script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "report.json"
    monkeypatch.setattr(benchmark_script, "run_checks", lambda _: {"build": 0.0, "accept": "3 cells differ"})
    monkeypatch.setattr("sys.argv", ["kernels.py", "--out", str(out)])
    assert benchmark_script.main() == 1
    shown = capsys.readouterr()
    assert json.loads(shown.out) == {"parity": {"build": 0.0, "accept": "3 cells differ"}}
    assert "parity is red" in shown.err
    assert not out.exists()


def test_the_benchmark_runs_through(benchmark_script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """At toy sizes in the interpreter, its clock replaced: every line it would report is there."""

    def once(launches: list[Any], **_: Any) -> float:
        for launch in launches:
            launch()
        return 1.0

    toy = {"DEVICE": "cpu", "VOCAB": 5000, "HIDDEN": 16, "LAYERS": 2, "HEADS": 1, "VALUE_HEADS": 3, "DIM": 16,
           "CHANNELS": 2 * 16 + 3 * 16, "DEPTHS": 3, "K": 2, "CONTEXT": 8, "microseconds": once}  # fmt: skip
    for name, value in toy.items():
        monkeypatch.setattr(benchmark_script, name, value)
    lines = benchmark_script.time_head(1, speed=1.0)
    lines += benchmark_script.time_round(2, 5, floor=1.0)
    lines += benchmark_script.time_hybrid(2, 5, 1.0, torch.bfloat16)
    assert [line["kernel"] for line in lines] == [
        "head gemm", "topk + logsumexp", "head gemm + topk",
        "prepare_round", "build_tree", "write_tree_mask", "accept_tree", "count_nested", "build + mask + accept",
        "conv_tree", "gdn_tree", "commit_tree",
    ]  # fmt: skip
    assert all(line["us"] == 1.0 and line["bound_us"] > 0 for line in lines)
