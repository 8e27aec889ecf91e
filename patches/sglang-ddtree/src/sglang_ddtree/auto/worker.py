"""The draft worker in mode auto: a tree round of the width that the policy chose, each width with trees, graphs and
attention backend of its own.

The drafter's pass is the same for all. Its graph ends with the head, since the tree's size is not known at capture;
the tree is then built by one more launch. A round's counts of accepted nodes stay on the device and are copied every
few rounds on a stream of its own; the policy hears of them when they have arrived, and no round waits.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterator
from typing import Any

import torch

from sglang_ddtree import config, metrics
from sglang_ddtree.auto import captures, report
from sglang_ddtree.auto.captures import Capture
from sglang_ddtree.auto.chooser import Cycle, Measured
from sglang_ddtree.auto.settings import AutoResolved
from sglang_ddtree.auto.shapes import Shape, intervals, told_by
from sglang_ddtree.auto.timing import measure_widths
from sglang_ddtree.kernels.buffers import TreeBuffers
from sglang_ddtree.kernels.build import build_tree
from sglang_ddtree.kernels.nested import count_nested
from sglang_ddtree.worker import DDTreeWorker

logger = logging.getLogger(__name__)
LOOK = 8  # rounds between two copies of the counts to the host


@dataclasses.dataclass(frozen=True)
class Width:
    """One shape and what its rounds run with; `capture` is None where no graphs are. tells: see `told_by`."""

    shape: Shape
    resolved: config.Resolved
    trees: TreeBuffers
    capture: Capture | None
    tells: range


class AutoWorker(DDTreeWorker):
    """`self.ddtree` and `self.trees` are those of the widest tree, and during a round those of the round's width."""

    widths: list[Width]

    def _allocate(self) -> None:
        super()._allocate()
        self.widths = self._widths()
        self.totals = torch.zeros((3, len(self.widths)), dtype=torch.int64, device=self.device)
        self.bounds = torch.tensor(intervals(self.ddtree.shapes), dtype=torch.int32, device=self.device)

    def _widths(self) -> list[Width]:
        resolved = self.ddtree
        assert isinstance(resolved, AutoResolved)
        found = []
        for place, shape in enumerate(resolved.shapes):
            own = resolved.of_shape(shape)
            trees = self._trees(own.rows)
            found.append(Width(shape, own, trees, None, told_by(resolved.shapes, place)))
        return found

    def _trees(self, rows: int) -> TreeBuffers:
        """What a shape of so many rows builds its trees in, for as many requests as the widest."""
        return TreeBuffers.allocate(self.trees.tokens.shape[0], rows, self.device)

    def init_cuda_graphs(self) -> None:
        super().init_cuda_graphs()
        target = self._target_worker.model_runner
        if captures.captured(target.decode_cuda_graph_runner):
            self._capture(target)
        self.chooser = self._chooser()
        self.watch = metrics.Reporter((self.totals,), report.seen, LOOK, [self.chooser.observe])

    def _capture(self, target: Any) -> None:
        """One capture for each number of rows; SGLang made the widest tree's itself. Wide before narrow, so that
        graphs reuse each other's memory.
        """
        found = {self.ddtree.rows: captures.home(target)}
        for width in reversed(self.widths):
            if width.resolved.rows not in found:
                found[width.resolved.rows] = self._captured(target, width.resolved)
        self.widths = [dataclasses.replace(width, capture=found[width.resolved.rows]) for width in self.widths]

    def _captured(self, target: Any, resolved: config.Resolved) -> Capture:
        return captures.capture(target, resolved)

    def _chooser(self) -> Cycle | Measured:
        shapes = [width.shape for width in self.widths]
        if self.ddtree.auto.choice == "cycle":
            return Cycle(shapes)
        gauges = None
        if self.server_args.enable_metrics and self.ps.tp_rank == 0:
            gauges = report.Gauges({"model_name": self.server_args.served_model_name or ""}, shapes)
        return Measured(shapes, measure_widths(self), gauges)

    # -- rounds --------------------------------------------------------------------------------------------------------

    def _tree_round(self, batch: Any, on_publish: Any, grammar_barrier: Any) -> Any:
        requests = len(batch.seq_lens)
        place = self.chooser.choose(requests)
        width = self.widths[place]
        accept = self.accepts[self._round % 2].rows(requests)
        with self._using(width):
            result = super()._tree_round(batch, on_publish, grammar_barrier)
        count_nested(accept.accept_index, width.resolved.rows, place, width.tells, self.bounds, self.totals)
        self.watch.round_done()
        return result

    @contextlib.contextmanager
    def _using(self, width: Width) -> Iterator[None]:
        kept = self.ddtree, self.trees
        self.ddtree, self.trees = width.resolved, width.trees
        try:
            if width.capture is None:
                yield
            else:
                with captures.using(self._target_worker.model_runner, width.capture):
                    yield
        finally:
            self.ddtree, self.trees = kept

    def _draft(self, batch: Any, rows: int) -> torch.Tensor:
        slots = super()._draft(batch, rows)
        self._build(batch.spec_info.bonus_tokens, batch.seq_lens, rows)
        return slots

    def _head_and_tree(self, hidden: torch.Tensor, _block_ids: torch.Tensor, _positions: torch.Tensor) -> None:
        """Behind the drafter's last layer, in its graph or not: the head alone."""
        self.head(hidden)

    def _build(self, bonus: torch.Tensor, lengths: torch.Tensor, rows: int) -> None:
        logp, ids = self.head.logp[:rows], self.head.ids[:rows]
        build_tree(logp, ids, bonus, lengths, self.trees, keep_spine=self.ddtree.config.keep_spine)

    # -- what the measurement needs ------------------------------------------------------------------------------------

    def build(self, width: Width, requests: int, bonus: torch.Tensor, lengths: torch.Tensor) -> None:
        """The width's trees from whatever the head holds."""
        with self._using(width):
            self._build(bonus, lengths, requests)

    def mask_of(self, width: Width, requests: int) -> torch.Tensor:
        """The mask that the width's captured graphs read."""
        with self._using(width):
            return self._mask_buffer(requests, replay=True)

    # -- reports -------------------------------------------------------------------------------------------------------

    def ddtree_counters(self) -> dict[str, Any]:
        return {**super().ddtree_counters(), "auto": self.chooser.summary()}
