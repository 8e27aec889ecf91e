"""Mode auto with states kept as records: what each width's rounds read and write, and when."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sglang_setup
import test_records as fixed
import torch

pytestmark = pytest.mark.xdist_group("sglang")
WIDTHS, BLOCK = (2, 4, fixed.ROWS - 1), 5  # a chain of 4 nodes beside them
FIELDS = ("delta", "key", "decay", "x")


@pytest.fixture(autouse=True)
def _sglang(sglang_src: Path) -> None:
    sglang_setup.load(sglang_src)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Any:
    return fixed.serve(monkeypatch, "records")


@pytest.fixture
def worker(server: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A worker that has allocated what it needs, over SGLang's own pool."""
    from sglang_ddtree import config
    from sglang_ddtree.auto.records import AutoRecordsWorker
    from sglang_ddtree.auto.settings import AutoConfig, AutoResolved
    from sglang_ddtree.kernels.buffers import TreeBuffers
    from sglang_ddtree.worker import DDTreeWorker

    made = object.__new__(AutoRecordsWorker)
    runner = SimpleNamespace(
        req_to_token_pool=fixed.make_pool(), attn_backend="home", decode_cuda_graph_runner="graphs", server_args=server
    )
    made.__dict__.update(device="cpu", _target_worker=SimpleNamespace(model_runner=runner))
    chosen = config.DDTreeConfig(mode="tree", budget=max(WIDTHS), topk_cap=4)
    made.__dict__["ddtree"] = AutoResolved(chosen, BLOCK, "", "records", AutoConfig(WIDTHS, "cycle"))
    trees = TreeBuffers.allocate(48, fixed.ROWS, "cpu")
    monkeypatch.setattr(DDTreeWorker, "_allocate", lambda self: self.__dict__.update(trees=trees))
    made._allocate()
    return made


def now(worker: Any) -> Any:
    """What a verify or a commit would find."""
    from sglang_ddtree import records

    return records.of_pool(worker._pool)


def test_every_width_has_records_of_its_own_layout_in_the_widests_memory(worker: Any) -> None:
    home = now(worker)
    for width in worker.widths:
        kept, rows = worker.kept[width.resolved.rows], width.resolved.rows
        assert kept.tree is width.trees
        assert (kept.tree.width, kept.tree.tokens.shape[0]) == (rows, fixed.PADDED)
        assert kept.tree.conv_ancestors.shape == (fixed.PADDED, rows, fixed.TAPS)
        assert kept.ssm_pool is home.ssm_pool
        assert kept.conv_pool is home.conv_pool
        for name in FIELDS:
            mine, widest = getattr(kept.records, name), getattr(home.records, name)
            assert mine.is_contiguous()
            assert (*mine.shape[:2], *mine.shape[3:]) == (*widest.shape[:2], *widest.shape[3:])
            assert mine.shape[2] == rows
            assert mine.data_ptr() == widest.data_ptr()
    assert worker.kept[fixed.ROWS] is home
    assert worker.trees is home.tree is worker.widths[2].trees


def test_a_chain_and_a_tree_of_as_many_rows_share_what_their_capture_reads(worker: Any) -> None:
    assert [width.resolved.rows for width in worker.widths] == [3, 5, 9, 5]
    assert worker.widths[1].trees is worker.widths[3].trees
    assert set(worker.kept) == {3, 5, 9}


def test_in_a_round_its_widths_records_are_in_place_and_the_widests_behind_it(worker: Any) -> None:
    home = now(worker)
    for width in worker.widths:
        with worker._using(width):
            assert now(worker) is worker.kept[width.resolved.rows]
            assert (worker.trees, worker.ddtree) == (width.trees, width.resolved)
        assert now(worker) is home
    with pytest.raises(ZeroDivisionError), worker._using(worker.widths[0]):
        raise ZeroDivisionError
    assert now(worker) is home
    assert worker.trees is home.tree


def test_a_width_is_captured_over_its_own_records(worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang_ddtree.auto import captures
    from sglang_ddtree.auto.captures import Capture

    seen, home = {}, now(worker)

    def capture(_target: Any, resolved: Any) -> Capture:
        seen[resolved.rows] = now(worker)
        return Capture(resolved.rows, None)

    monkeypatch.setattr(captures, "capture", capture)
    worker._capture(worker._target_worker.model_runner)
    assert seen == {rows: worker.kept[rows] for rows in (3, 5)}  # SGLang has captured the widest's
    assert [width.capture.backend for width in worker.widths] == [3, 5, "home", 5]
    assert now(worker) is home


@pytest.mark.parametrize(("rows", "state", "padded"), [(3, torch.float32, 0), (5, torch.float32, 2),
                                                        (5, torch.bfloat16, 2)])  # fmt: skip
def test_a_narrow_verify_and_its_commit_equal_float64(
    server: Any, monkeypatch: pytest.MonkeyPatch, rows: int, state: torch.dtype, padded: int
) -> None:
    """As a server of this width alone, in memory that holds a wider round's records."""
    from sglang_ddtree import records
    from sglang_ddtree.auto.records import narrowed

    whole = fixed.make_pool

    def pool_in_a_narrow_round(kind: torch.dtype) -> Any:
        pool = whole(kind)
        wide = records.of_pool(pool)
        fixed.poison(*(getattr(wide.records, name) for name in FIELDS))
        round_of_it.enter_context(records.using(pool, narrowed(wide, rows)))
        return pool

    monkeypatch.setattr(fixed, "make_pool", pool_in_a_narrow_round)
    monkeypatch.setattr(fixed, "ROWS", rows)
    with contextlib.ExitStack() as round_of_it:
        fixed.test_a_verify_and_its_commit_equal_float64(server, state, padded, seed=rows)


def test_the_registry_builds_the_worker_of_both_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang_ddtree import config, plugin
    from sglang_ddtree.auto.records import AutoRecordsWorker
    from sglang_ddtree.auto.settings import AutoResolved
    from sglang_ddtree.auto.worker import AutoWorker
    from sglang_ddtree.records_worker import RecordsWorker

    tree = config.DDTreeConfig(mode="tree", budget=32)
    for kept, expected in (("records", AutoRecordsWorker), ("snapshots", AutoWorker)):
        args = SimpleNamespace()
        config.attach(args, AutoResolved(tree, 16, "", kept))
        assert plugin.worker_class(args) is expected
    assert plugin.worker_class(fixed.serve(monkeypatch, "records")) is RecordsWorker
