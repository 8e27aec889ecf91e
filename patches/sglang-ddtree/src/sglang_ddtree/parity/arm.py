"""One arm of the suite in a process of its own: `python -m sglang_ddtree.parity.arm SPEC.json OUT.json [RANK]`.

SPEC: {"argv": [...], "jobs": [{"job": NAME, ...arguments}], "environ": {...}, "seed": 1 or null (keep the weights),
"float32": bool, "informed": bool, "late_seeds": bool, "extra_buffer": bool, "gpu_lock": PATH or null,
"memory": [shares, of], "tp": 1, "store": PATH or null}.
OUT: {"ok": true, "start_s": ..., "states": "snapshots" or "records", "prefix_cache": the strategy by which recurrent
states are kept for later requests or null, "results": [...]}
or {"ok": false, "error": traceback}.
With tp above 1 the arm is as many processes, told their rank, that find each other through the file `store`, which must
not be there yet. All do the jobs; OUT then has `sums`, one of each tree round, in which ranks must agree.
Arms load side by side, but one at a time computes: processes that share a GPU by slices of time slow each other down
more than they gain (512 tokens of plain decoding took 1.35 s alone and 25 s among five, on an H200). An arm that has
jobs in EXCLUSIVE loads in its turn, too, lest its weights disturb another one's clock. Where weights of several arms do
not fit side by side, an arm takes its shares of the memory once it has imported, and keeps them to its end.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

EXCLUSIVE = ("timed", "profiled")
QUARTERS = 4


def seeded_dummies(seed: int) -> None:
    """Make SGLang's dummy loader draw weights that branch, before anything (fused copies included) reads them."""
    from sglang.srt.model_loader import loader

    from sglang_ddtree.parity.weights import reinitialise

    loader.initialize_dummy_weights = lambda model, *_args, **_kwargs: reinitialise(model, seed)


@contextlib.contextmanager
def turn(path: str | None, places: int = 1) -> Iterator[None]:
    """Hold one of `places` locks."""
    if path is None:
        yield
        return
    while True:
        for place in range(places):
            with Path(f"{path}.{place}").open("a") as handle:
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError:
                    continue
                yield
                return
        time.sleep(0.1)


@contextlib.contextmanager
def memory(path: str | None, shares: int, of: int) -> Iterator[None]:
    """Hold shares/of of the GPU's memory: so many of QUARTERS locks, whatever parts others count in. An arm that takes
    none waits for nobody.

    Only one arm at a time gathers its locks, so that two cannot each hold half of what both want, and one that wants
    them all is not overtaken for ever by those that want few.
    """
    wanted, rest = divmod(QUARTERS * shares, of)
    if rest or not 0 <= wanted <= QUARTERS:
        raise ValueError(f"{shares} of {of} shares of memory: an arm takes none, or quarters of it")
    with contextlib.ExitStack() as held:
        if path and wanted:
            with Path(f"{path}.memory").open("a") as gate:
                fcntl.flock(gate, fcntl.LOCK_EX)
                for _ in range(wanted):
                    held.enter_context(turn(f"{path}.memory", QUARTERS))
        yield


def seeds_after_start() -> None:
    """Let the sampler use request seeds, as deterministic inference does, without its attention kernels."""
    from sglang.srt.runtime_context import get_context

    get_context().override("parity.seeds", enable_deterministic_inference=True)


def cache_states_of_text_models() -> None:
    """SGLang caches recurrent states for the vision wrapper of Qwen3.5 but does not list its text-only twin."""
    from sglang.srt.arg_groups import overrides

    for name in ("_MAMBA_EXTRA_BUFFER_ARCHS", "_MAMBA_RADIX_CACHE_ARCHS"):
        setattr(overrides, name, getattr(overrides, name) | {"Qwen3_5ForCausalLM"})


def kept_states(session: Any) -> str:
    """How this server keeps a tree's states, by what it has allocated."""
    from sglang_ddtree import records, states

    pool = session.scheduler.req_to_token_pool
    return states.SNAPSHOTS if records.of_pool(pool) is None else states.RECORDS


def cached_by(session: Any) -> str | None:
    """The strategy by which this server keeps recurrent states for later requests; None if it keeps none."""
    from sglang.srt.arg_groups.overrides import resolved_view

    view = resolved_view(session.server_args)
    kept = view.uses_mamba_radix_cache and not view.disable_radix_cache
    return str(view.mamba_radix_cache_strategy) if kept else None


def run(spec: dict[str, Any], rank: int = 0) -> dict[str, Any]:
    start = time.perf_counter()
    if spec.get("tp", 1) > 1:
        os.environ["SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"] = f"file://{spec['store']}"
    from sglang_ddtree.parity.session import Session, import_sglang

    import_sglang()  # half a minute on the CPU, best spent while others have the GPU's memory
    if spec.get("float32"):
        from sglang_ddtree.parity.float32 import use_native_layers

        use_native_layers()
    if spec.get("seed") is not None:
        seeded_dummies(spec["seed"])
    if spec.get("informed"):
        from sglang_ddtree.parity.informed import install

        install()
    if spec.get("extra_buffer"):
        cache_states_of_text_models()
    timed = any(entry["job"] in EXCLUSIVE for entry in spec["jobs"])
    seen = watched(spec)
    lock = spec.get("gpu_lock") if rank == 0 else None  # the others wait for rank 0 wherever it waits
    with memory(lock, *spec.get("memory", (0, 1))):
        with turn(lock if timed else None):
            begin = time.perf_counter()
            session = Session(spec["argv"], rank)
        if spec.get("late_seeds"):
            seeds_after_start()
        now = time.perf_counter()
        results = [answered(session, dict(entry), lock, seen) for entry in spec["jobs"]]
    took = {"start_s": round(now - start, 1), "load_s": round(now - begin, 1)}
    rounds = {} if seen is None else {"sums": [int(one) for one in seen.sums]}
    kept = {"states": kept_states(session), "prefix_cache": cached_by(session)}
    return {"ok": True, **took, **kept, "results": results, **rounds}


def watched(spec: dict[str, Any]) -> Any:
    """Where each tree round leaves its sum (agreement.Watch); None on one GPU."""
    if spec.get("tp", 1) == 1:
        return None
    from sglang_ddtree.parity.agreement import watch

    return watch()


def answered(session: Any, entry: dict[str, Any], lock: str | None, seen: Any = None) -> dict[str, Any]:
    """One job's result, taken in its turn on the GPU; while time is measured, no round is summed."""
    from sglang_ddtree.parity.jobs import JOBS

    job = JOBS[entry.pop("job")]
    unseen = seen.pause() if seen is not None and job.__name__ in EXCLUSIVE else contextlib.nullcontext()
    with turn(lock), unseen, lockstep(seen is not None):
        begin = time.perf_counter()
        found = job(session, **entry)
        return {"job": job.__name__, **found, "took_s": round(time.perf_counter() - begin, 2)}


@contextlib.contextmanager
def lockstep(several: bool) -> Iterator[None]:
    """A job of several ranks: none begins before rank 0 has its turn, nor goes on before all have ended.

    They wait on the CPU. A rank that began by itself would wait in a kernel for the sums of the others, and its GPU
    would give it every other slice of time beside an arm that is on the clock.
    """
    if several:
        meet()
    yield
    if several:
        meet()


def meet() -> None:
    """Wait until all ranks of this model are here."""
    from sglang.srt.distributed import get_tp_group

    get_tp_group().barrier()


def main(spec_path: str, out_path: str, rank: int = 0) -> int:
    spec = json.loads(Path(spec_path).read_text())
    os.environ.update(spec.get("environ", {}))
    try:
        result = run(spec, rank)
    except BaseException:  # noqa: BLE001  the suite reads the traceback; nobody watches this process
        result = {"ok": False, "error": traceback.format_exc()}
    Path(out_path).write_text(json.dumps(result))
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    code = main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:4]))
    sys.stdout.flush()
    os._exit(code)  # the scheduler's daemon threads would hold the process
