"""What one arm of the suite is asked to do, each a function of the session and of plain values, with a plain result."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch

from sglang_ddtree.parity import split
from sglang_ddtree.parity.jobs_data import prompts
from sglang_ddtree.parity.session import Ask, Session


def tokens(session: Session, *, asks: list[dict[str, Any]], together: bool = False) -> dict[str, Any]:
    """Generate; one at a time or as one batch. Memory must be back where it was."""
    before = session.memory()
    jobs = [Ask(**ask) for ask in asks]
    answers = session.run(jobs) if together else [session.run([job])[0] for job in jobs]
    after = session.memory()
    return {
        "ids": [a.ids for a in answers],
        "rounds": [a.rounds for a in answers],
        "finish": [a.finish for a in answers],
        "to_abort": [number for number, job in enumerate(jobs) if job.abort_after is not None],
        "counters": counters(session),
        "memory_before": before,
        "memory_after": after,
        "leaked": leaked(before, after),
    }


def informed_tokens(session: Session, *, asks: list[dict[str, Any]], together: bool = False) -> dict[str, Any]:
    """`tokens` twice: the second time the drafter knows the first time's answers (parity.informed, where installed)."""
    informant = getattr(session.worker, "informant", None) if session.worker is not None else None
    first = tokens(session, asks=asks, together=together)
    if informant is None:
        return first
    informant.known = {tuple(ask["ids"]): [*ask["ids"], *ids] for ask, ids in zip(asks, first["ids"], strict=True)}
    before = first["counters"].get("counters", {})
    second = tokens(session, asks=asks, together=together)
    informant.known = {}
    return {
        **second,
        "counters_before": before,
        "leaked": first["leaked"] or second["leaked"],
        "uninformed_equal": first["ids"] == second["ids"],
    }


def multi_turn(session: Session, *, asks: list[dict[str, Any]], tail: list[int]) -> dict[str, Any]:
    """Each request, then one whose prompt is it, its answer and a tail: what the prefix cache kept must be right."""
    first = [session.run([Ask(**ask)])[0] for ask in asks]
    longer = [Ask([*ask["ids"], *a.ids, *tail], ask["params"]) for ask, a in zip(asks, first, strict=True)]
    second = [session.run([ask])[0] for ask in longer]
    return {
        "ids": [a.ids for a in (*first, *second)],
        "finish": [a.finish for a in (*first, *second)],
        "cached": [a.cached for a in second],
        "prompts": [len(ask["ids"]) for ask in asks],
        "rounds": [a.rounds for a in (*first, *second)],
        "counters": counters(session),
    }


def leaked(before: dict[str, int], after: dict[str, int]) -> bool:
    """Whether KV or request slots are missing; a prefix cache may hold KV on purpose and says so."""
    kept = after.get("cached", 0) - before.get("cached", 0)
    return after["kv"] + kept != before["kv"] or after["requests"] != before["requests"]


def counters(session: Session) -> dict[str, Any]:
    report = getattr(session.worker, "ddtree_counters", None) if session.worker is not None else None
    return report() if callable(report) else {}


@contextlib.contextmanager
def wrapped(owner: Any, name: str, wrap: Any) -> Iterator[None]:
    """Replace owner.name by wrap(original) while the block runs."""
    original = getattr(owner, name)
    setattr(owner, name, wrap(original))
    try:
        yield
    finally:
        setattr(owner, name, original)


def sync_audit(session: Session, *, asks: list[dict[str, Any]]) -> dict[str, Any]:
    """Decode with torch's sync debug mode at 'error' around each decode round: any synchronising call raises."""
    rounds = []

    def wrap(original: Any) -> Any:
        def audited(batch: Any, *args: Any, **kwargs: Any) -> Any:
            decode = not (batch.forward_mode.is_extend() or batch.is_extend_in_batch or batch.forward_mode.is_idle())
            if not decode:
                return original(batch, *args, **kwargs)
            torch.cuda.set_sync_debug_mode("error")
            try:
                return original(batch, *args, **kwargs)
            finally:
                torch.cuda.set_sync_debug_mode("default")
                rounds.append(len(batch.reqs))

        return audited

    with wrapped(session.scheduler.model_worker, "forward_batch_generation", wrap):
        answers = session.run([Ask(**ask) for ask in asks])
    return {"audited_rounds": len(rounds), "largest_batch": max(rounds, default=0), "ids": [a.ids for a in answers]}


def record_trees(session: Session, *, asks: list[dict[str, Any]], rounds: int) -> dict[str, Any]:
    """Every tree of some rounds: prefix, node tokens, parents and the target's log-probabilities at each row.

    Needs overlap off, so that the requests' output_ids hold all that is committed when a round starts.
    """
    from sglang_ddtree import verify

    worker, found = session.worker, []

    def wrap(original: Any) -> Any:
        def recorded(logits: torch.Tensor, positions: torch.Tensor, info: Any, reqs: list[Any], *rest: Any) -> Any:
            if len(found) < rounds:
                trees = worker.trees.rows(len(reqs))
                logprobs = torch.log_softmax(logits.float(), -1).view(len(reqs), worker.ddtree.rows, -1).cpu()
                for row, request in enumerate(reqs):
                    used = int(trees.num_nodes[row])
                    found.append(
                        {
                            "prefix": [int(i) for i in [*request.origin_input_ids, *request.output_ids]],
                            "tokens": trees.tokens[row, :used].tolist(),
                            "parent": trees.parent[row, :used].tolist(),
                            "depth": trees.depth[row, :used].tolist(),
                            "logprobs": [[round(v, 6) for v in line] for line in logprobs[row, :used].tolist()],
                        }
                    )
            return original(logits, positions, info, reqs, *rest)

        return recorded

    with wrapped(verify, "target_tokens", wrap):
        answers = session.run([Ask(**ask) for ask in asks])
    return {"trees": found, "ids": [a.ids for a in answers]}


def last_logprobs(session: Session, *, sequences: list[list[int]]) -> dict[str, Any]:
    """Log-probabilities after each sequence, from a prefill of its own: the oracle of `record_trees`."""
    rows: list[list[float]] = []

    def wrap(original: Any) -> Any:
        def recorded(output: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
            laws = torch.log_softmax(output.next_token_logits.float(), -1).cpu().tolist()
            rows.extend([round(value, 6) for value in law] for law in laws)  # as `record_trees` has them
            return original(output, forward_batch, *args, **kwargs)

        return recorded

    with wrapped(session.scheduler.tp_worker.model_runner, "sample", wrap):
        for number, ids in enumerate(sequences):
            session.run([Ask(ids, {"max_new_tokens": 1})])
            del rows[number + 1 :]  # under overlap one more round was enqueued before the end was seen
    return {"logprobs": rows}


def flipped_mask(session: Session, *, asks: list[dict[str, Any]]) -> dict[str, Any]:
    """The first round of each request with its own mask, and with one cell hidden: node 1's view of the root.

    The rows whose path does not hold node 1 must not change by a bit; node 1 and all below it must.
    """
    from sglang_ddtree import verify
    from sglang_ddtree import worker as module

    worker, rounds = session.worker, []

    def record(original: Any) -> Any:
        def recorded(logits: torch.Tensor, *rest: Any) -> Any:
            trees = worker.trees.rows(1)
            rounds.append((logits.clone(), trees.parent[0].tolist(), int(trees.num_nodes[0]), trees.tokens[0].tolist()))
            return original(logits, *rest)

        return recorded

    def hide(original: Any) -> Any:
        def hidden(trees: Any, lengths: torch.Tensor, mask: torch.Tensor) -> None:
            kept = trees.ancestors[:, 1, 0].clone()
            trees.ancestors[:, 1, 0] &= ~1
            original(trees, lengths, mask)
            trees.ancestors[:, 1, 0] = kept

        return hidden

    found = []
    for ask in asks:
        one = [Ask(ask["ids"], {**ask["params"], "max_new_tokens": 2, "ignore_eos": True})]
        rounds.clear()
        with wrapped(verify, "target_tokens", record):
            session.run(one)
            honest = rounds[0]
            rounds.clear()
            with wrapped(module, "write_tree_mask", hide):
                session.run(one)
        found.append(compare_rows(honest, rounds[0]))
    return {"rows": found, "wrong": [row for row in found if not row["as_expected"]]}


def compare_rows(honest: Any, flipped: Any) -> dict[str, Any]:
    """Which rows changed, against which should have: node 1 and its descendants."""
    logits, parent, used, tokens = honest
    below = {1}
    for row in range(2, used):
        if parent[row] in below:
            below.add(row)
    changed = {row for row in range(used) if not torch.equal(logits[row], flipped[0][row])}
    same_tree = tokens == flipped[3]
    return {
        "changed": sorted(changed),
        "below_node_1": sorted(below),
        "used": used,
        "as_expected": same_tree and changed == below,
    }


def timed(
    session: Session,
    *,
    batch: int,
    short: int,
    long: int,
    vocab: int = 0,
    lines: list[list[int]] | None = None,
    repeats: int = 5,
) -> dict[str, Any]:
    """Milliseconds of a decode round: the difference of a long and a short generation over the difference in rounds.

    The prompts are `lines`, as many as `batch`, or drawn from ids below `vocab`.
    """
    lines = prompts(batch, 24, vocab, seed=7) if lines is None else lines[:batch]
    samples = []
    for turn in range(repeats + 1):
        took, rounds, emitted = [], [], []
        for new in (short, long):
            torch.cuda.synchronize()
            start = time.perf_counter()
            answers = session.run([Ask(ids, {"max_new_tokens": new, "ignore_eos": True}) for ids in lines])
            torch.cuda.synchronize()
            took.append(time.perf_counter() - start)
            rounds.append(max(a.rounds or len(a.ids) for a in answers))
            emitted.append(sum(len(a.ids) for a in answers))
        if turn:  # the first one warms up
            samples.append(
                {
                    "ms_per_round": 1000 * (took[1] - took[0]) / max(rounds[1] - rounds[0], 1),
                    "tok_per_s": (emitted[1] - emitted[0]) / (took[1] - took[0]),
                    "tokens_per_round": (emitted[1] - emitted[0]) / batch / max(rounds[1] - rounds[0], 1),
                }
            )
    samples.sort(key=lambda s: s["ms_per_round"])
    return {**samples[len(samples) // 2], "spread_ms": [round(s["ms_per_round"], 4) for s in samples], "batch": batch}


def profiled(session: Session, *, vocab: int, batch: int, new: int, top: int = 40) -> dict[str, Any]:
    """Where a round's GPU time goes: by kernel (per round, prefill included once) and by stage (whole rounds only).

    `timeline` keeps the last rounds' kernels, [index into `names`, start, microseconds, launch], to look again later.
    """
    from torch.profiler import ProfilerActivity, profile

    lines = prompts(batch, 24, vocab, seed=7)
    asks = [Ask(ids, {"max_new_tokens": new, "ignore_eos": True}) for ids in lines]
    session.run(asks)
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
        answers = session.run(asks)
        torch.cuda.synchronize()
    rounds = max(max(a.rounds or len(a.ids) for a in answers), 1)
    cuda = torch.autograd.DeviceType.CUDA
    kernels = [
        split.Kernel(event.name, event.time_range.start, event.time_range.end, int(event.id))
        for event in seen.events()
        if event.device_type == cuda and not getattr(event, "is_user_annotation", False)  # a range spans its kernels
    ]
    return {"batch": batch, "rounds": rounds, **by_kernel(kernels, rounds, top), **by_stage(kernels)}


def by_kernel(kernels: list[split.Kernel], rounds: int, top: int) -> dict[str, Any]:
    """Sums by name, the dearest first."""
    sums: dict[str, list[float]] = {}
    for kernel in kernels:
        entry = sums.setdefault(kernel.name, [0.0, 0.0])
        entry[0] += kernel.end - kernel.start
        entry[1] += 1
    ranked = sorted(sums.items(), key=lambda item: -item[1][0])
    wall = max(k.end for k in kernels) - min(k.start for k in kernels) if kernels else 0.0
    return {
        "wall_us_per_round": round(wall / rounds, 1),
        "busy_us_per_round": round(sum(v[0] for v in sums.values()) / rounds, 1),
        "launches_per_round": round(sum(v[1] for v in sums.values()) / rounds, 1),
        "kernels": [
            {"name": name[:110], "us_per_round": round(t / rounds, 2), "per_round": round(n / rounds, 2)}
            for name, (t, n) in ranked[:top]
        ],
    }


def by_stage(kernels: list[split.Kernel], kept: int = 4) -> dict[str, Any]:
    """Microseconds of each stage of a round, or why they could not be told apart; and the last rounds as they were."""
    try:
        stages: dict[str, Any] = {"stages_us": split.split(kernels)}
    except ValueError as error:
        stages = {"stages_us": None, "stages_why": str(error)}
    line = [kernel for one, _until in split.cut(kernels)[-kept:] for kernel in one]
    names = list(dict.fromkeys(kernel.name[:110] for kernel in line))
    at = {name: number for number, name in enumerate(names)}
    zero = line[0].start if line else 0.0
    timeline = [
        [at[k.name[:110]], round(k.start - zero, 2), round(k.end - k.start, 2), k.launch] for k in line
    ]  # fmt: skip
    return {**stages, "names": names, "timeline": timeline}


JOBS = {
    job.__name__: job
    for job in (
        tokens,
        informed_tokens,
        multi_turn,
        sync_audit,
        record_trees,
        last_logprobs,
        flipped_mask,
        timed,
        profiled,
    )
}
