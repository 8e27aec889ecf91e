"""CUDA graphs without a GPU: what a capture freezes is recorded, operator by operator, and replayed in the same memory.

A recorded pass holds torch's operators and Triton's launches with the tensors they had; its Python does not run again.
So a replay shows what a GPU's would: a branch that was taken at capture is taken for ever, a buffer that was replaced
since is still the old one, and padded requests are computed. What a capture forbids raises: values read by the host,
results whose size depends on values, data that comes from the host. Memory that graphs reuse is not shown.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

READS = ("aten._local_scalar_dense", "aten.equal", "aten.is_nonzero")
SIZED_BY_VALUES = ("aten.nonzero", "aten.masked_select", "aten.unique", "aten._unique", "aten.repeat_interleave.Tensor")
FROM_THE_HOST = ("aten.lift_fresh",)
TO_THE_HOST = ("tolist", "numpy", "cpu")  # methods that a tensor of the CPU answers without an operator


class CaptureError(RuntimeError):
    """A captured pass did what no CUDA graph can hold."""


class Recorder(TorchDispatchMode):
    """Steps of the passes that run inside it."""

    active: Recorder | None = None

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Callable[[], None]] = []

    def __enter__(self) -> Recorder:
        Recorder.active = self
        self._forbid()
        return super().__enter__()  # type: ignore[no-any-return]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._allow()
        Recorder.active = None

    def _forbid(self) -> None:
        def refuse(name: str) -> Callable[..., None]:
            def refused(*_: Any, **__: Any) -> None:
                raise CaptureError(f"Tensor.{name} in a captured pass")

            return refused

        for name in TO_THE_HOST:
            setattr(torch.Tensor, name, refuse(name))

    def _allow(self) -> None:
        for name in TO_THE_HOST:
            delattr(torch.Tensor, name)  # the method of the class below shows again

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = str(func)
        masks = name.startswith("aten.index") and any(_is_mask(leaf) for leaf in tree_leaves(args[1]))
        if masks or name.startswith((*READS, *SIZED_BY_VALUES, *FROM_THE_HOST)):
            raise CaptureError(f"{name} in a captured pass")
        made = func(*args, **kwargs)
        returns = func._schema.returns
        if any(one.alias_info is not None and not one.alias_info.is_write for one in returns):
            return made  # a view: it shows what is written to what it looks at
        written = any(one.alias_info is not None for one in func._schema.arguments)
        self.steps.append(_again(func, args, kwargs, () if written else _tensors(made)))
        return made

    def launch(self, plain: Callable[..., None], executor: Any, args: Any, kwargs: Any) -> None:
        self.steps.append(lambda: plain(executor, *args, **kwargs))
        self._allow()
        with _disable_current_modes():
            plain(executor, *args, **kwargs)
        self._forbid()


def _is_mask(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dtype == torch.bool


def _tensors(made: Any) -> tuple[torch.Tensor, ...]:
    return tuple(leaf for leaf in tree_leaves(made) if isinstance(leaf, torch.Tensor))


def _again(func: Any, args: Any, kwargs: Any, outputs: tuple[torch.Tensor, ...]) -> Callable[[], None]:
    def step() -> None:
        made = _tensors(func(*args, **kwargs))
        for old, new in zip(outputs, made, strict=bool(outputs)):
            old.copy_(new)

    return step


class RecordedBackend:
    """FullCudaGraphBackend over recorded passes: the same two warm-ups, the same outputs at every replay."""

    def __init__(self, _runner: Any, **_options: Any) -> None:
        self.graphs: dict[Any, Recorder] = {}
        self.outputs: dict[Any, Any] = {}

    @contextlib.contextmanager
    def capture_session(self, _stream: Any) -> Iterator[None]:
        yield

    def capture_one(self, key: Any, forward: Any, capture_inputs: Any = None, post_warmup_hook: Any = None) -> None:
        del capture_inputs
        for _ in range(2):
            forward()
            if post_warmup_hook is not None:
                post_warmup_hook()
        with Recorder() as recorder:
            self.outputs[key] = forward()
        self.graphs[key] = recorder

    def can_run(self, _batch: Any, key: Any) -> bool:
        return key in self.graphs

    @contextlib.contextmanager
    def replay_session(self) -> Iterator[None]:
        yield

    def replay(self, key: Any, _batch: Any, **_more: Any) -> Any:
        for step in self.graphs[key].steps:
            step()
        REPLAYS[key.size] += 1
        return self.outputs[key]


REPLAYS: Counter[int] = Counter()  # by requests of the graph


class Event:
    """Nothing is ahead of the host here."""

    def __init__(self, **_options: Any) -> None: ...

    def record(self, *_: Any) -> None: ...

    def wait(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


def install() -> None:
    """SGLang's own runner of decode graphs, for the drafter and the target, over recorded passes."""
    from sglang.srt.model_executor import forward_batch_info
    from sglang.srt.model_executor.model_runner_components import cuda_graph_setup
    from sglang.srt.model_executor.runner import decode_cuda_graph_runner as runner
    from triton.runtime import interpreter

    torch.cpu.Event = Event
    plain = interpreter.GridExecutor.__call__

    def launch(self: Any, *args: Any, **kwargs: Any) -> None:
        if Recorder.active is None:
            plain(self, *args, **kwargs)
        else:
            Recorder.active.launch(plain, self, args, kwargs)

    def capture(*, model_runner: Any) -> Any:
        made = model_runner._decode_cuda_graph_runner_cls()(model_runner)
        return cuda_graph_setup.GraphCapture(runner=made, memory_phase="decode", memory_usage_gb=0, capture_time=0)

    interpreter.GridExecutor.__call__ = launch
    cuda_graph_setup.capture_decode_graph = capture
    runner.graph_capture = lambda **_: contextlib.nullcontext(SimpleNamespace(stream=None))
    runner.resolve_decode_backend = RecordedBackend
    mode = forward_batch_info.ForwardMode
    mode.is_cpu_graph = mode.is_cuda_graph
