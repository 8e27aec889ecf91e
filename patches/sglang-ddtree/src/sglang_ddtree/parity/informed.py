"""A drafter that has been told the answer, at changing ranks: deep accepted paths without a trained pair.

Random weights accept one node here and there. To exercise commits along long paths that leave the spine, the
suite lets the head see each request's known continuation and puts its token at rank 0 to 3 of the depth's
distribution, by a fixed pattern. What is emitted must not change: the drafter only decides how far one round
gets.
"""

from __future__ import annotations

from typing import Any

import torch

RANKS = (0, 1, 0, 2, 0, 0, 1, 3, 0)  # of the true token, by position modulo its length; deep runs and many side steps
SHARPNESS = 4.0  # makes a random head's distributions peaked, so that best-first trees go deep
NOTHING = -1


class Informant:
    """Truth by request slot and position, read inside the draft graph."""

    group: Any = None  # of the ranks that share the vocabulary; None if one has it all

    def __init__(self, worker: Any, length: int, group: Any = None) -> None:
        self.group = group
        slots = int(worker.model_runner.req_to_token_pool.req_to_token.shape[0])
        self.table = torch.full((slots, length), NOTHING, dtype=torch.int64, device=worker.device)
        self.ranks = torch.tensor(RANKS, dtype=torch.int64, device=worker.device)
        self.known: dict[tuple[int, ...], list[int]] = {}
        self._filled: dict[int, str] = {}

    def tell(self, requests: list[Any]) -> None:
        """Before a round: put the continuation of each request that got a slot into the table."""
        for request in requests:
            slot = int(request.req_pool_idx)
            if self._filled.get(slot) == request.rid:
                continue
            self._filled[slot] = request.rid
            line = self.known.get(tuple(request.origin_input_ids), [])[: self.table.shape[1]]
            self.table[slot] = NOTHING
            self.table[slot, : len(line)] = torch.tensor(line, dtype=torch.int64)

    def sharpen(self, logits: torch.Tensor, slots: torch.Tensor, lengths: torch.Tensor, start: int = 0) -> torch.Tensor:
        """logits [bs * D, V'] of the draft block behind lengths [bs]: the tokens from `start` on; capturable."""
        batch, width = lengths.shape[0], logits.shape[1]
        depths = logits.shape[0] // batch
        at = lengths[:, None] + torch.arange(1, depths + 1, device=logits.device)
        truth = self.table[slots[:, None], at.clamp(max=self.table.shape[1] - 1)].view(-1, 1)
        best = self._best(logits)
        if width == 0:
            return logits
        rank = self.ranks[at % len(RANKS)].view(-1, 1)
        above = best.gather(1, (rank - 1).clamp(min=0))
        value = torch.where(rank == 0, best[:, :1] + 1.0, (above + best.gather(1, rank)) / 2)
        column = truth - start
        here = (truth != NOTHING) & (column >= 0) & (column < width)
        told = logits.scatter(1, column.clamp(min=0, max=width - 1), value)
        return torch.where(here, told, logits) * SHARPNESS

    def _best(self, logits: torch.Tensor) -> torch.Tensor:
        """The largest logits of each row, descending, over all shards of the vocabulary."""
        count = len(set(RANKS)) + 1
        mine = logits.topk(min(count, logits.shape[1]), dim=-1).values
        mine = torch.nn.functional.pad(mine, (0, count - mine.shape[1]), value=float("-inf"))
        if self.group is None:
            return mine
        parts = mine.new_empty((self.group.world_size * len(mine), count))
        self.group.all_gather_into_tensor(parts, mine)
        return parts.view(-1, *mine.shape).transpose(0, 1).flatten(1).topk(count, dim=-1).values


def install(length: int = 8192) -> None:
    """Patch the plugin's head and worker of this process, before the worker is built."""
    from sglang_ddtree import head, worker

    current: dict[str, Any] = {}
    plain_topk, plain_tail, plain_round = (
        head.draft_topk,
        worker.DDTreeWorker._draft_tail,
        worker.DDTreeWorker._tree_round,
    )
    plain_allocate, plain_draft = worker.DDTreeWorker._allocate, worker.DDTreeWorker._draft

    def allocate(self: Any) -> None:
        plain_allocate(self)
        group = worker.get_tp_group()
        self.informant = Informant(self, length, group if group.world_size > 1 else None)

    def tail(self: Any, runner: Any, out: Any, forward_batch: Any, tokens: int) -> None:
        block = self.ddtree.block_size
        current["of"] = (self.informant, forward_batch.req_pool_indices, forward_batch.positions.view(-1, block)[:, 0])
        plain_tail(self, runner, out, forward_batch, tokens)

    def draft(self: Any, batch: Any, rows: int) -> torch.Tensor:
        current["of"] = (self.informant, batch.req_pool_indices, batch.seq_lens)  # read where no graph ran
        return plain_draft(self, batch, rows)

    def topk(logits: torch.Tensor, *rest: Any, **kwargs: Any) -> None:
        informant, slots, lengths = current["of"]
        plain_topk(informant.sharpen(logits, slots, lengths, kwargs.get("vocab_start", 0)), *rest, **kwargs)

    def told_round(self: Any, batch: Any, *rest: Any) -> Any:
        self.informant.tell(batch.reqs)
        return plain_round(self, batch, *rest)

    head.draft_topk, worker.DDTreeWorker._draft_tail = topk, tail
    worker.DDTreeWorker._draft = draft
    worker.DDTreeWorker._allocate, worker.DDTreeWorker._tree_round = allocate, told_round
