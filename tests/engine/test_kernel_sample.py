"""Seeded draws: equal to the reference and to SGLang's own sampler, and the walk's law is the target's."""

from __future__ import annotations

import ast
import itertools
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_trees import poison
from sglang_ddtree.kernels.sample import SamplingParams, sample_targets
from sglang_ddtree.reference import accept as ref_accept
from sglang_ddtree.reference import sampling as ref
from sglang_ddtree.reference import tree as ref_tree


def params_of(rows: list[tuple[float, int, float, float, int]], **options: object) -> SamplingParams:
    temperature, top_k, top_p, min_p, seed = zip(*rows, strict=True)
    return SamplingParams(
        temperatures=torch.tensor(temperature)[:, None],
        top_ks=torch.tensor(top_k, dtype=torch.int32),
        top_ps=torch.tensor(top_p),
        min_ps=torch.tensor(min_p),
        seeds=torch.tensor(seed),
        **options,
    )


def run(logits: torch.Tensor, positions: torch.Tensor, params: SamplingParams) -> list[int]:
    out = torch.empty(logits.shape[0], dtype=torch.int64)
    poison(out)
    sample_targets(logits, positions, params, out)
    return out.tolist()


ALL = 1 << 30  # SGLang's "no top-k"
REQUESTS = [(0.7, 20, 0.95, 0.0, 12345678901), (1.0, 1, 1.0, 0.0, -3), (1.3, 40, 0.5, 0.1, 2**62)]


def reference(logits: torch.Tensor, positions: torch.Tensor, rows: list, each: int) -> list[int]:
    drawn = []
    for i, row in enumerate(logits):
        t, k, p, m, seed = rows[i // each]
        temperature = float(np.float32(t))
        top_p, min_p = float(np.float32(p)), float(np.float32(m))
        drawn.append(
            ref.draw(row.numpy(), seed, int(positions[i]), temperature=temperature, top_k=k, top_p=top_p, min_p=min_p)
        )
    return drawn


@pytest.mark.parametrize("vocab", [3, 100, 5000])
def test_filtered_draws_equal_the_reference(vocab: int) -> None:
    torch.manual_seed(vocab)
    each = 6
    logits = torch.randn(3 * each, vocab) * 3
    positions = torch.randint(0, 10**6, (3 * each,))
    requests = [(t, min(k, vocab - 1), p, m, s) for t, k, p, m, s in REQUESTS]
    want = reference(logits, positions, requests, each)
    assert run(logits, positions, params_of(requests, max_top_k=40)) == want
    # The same law through the full sort, where a request has no top-k.
    assert run(logits, positions, params_of(requests, max_top_k=None)) == want
    open_ended = [(0.9, ALL, 0.9, 0.0, 5)] * 3
    want = reference(logits, positions, [(0.9, None, 0.9, 0.0, 5)] * 3, each)
    assert run(logits, positions, params_of(open_ended)) == want


def test_unfiltered_draws_equal_the_reference() -> None:
    torch.manual_seed(7)
    logits = torch.randn(4, 3000) * 2
    logits[1, 5] = float("nan")
    positions = torch.tensor([0, 1, 2, 2**31 - 1])
    requests = [(0.8, ALL, 1.0, 0.0, 99), (1.7, ALL, 1.0, 0.0, 2**40 + 1)]
    clean = torch.nan_to_num(logits, nan=-1e30)
    want = reference(clean, positions, [(t, None, p, m, s) for t, _, p, m, s in requests], 2)
    assert run(logits, positions, params_of(requests, filtered=False)) == want


def test_draws_equal_sglangs_sampler(sglang_src: Path, stock_kernel) -> None:
    """Against ``top_k_top_p_min_p_sampling_from_probs_torch`` and ``multinomial_with_seed`` themselves."""
    source = (sglang_src / "sglang/srt/layers/sampler.py").read_text()
    wanted = {"top_k_top_p_min_p_sampling_from_probs_torch", "multinomial_with_seed"}
    functions = [n for n in ast.parse(source).body if isinstance(n, ast.FunctionDef) and n.name in wanted]
    assert {f.name for f in functions} == wanted
    for function in functions:
        function.decorator_list = []  # torch.compile changes nothing of the values
    code = "from typing import Optional\n" + "\n".join(ast.unparse(f) for f in functions)
    scope = {"torch": torch, "murmur_hash32": stock_kernel("sampling/murmur_hash").murmur_hash32}
    exec(code, scope)
    torch.manual_seed(8)
    each, vocab = 5, 400
    logits = torch.randn(2 * each, vocab) * 3
    positions = torch.arange(2 * each) + 17
    requests = [(0.7, 20, 0.95, 0.0, 42), (1.2, 33, 0.8, 0.0, 2**33 + 7)]
    mine = params_of(requests, max_top_k=33)

    def rows(t: torch.Tensor) -> torch.Tensor:
        return t.reshape(-1).repeat_interleave(each)

    probs = torch.softmax(logits / rows(mine.temperatures)[:, None], dim=-1)
    args = (rows(mine.top_ks), rows(mine.top_ps), rows(mine.min_ps), False, rows(mine.seeds), positions)
    stock = scope["top_k_top_p_min_p_sampling_from_probs_torch"](probs.clone(), *args)
    assert run(logits, positions, mine) == stock.tolist()
    free = [(0.7, ALL, 1.0, 0.0, 42), (1.2, ALL, 1.0, 0.0, 2**33 + 7)]
    stock = scope["multinomial_with_seed"](torch.log(probs.double()), rows(mine.seeds), positions)
    assert run(logits, positions, params_of(free, filtered=False)) == stock.view(-1).tolist()


def test_a_draw_depends_on_nothing_but_its_row_seed_and_position() -> None:
    torch.manual_seed(9)
    row, other = torch.randn(700), torch.randn(700)
    alone = run(row[None], torch.tensor([31]), params_of([REQUESTS[0]], max_top_k=20))
    batch = run(
        torch.stack([other, row, other, other, row, row]), torch.tensor([30, 31, 32, 31, 31, 31]),
        params_of([REQUESTS[0], REQUESTS[0]], max_top_k=40),
    )  # fmt: skip
    assert [batch[1], batch[4], batch[5]] == alone * 3


def chi_square(counts: Counter, law: dict[tuple[int, ...], float], samples: int) -> float:
    rare = sum(p for p in law.values() if p * samples < 5)
    seen_rare = sum(counts[s] for s, p in law.items() if p * samples < 5)
    cells = [(counts[s], p) for s, p in law.items() if p * samples >= 5] + ([(seen_rare, rare)] if rare else [])
    assert sum(c for c, _ in cells) == samples, "something outside the law was emitted"
    statistic = sum((c - samples * p) ** 2 / (samples * p) for c, p in cells)
    degrees = len(cells) - 1
    return (statistic - degrees) / np.sqrt(2 * degrees)  # standard normal, nearly


@pytest.mark.parametrize(("budget", "top_p"), [(3, 1.0), (7, 0.85)])
def test_the_walk_emits_the_targets_law(budget: int, top_p: float) -> None:
    """Three tokens of a 4-token language model, emitted round by round through trees of sampled nodes."""
    rng = np.random.default_rng(budget)
    vocab, length, samples = 4, 3, 3000
    table = {
        prefix: rng.normal(size=vocab) * 1.2
        for n in range(length)
        for prefix in itertools.product(range(vocab), repeat=n)
    }
    logp = np.sort(np.log(rng.dirichlet(np.ones(vocab), size=2)).astype(np.float32), axis=1)[:, ::-1]
    ids = np.stack([rng.permutation(vocab) for _ in range(2)])
    law = {}
    for tokens in itertools.product(range(vocab), repeat=length):
        p = 1.0
        for n, token in enumerate(tokens):
            order, weights = ref.target_law(table[tokens[:n]], 1.0, vocab, top_p, 0.0)
            p *= float(weights[list(order).index(token)] / weights.sum())
        if p > 0:
            law[tokens] = p
    counts: Counter = Counter()
    tree = ref_tree.build_tree(logp, ids, 0, budget + 1)
    for seed in range(samples):
        emitted: list[int] = []
        while len(emitted) < length:
            target = np.zeros(budget + 1, dtype=np.int64)
            for row in range(tree.num_nodes):
                prefix = (*emitted, *(int(tree.tokens[r]) for r in tree.path(row)[1:]))
                if len(prefix) < length:
                    target[row] = ref.draw(table[prefix], seed, len(prefix), top_p=top_p)
            emitted += ref_accept.accept(tree, target).tokens
        counts[tuple(emitted[:length])] += 1
    assert abs(chi_square(counts, law, samples)) < 4.0


def test_the_law_test_can_fail() -> None:
    law = {(0,): 0.5, (1,): 0.5}
    assert chi_square(Counter({(0,): 1700, (1,): 1300}), law, 3000) > 4.0


def test_the_kernel_draws_the_law() -> None:
    rng = np.random.default_rng(12)
    logits = torch.from_numpy(rng.normal(size=5).astype(np.float32))
    samples = 600
    out = run(
        logits.expand(samples, 5).contiguous(),
        torch.arange(samples),
        params_of([(1.0, ALL, 1.0, 0.0, 77)], filtered=False),
    )
    order, weights = ref.target_law(logits.numpy(), 1.0, 5, 1.0, 0.0)
    law = {(int(t),): float(w / weights.sum()) for t, w in zip(order, weights, strict=True) if w > 0}
    assert abs(chi_square(Counter((t,) for t in out), law, samples)) < 4.0
