"""Every kernel against its oracle on this machine's device, at the sizes of a served model.

``run_checks(device)`` is what the GPU tests assert, what the kernel benchmark demands before it reports a
figure, and cheap enough (seconds) to run on a host. ``small=True`` shrinks the sizes so that Triton's
interpreter can run the same code.
"""

import dataclasses
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from sglang_ddtree.kernels import gdn
from sglang_ddtree.kernels.accept import accept_tree
from sglang_ddtree.kernels.buffers import AcceptBuffers, TreeBuffers, TreeCounters
from sglang_ddtree.kernels.build import build_tree
from sglang_ddtree.kernels.mask import write_tree_mask
from sglang_ddtree.kernels.nested import count_nested
from sglang_ddtree.kernels.sample import SamplingParams, sample_targets
from sglang_ddtree.kernels.shadow import ShadowRing, shadow_step
from sglang_ddtree.kernels.slots import prepare_round
from sglang_ddtree.kernels.topk import draft_topk, merge_topk
from sglang_ddtree.reference import accept as ref_accept
from sglang_ddtree.reference import examples
from sglang_ddtree.reference import gdn as ref_gdn
from sglang_ddtree.reference import nested as ref_nested
from sglang_ddtree.reference import sampling as ref_sampling
from sglang_ddtree.reference import shadow as ref_shadow
from sglang_ddtree.reference import topk as ref_topk
from sglang_ddtree.reference import tree as ref_tree


@dataclass(frozen=True)
class Sizes:
    """What the checks run on."""

    device: str
    vocab: int = 248320
    requests: int = 5
    rows: tuple[int, ...] = (2, 9, 16, 17, 33, 64, 65)
    k_dim: int = 128
    heads: int = 4
    value_heads: int = 12
    channels: int = 2 * 4 * 128 + 12 * 128


SMALL = Sizes("cpu", vocab=5000, requests=2, rows=(2, 9, 17), k_dim=16, heads=1, value_heads=2, channels=40)


class CheckError(AssertionError):
    """A kernel differs from its oracle."""


def _same(name: str, got: torch.Tensor, want: np.ndarray) -> None:
    array = got.cpu().numpy()
    if not np.array_equal(array, want):
        where = np.argwhere(array != want)[:3].tolist() if array.shape == want.shape else "shape"
        raise CheckError(f"{name}: {int((array != want).sum())} cells differ, first at {where}")


def _close(name: str, got: torch.Tensor, want: np.ndarray, atol: float, rtol: float = 0.0) -> float:
    error = np.abs(got.double().cpu().numpy() - want)
    error[np.isclose(got.double().cpu().numpy(), want, equal_nan=False) & ~np.isfinite(want)] = 0.0  # -inf = -inf
    worst = float(np.nanmax(np.where(np.isfinite(want), error, 0.0), initial=0.0))
    if not bool((error <= atol + rtol * np.abs(np.where(np.isfinite(want), want, 0.0))).all()):
        raise CheckError(f"{name}: off by up to {worst:.3g}, allowed {atol:.3g} + {rtol:.3g} relative")
    return worst


def buffers_of(
    trees: list[ref_tree.Tree], seq_lens: list[int], device: str = "cpu", conv_width: int = 4
) -> TreeBuffers:
    """The kernels' view of reference trees."""

    def stack(rows: list[np.ndarray], dtype: torch.dtype) -> torch.Tensor:
        return torch.from_numpy(np.stack(rows)).to(device=device, dtype=dtype).contiguous()

    i32, i64 = torch.int32, torch.int64
    return TreeBuffers(
        tokens=stack([t.tokens for t in trees], i64),
        positions=stack([t.depth + n for t, n in zip(trees, seq_lens, strict=True)], i64),
        parent=stack([t.parent for t in trees], i32),
        depth=stack([t.depth for t in trees], i32),
        rank=stack([t.rank for t in trees], i32),
        next_token=stack([t.next_token for t in trees], i64),
        next_sibling=stack([t.next_sibling for t in trees], i64),
        ancestors=stack([ref_tree.pack_bits(ref_tree.ancestors(t.parent, t.num_nodes)) for t in trees], i64),
        conv_ancestors=stack([ref_tree.conv_ancestors(t.parent, t.num_nodes, conv_width) for t in trees], i32),
        num_nodes=torch.tensor([t.num_nodes for t in trees], dtype=i32, device=device),
    )


def check_topk(s: Sizes) -> float:
    """Ids exact, log-probabilities within float32 rounding, on float32 and bfloat16 logits; shards merge.

    The best of one row lie side by side, those of another are equal and far apart.
    """
    rng = np.random.default_rng(1)
    worst = 0.0
    for dtype, k in ((torch.float32, 8), (torch.bfloat16, 8), (torch.float32, 20), (torch.bfloat16, 64)):
        logits = torch.from_numpy(rng.normal(size=(6, s.vocab)).astype(np.float32) * 4).to(dtype)
        logits[1, : s.vocab // 2] = float("-inf")
        logits[2, s.vocab // 3 : s.vocab // 3 + k] += 40
        logits[3, 11 :: s.vocab // 90] = 30
        rows = logits.float().numpy()
        halves = []
        for start, size in ((0, s.vocab), (0, s.vocab // 2 + 1), (s.vocab // 2 + 1, s.vocab - s.vocab // 2 - 1)):
            part = logits[:, start : start + size].contiguous().to(s.device)
            ids = torch.empty(6, k, dtype=torch.int64, device=s.device)
            values, lse = torch.empty(6, k, device=s.device), torch.empty(6, device=s.device)
            whole = size == s.vocab
            draft_topk(part, ids, values, lse, vocab_start=start, normalise=whole)
            want_ids, want_values, want_lse = ref_topk.topk(rows[:, start : start + size], k, vocab_start=start)
            _same("topk ids", ids[np.isfinite(want_values)], want_ids[np.isfinite(want_values)])
            worst = max(worst, _close("log-sum-exp", lse, want_lse, 1e-5))
            if whole:
                want_logp = ref_topk.log_probs(want_values, want_lse)
                worst = max(worst, _close("log-probabilities", values, want_logp, 1e-5))
                want = want_ids, want_logp
            else:
                halves.append((ids, values, lse))
        ids, values, lse = (torch.stack([h[i] for h in halves]) for i in range(3))
        out_ids, out_logp = torch.empty_like(ids[0]), torch.empty_like(values[0])
        merge_topk(ids, values, lse, out_ids, out_logp)
        _same("merged ids", out_ids, want[0])
        worst = max(worst, _close("merged log-probabilities", out_logp, want[1], 1e-5))
    return worst


def check_build(s: Sizes) -> float:
    """Row for row, ties and -inf included, with and without the spine."""
    rng = np.random.default_rng(2)
    for rows in s.rows:
        for width, spine in ((1, False), (8, False), (16, True)):
            logp = np.stack([examples.random_logp(rng, 15, width, 1.0) for _ in range(s.requests)])
            logp[0] = np.sort(rng.choice(np.float32([0, -0.5, -1, -np.inf]), size=logp[0].shape), axis=1)[:, ::-1]
            ids = np.stack([examples.random_ids(rng, 15, width) for _ in range(s.requests)])
            lens = np.arange(s.requests) * 977 + 1
            out = TreeBuffers.allocate(s.requests, rows, s.device)
            for tensor in vars(out).values():
                tensor.fill_(-77)
            build_tree(*(torch.from_numpy(x).to(s.device) for x in (logp, ids, lens + 5, lens)), out, keep_spine=spine)
            trees = [
                ref_tree.build_tree(logp[r], ids[r], int(lens[r]) + 5, rows, keep_spine=spine)
                for r in range(s.requests)
            ]
            want = buffers_of(trees, lens.tolist())
            for name, tensor in vars(out).items():
                _same(f"build {rows} rows: {name}", tensor, getattr(want, name).numpy())
    return 0.0


def check_slots_and_mask(s: Sizes) -> float:
    """Draft block, slots, and the mask's tail cells with everything else untouched."""
    rng = np.random.default_rng(3)
    for rows in s.rows:
        width = max(rows, 16)
        table = torch.from_numpy(rng.integers(1, 2**31 - 1, size=(9, 3000)).astype(np.int32)).to(s.device)
        lens = rng.integers(1, 2900, size=s.requests)
        pool = rng.permutation(9)[: s.requests]
        block, positions = (torch.empty(s.requests, 16, dtype=torch.int64, device=s.device) for _ in range(2))
        slots = torch.empty(s.requests, width, dtype=torch.int64, device=s.device)
        device_lens = torch.from_numpy(lens).to(s.device)
        prepare_round(
            device_lens + 7, device_lens, torch.from_numpy(pool).to(s.device), table, 5, block, positions, slots
        )
        at = lens[:, None] + np.arange(width)
        want = np.where(at < 3000, table.cpu().numpy()[pool[:, None], np.minimum(at, 2999)], 0)
        _same("slots", slots, want)
        _same("block", block, np.concatenate([lens[:, None] + 7, np.full((s.requests, 15), 5)], axis=1))
        _same("block positions", positions, at[:, :16])
        trees = [examples.random_tree(rng, rows, 15, int(rng.integers(1, rows + 1))) for _ in lens]
        mask = torch.full((int((rows * (lens + rows)).sum()) + 3,), 9, dtype=torch.uint8, device=s.device)
        write_tree_mask(buffers_of(trees, lens.tolist(), s.device), device_lens, mask)
        want_mask = []
        for tree, n in zip(trees, lens, strict=True):
            cells = np.full((rows, n + rows), 9)
            cells[:, n:] = ref_tree.ancestors(tree.parent, tree.num_nodes)
            want_mask.append(cells.ravel())
        _same("mask", mask, np.concatenate([*want_mask, [9, 9, 9]]))
    return 0.0


def check_accept(s: Sizes) -> float:
    """Paths, tokens, lengths, moves and counters."""
    rng = np.random.default_rng(4)
    for rows in s.rows:
        trees = [examples.random_tree(rng, rows, 15, int(rng.integers(1, rows + 1))) for _ in range(4 * s.requests)]
        target = np.stack([examples.leading_targets(rng, t) for t in trees])
        lens = rng.integers(1, 10**6, size=len(trees))
        slots = np.stack([rng.permutation(10**6)[: max(rows, 16)] for _ in trees])
        out = AcceptBuffers.allocate(len(trees), 16, s.device)
        counters = TreeCounters.allocate(16, s.device)
        on = [torch.from_numpy(x).to(s.device) for x in (target, slots, lens)]
        accept_tree(on[0], buffers_of(trees, lens.tolist(), s.device), on[1], on[2], out, counters)
        want = [ref_accept.accept(t, y) for t, y in zip(trees, target, strict=True)]

        def padded(lists: list[list[int]], fill: int) -> np.ndarray:
            return np.array([[int(x) for x in row] + [fill] * (16 - len(row)) for row in lists])

        _same(
            "accept_index", out.accept_index, padded([[r * rows + p for p in w.path] for r, w in enumerate(want)], -1)
        )
        _same("out_tokens", out.out_tokens, padded([w.tokens for w in want], 0))
        _same("commit_lens", out.commit_lens, np.array([w.commit_len for w in want]))
        _same("bonus", out.bonus, np.array([w.bonus for w in want]))
        _same("last_row", out.last_row, np.array([w.path[-1] for w in want]))
        _same("new_seq_lens", out.new_seq_lens, lens + [w.commit_len for w in want])
        _same("src_slots", out.src_slots, padded([list(slots[r][w.path]) for r, w in enumerate(want)], 0))
        _same("tgt_slots", out.tgt_slots, padded([list(slots[r][: w.commit_len]) for r, w in enumerate(want)], 0))
        _same("verified trees", counters.total[:1], np.array([len(trees)]))
        _same("accepted nodes", counters.total[2:3], np.array([sum(w.commit_len - 1 for w in want)]))
    return 0.0


def check_sample(s: Sizes) -> float:
    """Token for token, through each of the three paths."""
    rng = np.random.default_rng(5)
    rows, each = 3 * 4, 4
    logits = rng.normal(size=(rows, s.vocab)).astype(np.float32) * 3
    positions = rng.integers(0, 10**6, size=rows)
    settings = [(0.75, 20, 0.9375, 0.0, 12345678901), (1.0, 1, 1.0, 0.0, -3), (1.25, 40, 0.5, 0.125, 2**62)]

    def params(rows: list[tuple[float, int, float, float, int]], **options: object) -> SamplingParams:
        temperature, top_k, top_p, min_p, seed = (torch.tensor(x).to(s.device) for x in zip(*rows, strict=True))
        return SamplingParams(temperature, top_k.int(), top_p, min_p, seed, **options)  # type: ignore[arg-type]

    free = [(t, 1 << 30, 1.0, 0.0, seed) for t, _, _, _, seed in settings]
    cases = [
        (settings, params(settings, max_top_k=40)),
        (settings, params(settings)),
        (free, params(free, filtered=False)),
    ]
    for used, options in cases:
        out = torch.empty(rows, dtype=torch.int64, device=s.device)
        sample_targets(torch.from_numpy(logits).to(s.device), torch.from_numpy(positions).to(s.device), options, out)
        want = []
        for i in range(rows):
            t, k, p, m, seed = used[i // each]
            law = {"temperature": t, "top_k": k if k < s.vocab else None, "top_p": p, "min_p": m}
            want.append(ref_sampling.draw(logits[i], seed, int(positions[i]), **law))  # type: ignore[arg-type]
        _same("draws", out, np.array(want))
    return 0.0


def check_shadow(s: Sizes) -> float:
    """Scores of a stream of trees against the reference, one request per slot."""
    rng = np.random.default_rng(6)
    depths, rows, rounds = 7, 20, 25
    ring = ShadowRing.allocate(s.requests, depths, rows, s.device)
    emitted: list[list[int]] = [[] for _ in range(s.requests)]
    proposals = []
    order = torch.arange(s.requests, device=s.device)
    for _ in range(rounds):
        trees = [examples.random_tree(rng, rows, depths, int(rng.integers(1, rows + 1))) for _ in emitted]
        lens = [10 + len(e) for e in emitted]
        commits, tokens = [], np.zeros((s.requests, depths + 1), dtype=np.int64)
        for r, tree in enumerate(trees):
            proposals.append((r, ref_shadow.Proposal(tree, len(emitted[r]))))
            path = tree.path(int(rng.integers(tree.num_nodes)))[1:]
            new = [*(int(tree.tokens[p]) for p in path), int(rng.integers(12))][: int(rng.integers(1, depths + 2))]
            tokens[r, : len(new)] = new
            commits.append(len(new))
            emitted[r] += new
        lengths, kept = (torch.tensor(x, device=s.device) for x in (lens, commits))
        new_tokens = torch.from_numpy(tokens).to(s.device)
        shadow_step(ring, buffers_of(trees, lens, s.device), order, order, lengths, new_tokens, kept.int())
    scores = [score for r, p in proposals if (score := ref_shadow.shadow_score(p, emitted[r])) is not None]
    _same("shadow scores", ring.histogram, np.bincount(scores, minlength=depths + 1))
    return 0.0


def check_nested(s: Sizes) -> float:
    """Counts of random ascending paths in intervals of rows, over several rounds."""
    rng = np.random.default_rng(7)
    width, bounds = 16, np.array([[0, 8], [8, 16], [16, 64], [0, 15]], dtype=np.int32)
    totals = torch.zeros((3, len(bounds)), dtype=torch.int64, device=s.device)
    want = np.zeros((3, len(bounds)), dtype=np.int64)
    for shape, rows, intervals in ((2, 65, range(3)), (0, 9, range(1)), (3, 16, range(3, 4)), (2, 65, range(3))):
        index, paths = np.full((s.requests, width), -1, dtype=np.int32), []
        for request in range(s.requests):
            nodes = rng.choice(np.arange(1, rows), int(rng.integers(0, min(width, rows))), replace=False)
            paths.append([0, *sorted(nodes.tolist())])
            index[request, : len(paths[-1])] = np.array(paths[-1]) + request * rows
        on_device = (torch.from_numpy(x).to(s.device) for x in (index, bounds))
        count_nested(next(on_device), rows, shape, intervals, next(on_device), totals)
        told = slice(intervals.start, intervals.stop)
        want[0, shape] += s.requests
        want[1:, told] += np.array(ref_nested.count_nested(paths, bounds))[:, told]
    _same("nested counts", totals, want)
    return 0.0


@dataclass(frozen=True)
class HybridCase:
    """One layer's inputs for a batch of random trees."""

    trees: list[ref_tree.Tree]
    mixed: torch.Tensor  # q, k, v side by side
    gates: torch.Tensor  # a, b
    head_params: torch.Tensor  # a_log, dt_bias
    states: torch.Tensor
    conv_states: torch.Tensor
    x: torch.Tensor
    weight: torch.Tensor

    @classmethod
    def random(cls, s: Sizes, rows: int, act: torch.dtype, state: torch.dtype, seed: int) -> "HybridCase":
        rng = np.random.default_rng(seed)

        def normal(*shape: int, dtype: torch.dtype = act) -> torch.Tensor:
            return torch.from_numpy(rng.normal(size=shape).astype(np.float32)).to(dtype)

        total, d = s.requests * rows, s.k_dim
        # Keys that share a direction, as those of trained models do, make the triangular system matter.
        mixed = normal(total, (2 * s.heads + s.value_heads) * d, dtype=torch.float32) + 0.7
        return cls(
            trees=[examples.random_tree(rng, rows, 15, int(rng.integers(1, rows + 1))) for _ in range(s.requests)],
            mixed=mixed.to(act), gates=normal(2, total, s.value_heads),
            head_params=normal(2, s.value_heads, dtype=torch.float32),
            states=normal(s.requests + 2, s.value_heads, d, d, dtype=torch.float32).to(state),
            conv_states=normal(s.requests + 2, 3, s.channels).transpose(1, 2),
            x=normal(total, s.channels), weight=normal(s.channels, 4),
        )  # fmt: skip

    def split(self, s: Sizes, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        d = s.k_dim
        q, k, v = self.mixed.to(device).split([s.heads * d, s.heads * d, s.value_heads * d], dim=1)
        return q.unflatten(1, (s.heads, d))[None], k.unflatten(1, (s.heads, d))[None], v.unflatten(1, (-1, d))[None]

    def reference(self, s: Sizes, r: int) -> ref_gdn.GdnTree:
        rows = len(self.trees[r].tokens)
        part = slice(r * rows, (r + 1) * rows)
        q, k, v = (t[0, part].double().numpy() for t in self.split(s, "cpu"))
        a, b = (self.gates[i, part].double().numpy() for i in (0, 1))
        a_log, dt_bias = self.head_params.double().numpy()
        inputs = ref_gdn.GdnRows(q, k, v, a, b, a_log, dt_bias)
        return ref_gdn.gdn_tree(inputs, self.states[r + 1].double().numpy(), self.trees[r].parent)


def check_hybrid(s: Sizes) -> float:
    """Outputs of every used row, and the states and windows after a random accepted path."""
    worst = 0.0
    kinds = ((torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16))
    for rows in s.rows:
        for act, state in kinds:
            worst = max(worst, _check_hybrid(s, rows, act, state))
    return worst


def _check_hybrid(s: Sizes, rows: int, act: torch.dtype, state: torch.dtype) -> float:
    case = HybridCase.random(s, rows, act, state, seed=rows)
    device = s.device
    buffers = buffers_of(case.trees, [9] * s.requests, device)
    d = s.k_dim
    records = gdn.GdnRecords.allocate(1, s.requests, rows, s.heads, s.value_heads, d, d, s.channels, act, device)
    slots = torch.arange(1, s.requests + 1, dtype=torch.int32, device=device)
    states, conv_states = (t.clone().to(device)[None] for t in (case.states, case.conv_states))
    q, k, v = case.split(s, device)
    a, b = case.gates.to(device)
    a_log, dt_bias = case.head_params.to(device)
    out = gdn.gdn_tree(q, k, v, a, b, a_log=a_log, dt_bias=dt_bias, ssm_states=states[0], state_indices=slots,
                       ancestors=buffers.ancestors, record=records.layer(0))  # fmt: skip
    conv = gdn.conv_tree(case.x.to(device), conv_states[0], case.weight.to(device), None, slots, buffers.conv_ancestors,
                         records.x[0])  # fmt: skip
    rng = np.random.default_rng(rows)
    last = [int(rng.integers(t.num_nodes)) for t in case.trees]
    gdn.commit_tree(records, buffers.ancestors, buffers.conv_ancestors, torch.tensor(last, device=device), states,
                    conv_states, slots)  # fmt: skip
    # One unit in the last place: a GPU rounds to half of it, the interpreter truncates.
    rounding = 2.0**-7 if act == torch.bfloat16 else 0.0
    state_rounding = 2.0**-7 if state == torch.bfloat16 else 0.0
    worst = 0.0
    for r, tree in enumerate(case.trees):
        want, used, part = case.reference(s, r), tree.num_nodes, slice(r * rows, r * rows + tree.num_nodes)
        name = f"{rows} rows, {act}, state {state}"
        worst = max(worst, _close(f"gdn out: {name}", out[0, part], want.out[:used], 1e-5, rounding))
        worst = max(worst, _close(f"gdn state: {name}", states[0, r + 1], want.states[last[r]], 2e-5, state_rounding))
        x, window = case.x[r * rows : (r + 1) * rows].double().numpy(), case.conv_states[r + 1].double().numpy()
        table = ref_tree.conv_ancestors(tree.parent, used, 4)
        want_conv = ref_gdn.conv_tree(x, window, case.weight.double().numpy(), None, table)
        worst = max(worst, _close(f"conv: {name}", conv[part], want_conv[:used], 1e-5, rounding))
        _same("conv window", conv_states[0, r + 1].double(), ref_gdn.conv_window(x, window, tree.path(last[r])))
    return worst


CHECKS: dict[str, Callable[[Sizes], float]] = {
    "topk": check_topk,
    "build": check_build,
    "slots_and_mask": check_slots_and_mask,
    "accept": check_accept,
    "sample": check_sample,
    "shadow": check_shadow,
    "nested": check_nested,
    "hybrid": check_hybrid,
}


def run_checks(sizes: Sizes) -> dict[str, str | float]:
    """By check: the largest deviation, or what differed."""
    results: dict[str, str | float] = {}
    for name, check in CHECKS.items():
        try:
            results[name] = check(sizes)
        except CheckError as error:
            results[name] = str(error)
    return results


def main() -> int:
    """Print the results as JSON; 1 if a kernel differs. --small: sizes that a sanitizer gets through."""
    results = run_checks(dataclasses.replace(SMALL, device="cuda") if "--small" in sys.argv[1:] else Sizes("cuda"))
    print(json.dumps(results, indent=1))
    return int(any(isinstance(result, str) for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
