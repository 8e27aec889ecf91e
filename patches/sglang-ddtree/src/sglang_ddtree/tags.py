"""What a round must know about each request of its batch and that SGLang's batch tensors do not carry."""

from __future__ import annotations

import itertools
import secrets
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Tags:
    """One batch's requests on the device.

    seeds int64 [bs]: of each request's random draws. generations int64 [bs]: a number no two requests share,
    since slots are reused. alone bool [bs]: the request gets a tree of its root alone; None if no request of
    the batch is so.
    """

    seeds: torch.Tensor
    generations: torch.Tensor
    alone: torch.Tensor | None


def needs_root_only(request: Any) -> bool:
    """A request whose distribution at a node depends on the tokens above it beyond what the target model itself sees.

    Penalties, a minimum length and custom processors count emitted tokens. A node's ancestors are not emitted
    yet, so such a request takes one token a round: then it is exactly what plain decoding gives, at plain
    decoding's pace. Logit bias and grammars are applied at each node and need no exception.
    """
    params = request.sampling_params
    return bool(
        params.frequency_penalty
        or params.presence_penalty
        or params.repetition_penalty != 1.0
        or params.min_new_tokens > 0
        or getattr(request, "custom_logit_processor", None)
    )


class RequestTags:
    """Tags of the running batch, uploaded only when its members change."""

    def __init__(self, device: torch.device | str) -> None:
        self.device = device
        self._count = itertools.count(1)
        self._key: tuple[str, ...] = ()
        self._tags: Tags | None = None

    def of(self, requests: list[Any]) -> Tags:
        key = tuple(request.rid for request in requests)
        if self._tags is None or key != self._key:
            self._key, self._tags = key, self._upload(requests)
        return self._tags

    def _upload(self, requests: list[Any]) -> Tags:
        rows = []
        for request in requests:
            if not hasattr(request, "_ddtree_generation"):
                request._ddtree_generation = next(self._count)
                wanted = request.sampling_params.sampling_seed
                request._ddtree_seed = secrets.randbits(31) if wanted is None else int(wanted)
            rows.append((request._ddtree_seed, request._ddtree_generation, int(needs_root_only(request))))
        pinned = torch.tensor(rows, dtype=torch.int64).T.contiguous()
        if str(self.device).startswith("cuda"):
            pinned = pinned.pin_memory()
        seeds, generations, alone = pinned.to(self.device, non_blocking=True)
        return Tags(seeds, generations, alone.bool() if any(row[2] for row in rows) else None)
