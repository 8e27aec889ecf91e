"""What the suite concludes from its arms' results: pure functions over plain values."""

from __future__ import annotations

from typing import Any

Result = dict[str, Any]


def first_difference(left: list[int], right: list[int]) -> int | None:
    """Index of the first differing token, None if equal."""
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return None if len(left) == len(right) else min(len(left), len(right))


def same_tokens(reference: Result, other: Result, jobs: list[int]) -> list[str]:
    """The requests of these jobs whose tokens or finish differ from the reference's; empty when all are equal."""
    wrong = []
    for number in jobs:
        want, got = reference["results"][number], other["results"][number]
        for row, (a, b) in enumerate(zip(want.get("ids", []), got.get("ids", []), strict=True)):
            at = first_difference(a, b)
            aborted = "ABORT" in want.get("finish", [""] * (row + 1))[row]
            if at is not None and not (aborted and at == min(len(a), len(b))):  # when an abort lands is not fixed
                wrong.append(f"job {number} request {row} differs at token {at} of {len(a)}/{len(b)}")
    return wrong + same_finishes(reference, other, jobs)


def same_finishes(reference: Result, other: Result, jobs: list[int]) -> list[str]:
    """The jobs whose requests end for other reasons than the reference's."""
    wrong = []
    for number in jobs:
        finishes = reference["results"][number].get("finish"), other["results"][number].get("finish")
        if all(finishes) and finishes[0] != finishes[1]:
            wrong.append(f"job {number} finishes {finishes[1]}, the reference {finishes[0]}")
    return wrong


def commits(result: Result) -> dict[str, Any]:
    """Of the informed jobs: how deep and how far off the spine the accepted paths went."""
    found = {"accept_length": [], "off_spine": 0}
    for job in result["results"]:
        after, before = job.get("counters", {}).get("counters"), job.get("counters_before")
        if after and before:
            trees = max(after["trees"] - before["trees"], 1)
            taken = after["accepted_per_tree"] * after["trees"] - before["accepted_per_tree"] * before["trees"]
            found["accept_length"].append(round(1 + taken / trees, 2))
            found["off_spine"] += after["accepted_off_spine"] - before["accepted_off_spine"]
    return found


def job_failures(result: Result) -> list[str]:
    """What the jobs themselves found wrong."""
    found = leaks(result) + result.get("apart", [])
    for number, job in enumerate(result["results"]):
        found += [f"job {number}: {line}" for line in job.get("wrong", [])]
        if job.get("audited_rounds") == 0:
            found.append(f"job {number} audited no round")
        found += [f"job {number}: {line}" for line in missed(job)]
    return found


def missed(job: Result) -> list[str]:
    """What a job was to meet and did not, so that its equal tokens would show nothing."""
    whole = [row for row in job.get("to_abort", []) if "ABORT" not in job["finish"][row]]
    cached = job.get("cached", [])
    unfound = [row for row, count in enumerate(cached) if not count]
    own = [row for row, count in enumerate(cached) if 0 < count <= job.get("prompts", [0] * len(cached))[row]]
    return [
        *(f"request {row} ended before it was aborted" for row in whole),
        *(f"request {row} found nothing in the prefix cache" for row in unfound),
        *(f"request {row} found no more than its first prompt in the prefix cache" for row in own),
    ]


def differences(reference: Result, other: Result, jobs: list[int]) -> list[dict[str, Any]]:
    """First differences: the sequence up to it, the request's parameters, the two tokens, for judging whether it was a
    near tie.
    """
    found = []
    for number in jobs:
        want, got = reference["results"][number], other["results"][number]
        for ask, a, b in zip(want["asks"], want["ids"], got["ids"], strict=True):
            at = first_difference(a, b)
            if at is not None and at < min(len(a), len(b)):
                line = {"sequence": [*ask["ids"], *a[:at]], "params": ask.get("params", {}), "tokens": [a[at], b[at]]}
                found.append({**line, "at": at, "of": len(a)})
    return found


def leaks(result: Result) -> list[str]:
    return [
        f"job {n}: {job['memory_before']} -> {job['memory_after']}"
        for n, job in enumerate(result["results"])
        if job.get("leaked")
    ]


def last_counters(result: Result) -> dict[str, Any]:
    """Counters of the last job that has any (they run on from the start)."""
    for job in reversed(result["results"]):
        found = job.get("counters", {}).get("counters")
        if found:
            return dict(found)
    return {}


def accept_length(result: Result) -> float | None:
    """Tokens a round over the first job, prefill's token not counted."""
    job = result["results"][0]
    rounds = sum(job.get("rounds", []))
    return round(sum(len(ids) - 1 for ids in job["ids"]) / rounds, 3) if rounds else None


def node_paths(tree: dict[str, Any]) -> list[list[int]]:
    """Each node's sequence: the prefix (which ends with the root's token) and the tokens from the root's child
    down to it.
    """
    paths: list[list[int]] = []
    for row, parent in enumerate(tree["parent"]):
        paths.append(list(tree["prefix"]) if row == 0 else [*paths[parent], tree["tokens"][row]])
    return paths


def oracle_sequences(trees: list[dict[str, Any]]) -> list[list[int]]:
    """Distinct sequences of all nodes, in order of appearance."""
    seen: dict[tuple[int, ...], None] = {}
    for tree in trees:
        for path in node_paths(tree):
            seen.setdefault(tuple(path))
    return [list(path) for path in seen]


def oracle_errors(
    trees: list[dict[str, Any]], sequences: list[list[int]], logprobs: list[list[float]]
) -> dict[str, Any]:
    """Largest and mean absolute difference between a node's law in the tree and its sequence's own, by depth."""
    law = {tuple(sequence): row for sequence, row in zip(sequences, logprobs, strict=True)}
    worst, total, count, top1 = 0.0, 0.0, 0, 0
    by_depth: dict[int, float] = {}
    siblings = 0
    for tree in trees:
        for row, path in enumerate(node_paths(tree)):
            want, got = law[tuple(path)], tree["logprobs"][row]
            error = max(abs(a - b) for a, b in zip(want, got, strict=True))
            worst, total, count = max(worst, error), total + error, count + 1
            depth = tree["depth"][row]
            by_depth[depth] = max(by_depth.get(depth, 0.0), error)
            top1 += want.index(max(want)) == got.index(max(got))
            siblings += row > 0 and tree["parent"].index(tree["parent"][row], 1) != row
    return {
        "nodes": count,
        "nodes_with_elder_sibling": siblings,
        "max_error": worst,
        "mean_error": total / max(count, 1),
        "top1_equal": top1,
        "max_error_by_depth": {str(k): round(v, 7) for k, v in sorted(by_depth.items())},
    }


def apart(answers: list[Result]) -> list[str]:
    """Where the ranks' answers differ from rank 0's: in a round, or in what a job emitted. Empty if they agree."""
    wrong, first = [], answers[0]
    for rank, other in enumerate(answers[1:], 1):
        pairs = list(zip(first["sums"], other["sums"], strict=False))
        at = next((n for n, (a, b) in enumerate(pairs) if a != b), None)
        if at is not None:
            wrong.append(f"rank {rank} parted from rank 0 in tree round {at} of {len(first['sums'])}")
        elif len(first["sums"]) != len(other["sums"]):
            wrong.append(f"rank {rank} had {len(other['sums'])} tree rounds, rank 0 {len(first['sums'])}")
        wrong += [
            f"rank {rank} emitted other tokens than rank 0 in job {job}"
            for job, (a, b) in enumerate(zip(first["results"], other["results"], strict=True))
            if a.get("ids") != b.get("ids")
        ]
    return wrong


def together(answers: list[Result]) -> Result:
    """One answer of an arm whose ranks have each given theirs: rank 0's, with where the others differ from it."""
    if len(answers) == 1:
        return answers[0]
    return {**answers[0], "ranks": len(answers), "apart": apart(answers)}
