"""The engine's kernels on a real GPU: parity, graph capture, no host sync, pools beyond 2^31 elements.

Needs torch, triton, numpy and pytest alone; docs/engine.md has the command line.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from sglang_ddtree.kernels import checks, gdn
from sglang_ddtree.kernels.accept import accept_tree
from sglang_ddtree.kernels.buffers import AcceptBuffers, TreeBuffers, TreeCounters
from sglang_ddtree.kernels.build import build_tree
from sglang_ddtree.kernels.mask import write_tree_mask
from sglang_ddtree.kernels.slots import prepare_round
from sglang_ddtree.kernels.topk import TopKWorkspace, draft_topk

pytestmark = pytest.mark.gpu
DEPTHS, K, VOCAB = 15, 8, 32000
POISON = 0xA5


@pytest.fixture(autouse=True)
def _needs_cuda() -> None:
    assert torch.cuda.is_available(), "these tests need a CUDA GPU"
    assert os.environ.get("TRITON_INTERPRET") != "1", "the interpreter is on: run tests/gpu in a process of its own"


@pytest.mark.parametrize("name", sorted(checks.CHECKS))
def test_parity(name: str) -> None:
    worst = checks.CHECKS[name](checks.Sizes("cuda"))
    print(f"{name}: largest deviation {worst:.3g}")


@dataclass
class Round:
    """Static buffers of one round and the launches on them."""

    bs: int
    rows: int

    def __post_init__(self) -> None:
        bs, rows, device = self.bs, self.rows, "cuda"

        def ints(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        self.logits = torch.zeros(bs * DEPTHS, VOCAB, dtype=torch.bfloat16, device=device)
        self.ids, self.logp = ints(bs * DEPTHS, K), torch.zeros(bs * DEPTHS, K, device=device)
        self.lse = torch.zeros(bs * DEPTHS, device=device)
        self.workspace = TopKWorkspace.allocate(bs * DEPTHS, VOCAB, K, device)
        self.tree = TreeBuffers.allocate(bs, rows, device)
        self.bonus, self.lens, self.pool = ints(bs), ints(bs), ints(bs)
        self.table = torch.zeros(64, 4096, dtype=torch.int32, device=device)
        self.block, self.positions = ints(bs, DEPTHS + 1), ints(bs, DEPTHS + 1)
        self.slots = ints(bs, max(rows, DEPTHS + 1))
        self.mask = torch.zeros(bs * rows * (2048 + rows), dtype=torch.uint8, device=device)
        self.target = ints(bs, rows)
        self.out = AcceptBuffers.allocate(bs, DEPTHS + 1, device)
        self.counters = TreeCounters.allocate(DEPTHS + 1, device)

    def randomise(self, seed: int) -> None:
        gen = torch.Generator("cuda").manual_seed(seed)
        self.logits.normal_(generator=gen)
        self.logits *= 4
        for tensor, high in ((self.bonus, VOCAB), (self.lens, 2000), (self.target, VOCAB), (self.table, 10**6)):
            tensor.random_(1, high, generator=gen)
        self.pool.copy_(torch.randperm(64, generator=gen, device="cuda")[: self.bs])
        self.mask.fill_(POISON)  # a round writes its own cells alone, and where they lie depends on the lengths

    def launch(self) -> None:
        shape = (self.bs, DEPTHS, K)
        prepare_round(self.bonus, self.lens, self.pool, self.table, 5, self.block, self.positions, self.slots)
        draft_topk(self.logits, self.ids, self.logp, self.lse, workspace=self.workspace)
        build_tree(self.logp.view(shape), self.ids.view(shape), self.bonus, self.lens, self.tree)
        write_tree_mask(self.tree, self.lens, self.mask)
        # Half of the rows get their first child's token, so that paths of some length are accepted.
        child = self.tree.next_token.clamp(min=0)
        follow = self.tree.tokens.gather(1, child)
        wanted = torch.where(self.target % 4 > 0, follow, self.target)
        accept_tree(wanted, self.tree, self.slots, self.lens, self.out, self.counters)

    def results(self) -> list[torch.Tensor]:
        return [t.clone() for part in (self.tree, self.out) for t in vars(part).values()] + [self.mask.clone()]


@pytest.fixture
def no_sync() -> Iterator[Callable[[str], None]]:
    yield torch.cuda.set_sync_debug_mode
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(("bs", "rows"), [(1, 17), (8, 65)])
def test_a_captured_round_replays_on_new_inputs_without_a_sync(
    bs: int, rows: int, no_sync: Callable[[str], None]
) -> None:
    fixed, eager = Round(bs, rows), Round(bs, rows)
    fixed.randomise(0)
    fixed.launch()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fixed.launch()
    lengths = set()
    for seed in range(1, 6):
        for r in (fixed, eager):
            r.randomise(seed)
        torch.cuda.synchronize()
        no_sync("error")
        graph.replay()
        eager.launch()
        no_sync("default")
        for got, want in zip(fixed.results(), eager.results(), strict=True):
            assert torch.equal(got, want)
        lengths |= set(fixed.out.commit_lens.tolist())
    assert len(lengths) > 1, "every path had the same length: the round proves little"


def test_hybrid_layer_captures_and_does_not_sync(no_sync: Callable[[str], None]) -> None:
    sizes = checks.Sizes("cuda", requests=2)
    case = checks.HybridCase.random(sizes, 17, torch.bfloat16, torch.float32, seed=1)
    buffers = checks.buffers_of(case.trees, [5, 5], "cuda")
    d = sizes.k_dim
    records = gdn.GdnRecords.allocate(
        1, 2, 17, sizes.heads, sizes.value_heads, d, d, sizes.channels, torch.bfloat16, "cuda"
    )
    states, conv_states = case.states.cuda()[None], case.conv_states.cuda()[None]
    before = states.clone(), conv_states.clone()
    slots = torch.tensor([2, 1], dtype=torch.int32, device="cuda")
    q, k, v = case.split(sizes, "cuda")
    a, b = case.gates.cuda()
    a_log, dt_bias = case.head_params.cuda()
    x, weight = case.x.cuda(), case.weight.cuda()
    last = torch.tensor([t.num_nodes - 1 for t in case.trees], device="cuda")

    def layer() -> tuple[torch.Tensor, torch.Tensor]:
        out = gdn.gdn_tree(q, k, v, a, b, a_log=a_log, dt_bias=dt_bias, ssm_states=states[0], state_indices=slots,
                           ancestors=buffers.ancestors, record=records.layer(0))  # fmt: skip
        conv = gdn.conv_tree(x, conv_states[0], weight, None, slots, buffers.conv_ancestors, records.x[0])
        gdn.commit_tree(records, buffers.ancestors, buffers.conv_ancestors, last, states, conv_states, slots)
        return out, conv

    want = [t.clone() for t in layer()]
    committed = states.clone(), conv_states.clone()
    for tensor, old in zip((states, conv_states), before, strict=True):
        tensor.copy_(old)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer()
    no_sync("error")
    graph.replay()
    no_sync("default")
    assert all(torch.equal(x, y) for x, y in zip(out, want, strict=True))
    assert all(torch.equal(x, y) for x, y in zip((states, conv_states), committed, strict=True))


def test_pools_beyond_two_to_the_31(request: pytest.FixtureRequest) -> None:
    free, _ = torch.cuda.mem_get_info()
    assert free > 40 << 30, "needs 40 GB of GPU memory: deselect it on a smaller GPU"
    request.addfinalizer(torch.cuda.empty_cache)
    sizes = checks.Sizes("cuda", requests=1, heads=16, value_heads=48, channels=10240)
    case = checks.HybridCase.random(sizes, 9, torch.bfloat16, torch.float32, seed=2)
    far = 2**31 // (48 * 128 * 128) + 3
    states = torch.zeros(1, far + 1, 48, 128, 128, device="cuda")
    states[0, far] = case.states[1].cuda()
    conv_states = torch.zeros(1, far + 1, 10240, 3, dtype=torch.bfloat16, device="cuda")
    buffers = checks.buffers_of(case.trees, [5], "cuda")
    records = gdn.GdnRecords.allocate(1, 1, 9, 16, 48, 128, 128, 10240, torch.bfloat16, "cuda")
    slots = torch.tensor([far], dtype=torch.int32, device="cuda")
    q, k, v = case.split(sizes, "cuda")
    a, b = case.gates.cuda()
    a_log, dt_bias = case.head_params.cuda()
    out = gdn.gdn_tree(q, k, v, a, b, a_log=a_log, dt_bias=dt_bias, ssm_states=states[0], state_indices=slots,
                       ancestors=buffers.ancestors, record=records.layer(0))  # fmt: skip
    last = case.trees[0].num_nodes - 1
    gdn.commit_tree(records, buffers.ancestors, buffers.conv_ancestors, torch.tensor([last], device="cuda"), states,
                    conv_states, slots)  # fmt: skip
    want = case.reference(sizes, 0)
    used = case.trees[0].num_nodes
    np.testing.assert_allclose(out[0, :used].double().cpu().numpy(), want.out[:used], rtol=2.0**-7, atol=1e-5)
    np.testing.assert_allclose(states[0, far].double().cpu().numpy(), want.states[last], atol=2e-5)
    del states
    table = torch.zeros(2**31 // 131072 + 2, 131072, dtype=torch.int32, device="cuda")
    table[-1, :40] = torch.arange(40, dtype=torch.int32, device="cuda")
    ids, positions, slot = (torch.empty(1, n, dtype=torch.int64, device="cuda") for n in (16, 16, 33))
    one = torch.ones(1, dtype=torch.int64, device="cuda")
    prepare_round(one, one, one * (len(table) - 1), table, 5, ids, positions, slot)
    assert slot[0].tolist() == list(range(1, 34))
