"""Mode auto where states are kept as records: each width's verify and commit see trees and records of that width.

Records are scratch between the verify and the commit of one round, so all widths use the widest's memory, which the
state pool came with. A width's records are the first of it, laid out as those of a server of this width alone, which is
what the kernels read. Its trees are its own: a captured verify reads them at their addresses, and so two shapes of as
many rows, which share one capture, share them as well.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from sglang_ddtree import config, records
from sglang_ddtree.auto.captures import Capture
from sglang_ddtree.auto.worker import AutoWorker, Width
from sglang_ddtree.kernels.buffers import TreeBuffers
from sglang_ddtree.kernels.gdn import GdnRecords
from sglang_ddtree.kernels.hybrid import HybridTree
from sglang_ddtree.records_worker import RecordsWorker


def narrowed(kept: HybridTree, rows: int) -> HybridTree:
    """Trees of `rows` rows for as many requests as `kept` has, and their records in the memory of kept's."""
    capacity, _rows, taps = kept.tree.conv_ancestors.shape
    trees = TreeBuffers.allocate(capacity, rows, kept.tree.tokens.device, conv_width=taps + 1)
    found = {field.name: _first(getattr(kept.records, field.name), rows) for field in dataclasses.fields(GdnRecords)}
    return dataclasses.replace(kept, tree=trees, records=GdnRecords(**found))


def _first(wide: torch.Tensor, rows: int) -> torch.Tensor:
    """[L, B, N, ..] -> a contiguous [L, B, rows, ..] over the same memory."""
    layers, requests, _rows, *rest = wide.shape
    shape = (layers, requests, rows, *rest)
    return wide.view(-1)[: torch.Size(shape).numel()].view(shape)


class AutoRecordsWorker(AutoWorker, RecordsWorker):
    """AutoWorker over the state pool's records. The pool holds the widest's, and during a round those of its width."""

    kept: dict[int, HybridTree]

    def _allocate(self) -> None:
        self.kept = {}
        super()._allocate()

    def _trees(self, rows: int) -> TreeBuffers:
        if not self.kept:  # the widest's are what the pool has, and what SGLang's own capture reads
            self.kept[self.ddtree.rows] = _of(self._pool)
        if rows not in self.kept:
            self.kept[rows] = narrowed(self.kept[self.ddtree.rows], rows)
        return self.kept[rows].tree

    @property
    def _pool(self) -> Any:
        return self._target_worker.model_runner.req_to_token_pool

    def _captured(self, target: Any, resolved: config.Resolved) -> Capture:
        with records.using(self._pool, self.kept[resolved.rows]):
            return super()._captured(target, resolved)

    @contextlib.contextmanager
    def _using(self, width: Width) -> Iterator[None]:
        with super()._using(width), records.using(self._pool, self.kept[width.resolved.rows]):
            yield


def _of(pool: Any) -> HybridTree:
    kept = records.of_pool(pool)
    assert kept is not None  # RecordsWorker has looked
    return kept
