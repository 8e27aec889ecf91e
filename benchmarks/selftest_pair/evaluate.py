"""What the pair is worth: bits per byte of the target, and the accept length of the drafter's chains and trees.

Greedy decoding is deterministic, so acceptance needs no serving loop: generate once, draft a block at every position of
the generated text, then walk the text round by round and count what each verifier would have accepted.
"""

from __future__ import annotations

import heapq
import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.selftest_pair.model_drafter import Drafter
from benchmarks.selftest_pair.model_target import Target

TOP = 16


@torch.no_grad()
def bits_per_byte(target: Target, tokens: np.ndarray, lengths: np.ndarray, sizes: np.ndarray, window: int) -> float:
    """Held-out code length: each document is cut into windows, each window predicted from its own start."""
    device = target.lm_head.weight.device
    rows, used_bytes, start = [], 0.0, 0
    for length, size in zip(lengths, sizes, strict=True):
        whole = (length // window) * window
        rows += list(tokens[start : start + whole].reshape(-1, window))
        used_bytes += size * whole / length
        start += length
    data = torch.from_numpy(np.stack(rows).astype(np.int64))
    nats = 0.0
    for part in data.split(32):
        ids = part.to(device)
        hidden, _ = target(ids)
        logits = target.lm_head(hidden[:, :-1]).float()
        nats += F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum").item()
        # The first token of a window has no context: charge it a uniform code.
        nats += ids.shape[0] * math.log(target.config.vocab_size)
    return nats / math.log(2) / used_bytes


@torch.no_grad()
def draft_everywhere(target: Target, drafter: Drafter, tokens: Tensor, first: int) -> tuple[Tensor, Tensor]:
    """Top tokens and log-probabilities [N, anchors, block - 1, TOP] of a block at each position from `first` on."""
    block = drafter.config.block_size
    anchors = torch.arange(first, tokens.shape[1] - block + 1, device=tokens.device)
    ids, scores = [], []
    for rows in tokens.split(64):
        _, features = target(rows, capture=drafter.config.target_layer_ids)
        parts = []
        for some in anchors.split(16):
            hidden = drafter(target.model.embed_tokens, rows, features, some)
            parts.append(target.lm_head(hidden).float().log_softmax(-1).topk(TOP))
        ids.append(torch.cat([p.indices for p in parts], 1).to("cpu", torch.int32))
        scores.append(torch.cat([p.values for p in parts], 1).cpu())
    return torch.cat(ids), torch.cat(scores)


def tree_depth(ids: np.ndarray, scores: np.ndarray, truth: np.ndarray, budget: int) -> int:
    """How deep `truth` goes inside the best-first tree of `budget` nodes."""
    rows = scores.tolist()
    match = [np.flatnonzero(ids[d] == truth[d]) for d in range(len(truth))]
    wanted = [int(m[0]) if m.size else -1 for m in match]
    heap = [(-rows[0][0], (0,))]
    best = 0
    for _ in range(budget):
        if not heap:
            break
        cost, path = heapq.heappop(heap)
        depth, rank = len(path), path[-1]
        if all(r == w for r, w in zip(path, wanted, strict=False)):
            best = max(best, depth)
        if rank + 1 < TOP:
            step = rows[depth - 1][rank] - rows[depth - 1][rank + 1]
            heapq.heappush(heap, (cost + step, (*path[:-1], rank + 1)))
        if depth < len(rows):
            heapq.heappush(heap, (cost - rows[depth][0], (*path, 0)))
    return best


def accept_lengths(tokens: np.ndarray, ids: np.ndarray, scores: np.ndarray, first: int, budget: int) -> list[int]:
    """Tokens per round, the target's own token included; budget 0 is the linear verifier."""
    lengths = []
    block = ids.shape[1] + 1
    position = first
    while position + block <= len(tokens):
        row = position - first
        truth = tokens[position + 1 : position + block]
        if budget:
            depth = tree_depth(ids[row], scores[row], truth, budget)
        else:
            wrong = np.flatnonzero(ids[row, :, 0] != truth)
            depth = int(wrong[0]) if wrong.size else block - 1
        lengths.append(depth + 1)
        position += depth + 1
    return lengths


def acceptance(
    target: Target, drafter: Drafter, prompts: Tensor, length: int, temperature: float, budgets: tuple[int, ...]
) -> dict[str, float]:
    first = prompts.shape[1]
    heat = torch.full((prompts.shape[0],), temperature, device=prompts.device)
    tokens = target.generate(prompts, length, heat)
    ids, scores = draft_everywhere(target, drafter, tokens, first)
    text = tokens.cpu().numpy()
    report = {}
    for budget in (0, *budgets):
        rounds = [
            n
            for row in range(len(text))
            for n in accept_lengths(text[row], ids[row].numpy(), scores[row].numpy(), first, budget)
        ]
        report["linear" if budget == 0 else f"tree-{budget}"] = round(float(np.mean(rounds)), 3)
    unique = [len({tuple(row[i : i + 8]) for i in range(first, length - 8)}) / (length - 8 - first) for row in text]
    report["distinct_8grams"] = round(float(np.mean(unique)), 3)
    return report
