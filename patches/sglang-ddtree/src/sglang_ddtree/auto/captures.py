"""The objects of SGLang that must exist once for each verify width, and the switch between them.

A captured round is tied to its width by the target's decode graph runner and by its attention backend: the hybrid
backend keeps links [requests, rows] in buffers that the graph reads. SGLang's adaptive speculation has such a pair
for each number of steps and puts the active one onto the model runner (speculative/adaptive_runtime_state.py); this is
the same, for widths. Its controller is not used: it adapts the length of an EAGLE chain and refuses any topk but 1.

What a pass only reads by its own strides is shared and sized for the widest: state snapshots, KV slots, input buffers,
the logits, the mask and the table of KV indices.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

from sglang_ddtree import config
from sglang_ddtree.config import Resolved

# Each covers the rows of the widest; passes run one after the other, and no verify reads the first two.
SHARED = ("cuda_graph_attn_logits", "cuda_graph_attn_lse", "_verify_mask")


@dataclasses.dataclass(frozen=True)
class Capture:
    """A width's attention backend and graph runner of the target."""

    backend: Any
    runner: Any


def home(model_runner: Any) -> Capture:
    """What SGLang itself made, for the widest width."""
    return Capture(model_runner.attn_backend, model_runner.decode_cuda_graph_runner)


def captured(runner: Any) -> bool:
    """Whether it is a runner of captured graphs; SGLang puts None or its eager runner where there are none."""
    return hasattr(runner, "capture_bs")


@contextlib.contextmanager
def using(model_runner: Any, capture: Capture) -> Iterator[None]:
    """The capture in place of the home, which comes back: prefills and idle passes run with the home only."""
    kept = home(model_runner)
    model_runner.attn_backend, model_runner.decode_cuda_graph_runner = capture.backend, capture.runner
    try:
        yield
    finally:
        model_runner.attn_backend, model_runner.decode_cuda_graph_runner = kept.backend, kept.runner


def capture(model_runner: Any, resolved: Resolved) -> Capture:
    """Backend and graphs of one more width. The home's must exist and be the widest."""
    widest = home(model_runner)
    with published(model_runner.server_args, resolved):
        workspace = model_runner.init_new_workspace
        try:
            backend = model_runner._get_attention_backend(init_new_workspace=True)
        finally:
            model_runner.init_new_workspace = workspace
        for name in ("prefill_attention_backend_str", "decode_attention_backend_str"):
            setattr(backend, name, getattr(widest.backend, name))
        share_buffers(full_attention(backend), full_attention(widest.backend))
        with using(model_runner, Capture(backend, None)):
            graphs = model_runner._decode_cuda_graph_runner_cls()(
                model_runner,
                attn_backend=backend,
                speculative_num_steps=1,
                speculative_num_draft_tokens=resolved.rows,
            )
    return Capture(backend, graphs)


def full_attention(backend: Any) -> Any:
    """The triton backend of a hybrid one, or the backend itself."""
    return getattr(backend, "full_attn_backend", backend)


def share_buffers(narrow: Any, widest: Any) -> None:
    """Let the narrow backend's graphs read the widest's buffers: SGLang sizes the table of KV indices rows x context x
    8 bytes for each request, which on long contexts is gigabytes for each width.
    """
    allocate = narrow.init_cuda_graph_state

    def allocate_but_share(max_bs: int, max_num_tokens: int) -> None:
        allocate(max_bs, max_num_tokens, kv_indices_buf=widest.cuda_graph_kv_indices)
        for name in SHARED:
            setattr(narrow, name, getattr(widest, name))

    narrow.init_cuda_graph_state = allocate_but_share


@contextlib.contextmanager
def published(server_args: Any, resolved: Resolved) -> Iterator[None]:
    """The settings as a server of this width alone would have them, while its backend and graphs are made: backends
    read SGLang's published ones, capture hooks those on the arguments.
    """
    from sglang.srt.runtime_context import get_context

    kept = config.of(server_args)
    assert kept is not None
    config.attach(server_args, resolved)
    try:
        with get_context().preserve_config():
            get_context().override("ddtree.width", speculative_num_draft_tokens=resolved.rows)
            yield
    finally:
        config.attach(server_args, kept)
