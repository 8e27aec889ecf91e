"""Arms of the real engine on a CPU: `python -m sglang_on_cpu SPEC.json OUT.json [SPEC OUT ..]`.

SGLang is imported once; each arm is a fork of it, since a scheduler leaves global state behind. A spec is that of
`sglang_ddtree.parity.arm`, with "fault": a name of FAULTS or null, "graphs": whether decode graphs are recorded
(graphs_on_cpu), and "tp": as many forks, which talk over gloo.
Triton runs every kernel in its interpreter; what follows stands where SGLang asks for a GPU or for a package that
only a GPU needs, and nowhere else.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import graphs_on_cpu
import torch
import torchvision_stub

STATE_SCATTERS = ("fused_mamba_state_scatter_with_mask", "fused_conv_window_scatter_with_mask")


def prepare() -> None:
    """Import SGLang with the plugin and put the stand-ins in, before any arm is built."""
    torchvision_stub.install()
    stand_in_for_the_device()
    quicken_interpreter()
    late_bound_math()
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.kernels.ops.attention.fla import layernorm_gated
    from sglang.kernels.ops.mamba import mamba_state_scatter_triton as scatter
    from sglang.srt.layers.rotary_embedding import base
    from sglang.srt.managers import scheduler  # noqa: F401  so that the arms need not import it again
    from sglang.srt.models import registry  # noqa: F401
    from sglang.srt.speculative import dflash_worker_v2

    base._is_cpu = True  # else rotary embeddings import another package's kernel, which native layers never call
    layernorm_gated._get_sm_count = lambda _device: 1  # only sizes the launch grid
    dflash_worker_v2.is_cuda = lambda: True  # take the paths of Triton kernels, as on a GPU
    for name in STATE_SCATTERS:
        setattr(scatter, name, with_gpu_tensors(getattr(scatter, name)))
    admit_dflash()
    admit_kept_states()


def stand_in_for_the_device() -> None:
    torch.cpu.device = lambda _index: contextlib.nullcontext()  # entered around launches
    torch.Tensor.record_stream = lambda *_: None  # there are no streams to record
    for name in ("zeros", "empty"):
        setattr(torch, name, on_cpu(getattr(torch, name)))
    torch.tensor = unpinned(torch.tensor)
    torch.Tensor.pin_memory = lambda self, *_: self


def on_cpu(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The pool of recurrent states names the device cuda itself."""

    def made(*args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        return make(*args, device="cpu" if str(device).startswith("cuda") else device, **kwargs)

    return made


def unpinned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Memory is pinned for copies to a GPU, and torch refuses to where none is."""

    def made(*args: Any, **kwargs: Any) -> torch.Tensor:
        return make(*args, **{**kwargs, "pin_memory": False})

    return made


def quicken_interpreter() -> None:
    """Leave out what the interpreter repeats at every launch and operation: a third of the time, and no result."""
    import triton.language as tl
    from triton.runtime import interpreter

    np_dtype = interpreter._get_np_dtype
    np_scalar, names = functools.cache(np_dtype), functools.cache(dir)

    def get_np_dtype(kind: Any) -> Any:
        return np_scalar(kind) if type(kind) is tl.dtype else np_dtype(kind)

    def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
        for name in names(package):
            member = getattr(package, name)
            if tl.core.is_builtin(member):
                interpreter._patch_attr(package, name, member, builder, scope)

    interpreter._get_np_dtype, interpreter._patch_builtin = get_np_dtype, patch_builtin
    options = dataclasses.replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
    interpreter.interpreter_builder.options = options  # else each sum of integers is computed twice, as int64 too


def late_bound_math() -> None:
    """SGLang binds `exp = tl.exp` on import; the interpreter puts its own functions into `tl` at each launch."""
    import triton.language as tl
    from sglang.kernels.ops.attention.fla import op

    for name in ("exp", "exp2", "log", "log2"):
        setattr(op, name, lambda x, name=name: getattr(tl, name)(x))


def with_gpu_tensors(function: Callable[..., Any]) -> Callable[..., Any]:
    """The commit of recurrent states asks its tensors whether they are a GPU's, then launches a Triton kernel."""

    def called(*args: Any, **kwargs: Any) -> Any:
        torch.Tensor.is_cuda = True
        try:
            return function(*args, **kwargs)
        finally:
            del torch.Tensor.is_cuda

    return called


def admit_dflash() -> None:
    """SGLang admits DFLASH on GPUs only; nothing else in this function looks at the device."""
    from sglang.srt.arg_groups import speculative_hook

    original = speculative_hook._handle_dflash

    def handle(server_args: Any) -> None:
        server_args.device = "cuda"
        try:
            original(server_args)
        finally:
            server_args.device = "cpu"

    speculative_hook._handle_dflash = handle


def admit_kept_states() -> None:
    """SGLang keeps recurrent states for a prefix cache on GPUs only; the kernels that do it are Triton's."""
    from sglang.srt import server_args

    original = server_args.ServerArgs._validate_mamba_extra_buffer

    def validate(self: Any, *args: Any) -> None:
        is_cuda, server_args.is_cuda = server_args.is_cuda, lambda: True
        try:
            original(self, *args)
        finally:
            server_args.is_cuda = is_cuda

    server_args.ServerArgs._validate_mamba_extra_buffer = validate


def commit_of_the_root() -> None:
    """Recurrent states stay behind the root, whatever was accepted."""
    from sglang_ddtree import worker

    original = worker.commit_mamba_states_after_verify

    def commit(target: Any, batch: Any, lengths: torch.Tensor, *rest: Any) -> Any:
        return original(target, batch, torch.ones_like(lengths), *rest)

    worker.commit_mamba_states_after_verify = commit


def rows_in_a_chain() -> None:
    """Each row of the tree continues the recurrent state of the row before it: a sibling that of its sibling."""
    from sglang_ddtree import info

    original = info.verify_input

    def verify_input(resolved: Any, *, next_token: Any, next_sibling: Any, **rest: Any) -> Any:
        if next_token is not None:
            chain = torch.arange(1, next_token.shape[1] + 1).to(next_token).repeat(len(next_token), 1)
            chain[:, -1] = -1
            next_token, next_sibling = chain, torch.full_like(next_sibling, -1)
        return original(resolved, next_token=next_token, next_sibling=next_sibling, **rest)

    info.verify_input = verify_input


def keys_left_in_place() -> None:
    """Keys and values of an accepted path stay in the slots of their rows."""
    from sglang_ddtree.worker import DDTreeWorker

    original = DDTreeWorker._commit

    def commit(self: Any, accept: Any, slots: torch.Tensor, *rest: Any) -> None:
        accept.src_slots.copy_(accept.tgt_slots)
        original(self, accept, slots, *rest)

    DDTreeWorker._commit = commit


def records_in_a_chain() -> None:
    """What rows_in_a_chain does, to the kernels that leave records: they read no links."""
    from sglang_ddtree.kernels import gdn

    original = gdn.gdn_tree

    def gdn_tree(*args: Any, ancestors: torch.Tensor, **rest: Any) -> torch.Tensor:
        chain = torch.tensor([(2 << row) - 1 for row in range(ancestors.shape[1])])[None, :, None]
        return original(*args, ancestors=chain.expand_as(ancestors).contiguous(), **rest)

    gdn.gdn_tree = gdn_tree


def records_of_the_widest() -> None:
    """Mode auto: every round's records are read as the widest's, whatever width has written them."""
    from sglang_ddtree.kernels.hybrid import HybridTree

    original, seen = HybridTree.commit, []  # type: tuple[Any, list[HybridTree]]

    def commit(self: HybridTree, *args: Any, **rest: Any) -> None:
        seen.append(self)
        original(max(seen, key=lambda kept: kept.tree.width), *args, **rest)

    HybridTree.commit = commit  # type: ignore[method-assign]


def trees_replaced_after_capture() -> None:
    """Rounds go on in trees that no captured pass knows. Without graphs nobody would notice."""
    from sglang_ddtree import records
    from sglang_ddtree.records_worker import RecordsWorker

    original = RecordsWorker.init_cuda_graphs

    def init_cuda_graphs(self: Any) -> None:
        original(self)
        pool = self._target_worker.model_runner.req_to_token_pool
        copies = {name: tensor.clone() for name, tensor in vars(self.trees).items()}
        self.trees = dataclasses.replace(self.trees, **copies)
        setattr(pool.mamba_pool, records._ATTRIBUTE, dataclasses.replace(records.of_pool(pool), tree=self.trees))

    RecordsWorker.init_cuda_graphs = init_cuda_graphs


def kept_behind_the_path() -> None:
    """The state for the prefix cache is that behind the whole path, also where the path goes past its place."""
    from sglang.srt.speculative import spec_utils

    original = spec_utils._verify_commit_step_indices

    def indices(**given: Any) -> tuple[Any, Any]:
        last, steps = original(**given)
        return last, None if steps is None else torch.where(steps >= 0, last, steps)

    spec_utils._verify_commit_step_indices = indices


FAULTS = {
    fault.__name__: fault
    for fault in (
        commit_of_the_root, rows_in_a_chain, keys_left_in_place, records_in_a_chain, records_of_the_widest,
        trees_replaced_after_capture, kept_behind_the_path,
    )
}  # fmt: skip


def told_tokens(session: Any, *, asks: list[dict[str, Any]], answers: str, together: bool = False) -> dict[str, Any]:
    """`tokens` with a drafter that knows the answers: those an arm that ran before wrote into the file `answers`."""
    from sglang_ddtree.parity.jobs import tokens

    asked = json.loads(Path(answers.replace(".out.", ".spec.")).read_text())["jobs"][0]["asks"]
    lines = json.loads(Path(answers).read_text())["results"][0]["ids"]
    known = {tuple(ask["ids"]): [*ask["ids"], *line] for ask, line in zip(asked, lines, strict=True)}
    session.worker.informant.known = known
    found = tokens(session, asks=asks, together=together)
    return {**found, "overlap": bool(session.scheduler.enable_overlap), "replays": dict(graphs_on_cpu.REPLAYS)}


def told_turns(session: Any, *, asks: list[dict[str, Any]], tail: list[int], answers: str) -> dict[str, Any]:
    """`multi_turn` with a drafter that knows both turns of an arm that ran before."""
    from sglang_ddtree.parity.jobs import multi_turn

    lines = json.loads(Path(answers).read_text())["results"][0]["ids"]
    known = {}
    for ask, first, second in zip(asks, lines[: len(asks)], lines[len(asks) :], strict=True):
        longer = [*ask["ids"], *first, *tail]
        known |= {tuple(ask["ids"]): [*ask["ids"], *first], tuple(longer): [*longer, *second]}
    session.worker.informant.known = known
    return multi_turn(session, asks=asks, tail=tail)


def timed_and_told_tokens(session: Any, **given: Any) -> dict[str, Any]:
    """`told_tokens` behind what mode auto does at its start: replays of every width's graphs, here on no clock."""
    from sglang_ddtree.auto.timing import measure_widths

    def timer(work: Callable[[], None]) -> float:
        work()
        return 1.0

    table = measure_widths(session.worker, timer)
    return {**told_tokens(session, **given), "batches": list(table.batches)}


def among_ranks(ranks: int) -> None:
    """What SGLang's groups ask of a CPU beyond gloo."""
    from sglang.srt.distributed.parallel_state import GroupCoordinator

    os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join("0" * ranks)  # for a package that is not installed
    # The operator in front of it, for compiled graphs, is registered for GPUs.
    GroupCoordinator.all_gather_into_tensor = GroupCoordinator._all_gather_into_tensor


def arm(spec: str, out: str, rank: int = 0) -> int:
    from sglang_ddtree.parity import arm, jobs

    jobs.JOBS |= {job.__name__: job for job in (told_tokens, told_turns, timed_and_told_tokens)}
    given = json.loads(Path(spec).read_text())
    if given["fault"] is not None:
        FAULTS[given["fault"]]()
    if given["graphs"]:
        graphs_on_cpu.install()
    if given["tp"] > 1:
        among_ranks(given["tp"])
    return arm.main(spec, f"{out}.{rank}" if rank else out, rank)


def forked(spec: str, out: str, rank: int) -> int:
    """The process of an arm, or of one of its ranks."""
    sys.stdout.flush()
    sys.stderr.flush()
    if child := os.fork():
        return child
    code = 1
    try:
        code = arm(spec, out, rank)
    finally:
        sys.stdout.flush()
        os._exit(code)  # the scheduler's daemon threads would hold the process


def main(paths: list[str]) -> None:
    prepare()
    for spec, out in zip(paths[::2], paths[1::2], strict=True):
        left = {forked(spec, out, rank) for rank in range(json.loads(Path(spec).read_text())["tp"])}
        while left:
            ended, status = os.wait()
            left.discard(ended)
            for other in left if status else ():
                os.kill(other, signal.SIGKILL)  # it would wait for the rank that failed


if __name__ == "__main__":
    main(sys.argv[1:])
