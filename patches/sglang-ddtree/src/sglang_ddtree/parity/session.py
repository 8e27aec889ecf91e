"""SGLang's scheduler in this process, without servers: the real loop, overlap and CUDA graphs, fed from a list.

A server costs three processes and half a minute of imports, and hides the worker. Here requests are handed to
the scheduler's own event loop, which runs until it is idle; then its own leak checks have passed and the
finished requests are read.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import time
from array import array
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch


class Idle(Exception):
    """Raised into the event loop when nothing is left to do; never leaves `Session.run`."""


@dataclass
class Ask:
    """One request. abort_after: output tokens after which it is aborted, None for never."""

    ids: list[int]
    params: dict[str, Any] = field(default_factory=dict)
    abort_after: int | None = None


@dataclass
class Answer:
    ids: list[int]
    rounds: int
    finish: str
    seconds: float
    cached: int = 0  # prompt tokens found in the prefix cache


class _Feed:
    """Stands where the scheduler receives requests: called once in every turn of its loop."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.new: deque[Any] = deque()

    def recv_requests(self) -> list[Any]:
        scheduler = self.session.scheduler
        if self.new:
            batch = list(self.new)
            self.new.clear()
            return batch
        aborts = self.session.due_aborts()
        if aborts:
            return aborts
        busy = scheduler.waiting_queue or scheduler.running_batch.reqs or scheduler.last_batch is not None
        if not busy and not getattr(scheduler, "result_queue", None):
            scheduler.on_idle()  # SGLang's own leak checks
            raise Idle
        return []


def import_sglang() -> None:
    """Plugins first, since their hooks must be in place before the scheduler's modules are used; idempotent."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    from sglang.srt.plugins import load_plugins

    load_plugins()
    importlib.import_module("sglang.srt.managers.scheduler")


class Session:
    """A loaded scheduler. `argv` are the arguments of sglang.launch_server.

    Of several GPUs' ranks each has a session of its own, in a process of its own, and all are given the same jobs:
    what SGLang's ranks otherwise hear from rank 0 comes here from the job, in the same turns of the loop.
    """

    def __init__(self, argv: list[str], rank: int = 0) -> None:
        import_sglang()
        from sglang.srt.managers.scheduler import Scheduler
        from sglang.srt.runtime_context import publish
        from sglang.srt.server_args import PortArgs, prepare_server_args

        self.server_args = prepare_server_args(argv)
        publish(self.server_args, role="scheduler")
        ports = PortArgs.init_new(self.server_args)
        self.scheduler = Scheduler(self.server_args, ports, rank, rank, 0, 0, 0, 0, None)
        for sender in (self.scheduler.ipc_channels.send_to_tokenizer, self.scheduler.ipc_channels.send_to_detokenizer):
            sender.socket = None
        self._seen: dict[str, Any] = {}
        self._aborts: dict[str, int] = {}
        self._count = 0
        self._watch_requests()
        self.feed = self.scheduler.request_receiver = _Feed(self)

    @property
    def worker(self) -> Any:
        return self.scheduler.draft_worker

    def _watch_requests(self) -> None:
        add = self.scheduler._add_request_to_queue

        def watched(request: Any, *args: Any, **kwargs: Any) -> Any:
            self._seen.setdefault(request.rid, request)
            return add(request, *args, **kwargs)

        self.scheduler._add_request_to_queue = watched

    def due_aborts(self) -> list[Any]:
        from sglang.srt.managers.io_struct import AbortReq

        due = [
            rid for rid, after in self._aborts.items() if rid in self._seen and len(self._seen[rid].output_ids) >= after
        ]
        for rid in due:
            del self._aborts[rid]
        return [AbortReq(rid=rid) for rid in due]

    def run(self, asks: list[Ask]) -> list[Answer]:
        """Serve all requests together, as far as the scheduler admits them; returns when it is idle."""
        device = torch.get_device_module(self.server_args.device)
        device.synchronize()  # each run of the loop takes a stream of its own
        start = time.perf_counter()
        names = [self._submit(ask) for ask in asks]
        with contextlib.suppress(Idle):
            self.scheduler.run_event_loop()
        device.synchronize()
        took = time.perf_counter() - start
        return [self._answer(name, took) for name in names]

    def _submit(self, ask: Ask) -> str:
        from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
        from sglang.srt.sampling.sampling_params import SamplingParams

        self._count += 1
        name = f"parity-{self._count:06d}"
        params = SamplingParams(**{"temperature": 0.0, **ask.params})
        params.normalize(None)
        self.feed.new.append(
            TokenizedGenerateReqInput(
                rid=name,
                input_text="",
                input_ids=array("q", ask.ids),
                input_embeds=None,
                mm_inputs=None,
                token_type_ids=None,
                sampling_params=params,
                return_logprob=False,
                logprob_start_len=-1,
                top_logprobs_num=0,
                token_ids_logprob=None,
                stream=False,
            )
        )
        if ask.abort_after is not None:
            self._aborts[name] = ask.abort_after
        return name

    def _answer(self, name: str, took: float) -> Answer:
        request = self._seen.pop(name)
        reason = request.finished_reason
        return Answer(
            [int(i) for i in request.output_ids_through_stop],
            int(getattr(request, "spec_verify_ct", 0) or 0),
            type(reason).__name__ if reason is not None else "none",
            took,
            int(getattr(request, "cached_tokens", 0) or 0),
        )

    def memory(self) -> dict[str, int]:
        """Free KV slots, request slots and recurrent-state slots; equal before and after a job, or something leaked."""
        scheduler = self.scheduler
        pool = scheduler.req_to_token_pool
        free = {
            "kv": int(scheduler.token_to_kv_pool_allocator.available_size()),
            "requests": int(pool.available_size()),
        }
        allocator = getattr(pool, "mamba_allocator", None) or getattr(pool, "mamba_pool", None)
        if allocator is not None and hasattr(allocator, "available_size"):
            free["states"] = int(allocator.available_size())
        evictable = scheduler.tree_cache.evictable_size() if hasattr(scheduler.tree_cache, "evictable_size") else 0
        free["cached"] = evictable if isinstance(evictable, int) else int(sum(evictable))
        return free
