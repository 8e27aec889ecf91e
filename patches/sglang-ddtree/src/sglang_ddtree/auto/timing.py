"""The cost of a round in each shape: replays of the captured graphs, with the launches between them whose work grows
with the tree. Run once, before a request can come.

Left out is what costs the same in every shape (the commits of states and keys) or next to nothing (counters). The
replays see requests of SGLang's shortest length, so attention over long contexts, again the same for all, is left out
too: a wide tree is somewhat better on long contexts than the table says.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from sglang_ddtree.auto.captures import captured
from sglang_ddtree.auto.costs import CostTable, batches_to_measure, measure
from sglang_ddtree.kernels.accept import accept_tree
from sglang_ddtree.kernels.mask import write_tree_mask

logger = logging.getLogger(__name__)
WARM_UP = 2


def device_ms(work: Callable[[], None]) -> float:
    """Milliseconds between two events on the device around the work."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


def replay(runner: Any, batch: int) -> Any:
    """Run the graph captured for the batch on whatever its buffers hold; its outputs."""
    return runner.backend.replay(runner._make_graph_key(batch), None)


def measure_widths(worker: Any, timer: Callable[[Callable[[], None]], float] = device_ms) -> CostTable:
    """The cost table of a worker whose widths are captured. timer(work): milliseconds of the work."""
    runners = [width.capture.runner for width in worker.widths]
    draft = worker.draft_model_runner.decode_cuda_graph_runner
    if captured(draft):
        runners.append(draft)
    batches = batches_to_measure(set.intersection(*(set(runner.capture_bs) for runner in runners)))
    rounds: dict[tuple[int, int], Callable[[], None]] = {}

    def time_ms(batch: int, shape: int) -> float:
        if (batch, shape) not in rounds:
            rounds[batch, shape] = round_of(worker, shape, batch)
            for _ in range(WARM_UP):
                rounds[batch, shape]()
        return timer(rounds[batch, shape])

    with torch.inference_mode():
        table = measure(batches, [width.shape.nodes for width in worker.widths], time_ms)
    logger.info("DDTREE auto, ms a round: %s", table.line([width.shape.name for width in worker.widths]))
    return table


def round_of(worker: Any, shape: int, batch: int) -> Callable[[], None]:
    """One round's work in a shape: drafter, tree, mask, target, argmax, acceptance."""
    width = worker.widths[shape]
    draft = worker.draft_model_runner.decode_cuda_graph_runner
    trees, accept, slots = width.trees.rows(batch), worker.accepts[0].rows(batch), worker.slots[:batch]
    bonus = torch.zeros(batch, dtype=torch.int64, device=worker.device)
    lengths = torch.ones(batch, dtype=torch.int64, device=worker.device)
    mask = worker.mask_of(width, batch)

    def work() -> None:
        if captured(draft):
            replay(draft, batch)
        worker.build(width, batch, bonus, lengths)
        write_tree_mask(trees, lengths, mask)
        output = replay(width.capture.runner, batch)
        rows = batch * width.resolved.rows
        target = torch.argmax(output.next_token_logits[:rows], dim=-1).view(batch, -1)
        accept_tree(target, trees, slots, lengths, accept)

    return work
