"""Where a decode round's GPU time goes, stage by stage: a pure function over a profile's kernels.

Kernels that one CUDA graph launch runs share its correlation id, and a speculative round launches two graphs: the
drafter's and the target's. That, the order in time and the names of a few kernels tell the stages apart:

* draft: what prepares the block, and the drafter's graph up to the head;
* head: the product with the head's weights and the choice among its logits, in the drafter's graph;
* build: the tree, its mask, and the loading of the target graph's inputs;
* verify: the target's graph and what turns its logits into tokens;
* commit: acceptance and all that follows it, up to the next round's preparation.

Plain decoding has one graph, which counts as verify, and the rest as commit. `gaps` is the time in which no kernel ran.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections import Counter
from collections.abc import Sequence

STAGES = ("draft", "head", "build", "verify", "commit", "gaps")
PREPARE = ("_prepare_round_kernel", "_prepare_dflash_draft_block")  # a round's first own kernel, tree and chain
CHOICE = ("_topk_chunks_kernel", "_draft_topk1_partial", "argmax")  # the first look at the head's logits
BUILD = ("_build_tree_kernel",)
ACCEPT = ("_accept_kernel", "_dflash_accept_bonus")
PRODUCT = ("nvjet", "gemm", "gemv", "cutlass", "xmma")
GRAPH = 12  # kernels of one launch from which on it is a graph
BACK = 4  # kernels between the head's product and the first look at its logits, at most


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One kernel or copy on the GPU: start and end in microseconds, launch is the correlation id."""

    name: str
    start: float
    end: float
    launch: int

    def like(self, names: Sequence[str]) -> bool:
        lower = self.name.lower()
        return any(name.lower() in lower for name in names)


def graphs(kernels: Sequence[Kernel]) -> list[int]:
    """The launches that are graphs, in order of their first kernel."""
    count = Counter(kernel.launch for kernel in kernels)
    return list(dict.fromkeys(kernel.launch for kernel in kernels if count[kernel.launch] >= GRAPH))


def cut(kernels: Sequence[Kernel]) -> list[tuple[list[Kernel], float]]:
    """The whole rounds between two preparations, or between two graphs where nothing prepares (plain decoding): the
    kernels of each, and when the next one began.
    """
    ordered = sorted(kernels, key=lambda kernel: kernel.start)
    starts = [at for at, kernel in enumerate(ordered) if kernel.like(PREPARE)]
    if not starts:
        first: dict[int, int] = {}
        for at, kernel in enumerate(ordered):
            first.setdefault(kernel.launch, at)
        starts = [first[launch] for launch in graphs(ordered)]
    return [(list(ordered[a:b]), ordered[b].start) for a, b in itertools.pairwise(starts)]


def head_of(draft: Sequence[Kernel]) -> int:
    """Where the head begins in the drafter's graph: its product; the end if nothing looks at logits there."""
    choice = next((at for at, kernel in enumerate(draft) if kernel.like(CHOICE)), None)
    if choice is None:
        return len(draft)
    for at in range(choice - 1, max(choice - 1 - BACK, -1), -1):
        if draft[at].like(PRODUCT):
            return at
    return choice


def label(kernels: Sequence[Kernel]) -> list[str]:
    """The stage of each kernel of one round, in order of time. Raises ValueError for a round without graphs."""
    found = graphs(kernels)
    if not found:
        raise ValueError(f"no launch of the round holds {GRAPH} kernels: it ran without CUDA graphs")
    target = found[-1]
    drafted = [kernel for kernel in kernels if len(found) > 1 and kernel.launch == found[0]]
    head = {id(kernel) for kernel in drafted[head_of(drafted) :]}
    last = max(at for at, kernel in enumerate(kernels) if kernel.launch == target)
    began = min(at for at, kernel in enumerate(kernels) if kernel.launch == target)
    drafted_until = max((at for at, k in enumerate(kernels) if len(found) > 1 and k.launch == found[0]), default=-1)
    labels, accepted = [], False
    for at, kernel in enumerate(kernels):
        accepted = accepted or (at > last and (not drafted or kernel.like(ACCEPT)))
        if kernel.like(BUILD):
            labels.append("build")
        elif kernel.launch == target:
            labels.append("verify")
        elif id(kernel) in head:
            labels.append("head")
        elif at <= drafted_until:
            labels.append("draft")
        elif at < began:
            labels.append("build")
        else:
            labels.append("commit" if accepted else "verify")
    return labels


def idle(kernels: Sequence[Kernel], until: float) -> float:
    """Microseconds from the first start to `until` in which nothing ran; streams may overlap."""
    reached, gaps = kernels[0].start, 0.0
    for kernel in kernels:
        gaps += max(kernel.start - reached, 0.0)
        reached = max(reached, kernel.end)
    return gaps + max(until - reached, 0.0)


def split(kernels: Sequence[Kernel]) -> dict[str, float]:
    """Microseconds of each stage, medians over the whole rounds seen; 'rounds' says over how many.

    Raises ValueError where the stages cannot be told apart.
    """
    rounds = cut(kernels)
    spans: dict[str, list[float]] = {stage: [] for stage in STAGES}
    width = statistics.median_low([len(graphs(line)) for line, _until in rounds]) if rounds else 0
    for line, until in rounds:
        if len(graphs(line)) != width:  # something else ran in between, a prefill for one
            continue
        took = dict.fromkeys(STAGES, 0.0)
        for kernel, stage in zip(line, label(line), strict=True):
            took[stage] += kernel.end - kernel.start
        took["gaps"] = idle(line, until)
        for stage in STAGES:
            spans[stage].append(took[stage])
    if not spans["verify"]:
        raise ValueError(f"{len(rounds)} rounds were seen, none whole")
    return {stage: round(statistics.median(spans[stage]), 2) for stage in STAGES} | {"rounds": len(spans["verify"])}
