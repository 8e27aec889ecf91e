"""Hybrid layers on random trees: SGLang's stock kernels and the snapshot-free ones, both against float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import numpy as np
import pytest
import torch
from engine_trees import buffers_of, poison, random_tree
from sglang_ddtree.kernels import gdn
from sglang_ddtree.kernels.buffers import TreeBuffers
from sglang_ddtree.reference import gdn as ref
from sglang_ddtree.reference import tree as ref_tree

HEADS, VALUE_HEADS, DIM, CHANNELS, TAPS = 1, 2, 16, 24, 3
Stock = Callable[[str], ModuleType]


@dataclass(frozen=True)
class Case:
    """A batch of trees with the inputs of one layer; request 1 may be padding."""

    trees: list[ref_tree.Tree]
    buffers: TreeBuffers
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    a_log: torch.Tensor
    dt_bias: torch.Tensor
    states: torch.Tensor
    x: torch.Tensor
    conv_states: torch.Tensor
    weight: torch.Tensor
    slots: torch.Tensor

    def rows(self, r: int) -> ref.GdnRows:
        n = self.buffers.width
        part = slice(r * n, (r + 1) * n)
        q, k, v = (t[0, part].double().numpy() for t in (self.q, self.k, self.v))
        a, b, a_log, dt = (t.double().numpy() for t in (self.a[part], self.b[part], self.a_log, self.dt_bias))
        return ref.GdnRows(q, k, v, a, b, a_log, dt)

    def x_of(self, r: int) -> np.ndarray:
        n = self.buffers.width
        return self.x[r * n : (r + 1) * n].double().numpy()

    def state_of(self, r: int) -> np.ndarray:
        return self.states[int(self.slots[r])].double().numpy()

    def window_of(self, r: int) -> np.ndarray:
        return self.conv_states[int(self.slots[r])].double().numpy()


def make(rows: int, seed: int, *, state: torch.dtype = torch.float32, act: torch.dtype = torch.float32,
         requests: int = 2, correlated: bool = False) -> Case:  # fmt: skip
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    trees = [random_tree(rng, rows, 15, int(rng.integers(max(1, rows - 4), rows + 1))) for _ in range(requests)]
    total = requests * rows
    # q, k, v are views of one projection, as in the model: only the row stride tells them apart.
    mixed = torch.randn(total, 2 * HEADS * DIM + VALUE_HEADS * DIM)
    if correlated:
        mixed = mixed * 0.2 + torch.randn(mixed.shape[1]).abs()
    mixed = mixed.to(act)
    q, k, v = mixed.split([HEADS * DIM, HEADS * DIM, VALUE_HEADS * DIM], dim=1)
    conv_states = torch.randn(5, TAPS, CHANNELS).to(act).transpose(1, 2)  # channel stride 1
    return Case(
        trees=trees, buffers=buffers_of(trees, [9] * requests),
        q=q.unflatten(1, (HEADS, DIM))[None], k=k.unflatten(1, (HEADS, DIM))[None],
        v=v.unflatten(1, (VALUE_HEADS, DIM))[None],
        a=torch.randn(total, VALUE_HEADS).to(act), b=torch.randn(total, VALUE_HEADS).to(act),
        a_log=torch.randn(VALUE_HEADS) + 1.0, dt_bias=torch.randn(VALUE_HEADS),
        states=torch.randn(5, VALUE_HEADS, DIM, DIM).to(state),
        x=torch.randn(total, CHANNELS).to(act), conv_states=conv_states,
        weight=torch.randn(CHANNELS, TAPS + 1).to(act),
        slots=torch.tensor([3, 1, 4, 0][:requests], dtype=torch.int32),
    )  # fmt: skip


def records_for(case: Case, layers: int = 1) -> gdn.GdnRecords:
    records = gdn.GdnRecords.allocate(layers, len(case.trees) + 1, case.buffers.width, HEADS, VALUE_HEADS, DIM, DIM,
                                      CHANNELS, case.x.dtype, "cpu")  # fmt: skip
    poison(records.delta, records.key, records.decay, records.x)
    return records


def run_own(case: Case, record: gdn.GdnRecords) -> tuple[torch.Tensor, torch.Tensor]:
    out = gdn.gdn_tree(
        case.q, case.k, case.v, case.a, case.b, a_log=case.a_log, dt_bias=case.dt_bias, ssm_states=case.states,
        state_indices=case.slots, ancestors=case.buffers.ancestors, record=record,
    )  # fmt: skip
    conv = gdn.conv_tree(case.x, case.conv_states, case.weight, None, case.slots, case.buffers.conv_ancestors, record.x)
    return out, conv


def run_stock_conv(case: Case, stock: Stock) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs and the parent table it derives. Not in bfloat16: the interpreter multiplies its raw bits."""
    requests, rows = case.buffers.tokens.shape
    conv_module = stock("mamba/causal_conv1d_triton")
    parent = torch.full((requests, rows), -7, dtype=torch.int32)
    conv = conv_module.causal_conv1d_update(
        case.x.view(requests, rows, CHANNELS).transpose(1, 2).contiguous(), case.conv_states.clone(), case.weight, None,
        "silu", conv_state_indices=case.slots,
        intermediate_conv_window=torch.zeros(requests, rows, CHANNELS, TAPS, dtype=case.x.dtype),
        intermediate_state_indices=torch.arange(requests, dtype=torch.int32),
        retrieve_next_token=case.buffers.next_token.int(), retrieve_next_sibling=case.buffers.next_sibling.int(),
        retrieve_parent_token=parent,
    )  # fmt: skip
    return conv.transpose(1, 2).reshape(requests * rows, CHANNELS), parent


def run_stock(case: Case, stock: Stock) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs and the state after every row."""
    requests, rows = case.buffers.tokens.shape
    states = torch.zeros(requests, rows, VALUE_HEADS, DIM, DIM, dtype=case.states.dtype)
    out = stock("attention/fla/fused_sigmoid_gating_recurrent").fused_sigmoid_gating_delta_rule_update(
        A_log=case.a_log, a=case.a, dt_bias=case.dt_bias, softplus_beta=1.0, softplus_threshold=20.0,
        q=case.q, k=case.k, v=case.v, b=case.b, initial_state_source=case.states, initial_state_indices=case.slots,
        cu_seqlens=torch.arange(requests + 1, dtype=torch.int32) * rows, use_qk_l2norm_in_kernel=True,
        disable_state_update=True, intermediate_states_buffer=states,
        intermediate_state_indices=torch.arange(requests, dtype=torch.int32), cache_steps=rows,
        retrieve_parent_token=case.buffers.parent,
    )  # fmt: skip
    return out, states


@dataclass
class Errors:
    """Largest deviations from float64 over the used rows."""

    out: float = 0.0
    state: float = 0.0
    conv: float = 0.0


def errors(case: Case, out: torch.Tensor, conv: torch.Tensor, states: Callable[[int, int, ref.GdnTree], np.ndarray],
           all_states: bool = True) -> Errors:  # fmt: skip
    rows = case.buffers.width
    worst = Errors()
    for r, tree in enumerate(case.trees):
        used = tree.num_nodes
        want = ref.gdn_tree(case.rows(r), case.state_of(r), tree.parent)
        got = out[0, r * rows : r * rows + used].double().numpy()
        worst.out = max(worst.out, float(np.abs(got - want.out[:used]).max()))
        table = ref_tree.conv_ancestors(tree.parent, used, TAPS + 1)
        want_conv = ref.conv_tree(case.x_of(r), case.window_of(r), case.weight.double().numpy(), None, table)
        got_conv = conv[r * rows : r * rows + used].double().numpy()
        worst.conv = max(worst.conv, float(np.abs(got_conv - want_conv[:used]).max()))
        for row in range(used) if all_states else (used - 1,):
            worst.state = max(worst.state, float(np.abs(states(r, row, want) - want.states[row]).max()))
    return worst


def replayed(case: Case, record: gdn.GdnRecords) -> Callable[[int, int, ref.GdnTree], np.ndarray]:
    """The state at a row from the kernel's own records."""

    def state(r: int, row: int, want: ref.GdnTree) -> np.ndarray:
        mine = ref.GdnTree(
            want.out, want.states, *(t[r].double().numpy() for t in (record.delta, record.key, record.decay))
        )
        return ref.replay(case.state_of(r), case.trees[r].path(row), mine)

    return state


WIDTHS = [2, 3, 9, 16, 17, 18, 33, 65]


@pytest.mark.parametrize("rows", [2, 5, 9, 17, 33, 65])
def test_stock_kernels_are_right_under_the_ordering_rules(rows: int, stock_kernel: Stock) -> None:
    case = make(rows, seed=rows)
    out, states = run_stock(case, stock_kernel)
    conv, parent = run_stock_conv(case, stock_kernel)
    worst = errors(case, out, conv, lambda r, row, _: states[r, row].double().numpy())
    assert worst.out < 2e-6
    assert worst.state < 5e-6
    assert worst.conv < 2e-6
    for r, tree in enumerate(case.trees):
        np.testing.assert_array_equal(parent[r, 1 : tree.num_nodes].numpy(), tree.parent[1 : tree.num_nodes])


@pytest.mark.parametrize("rows", WIDTHS)
@pytest.mark.parametrize("correlated", [False, True])
def test_tree_kernels_equal_float64(rows: int, correlated: bool) -> None:
    case = make(rows, seed=100 + rows, correlated=correlated)
    record = records_for(case).layer(0)
    out, conv = run_own(case, record)
    worst = errors(case, out, conv, replayed(case, record), all_states=rows < 20)
    assert worst.out < 2e-6
    assert worst.state < 5e-6
    assert worst.conv < 2e-6
    requests, n = case.buffers.tokens.shape
    assert torch.equal(record.x[:requests].reshape(-1, CHANNELS), case.x)
    for tensor in (record.delta, record.key, record.decay, record.x):
        assert bool((tensor[requests] == -77).all()), "wrote beyond the batch"
        assert not bool((tensor[:requests] == -77).all(dim=-1).any())
    assert out.shape == (1, requests * n, VALUE_HEADS, DIM)


@pytest.mark.parametrize(("state", "act"), [(torch.float32, torch.float32), (torch.float32, torch.bfloat16),
                                            (torch.bfloat16, torch.bfloat16)])  # fmt: skip
@pytest.mark.parametrize("correlated", [False, True])
def test_no_worse_than_the_stock_kernels(
    state: torch.dtype, act: torch.dtype, correlated: bool, stock_kernel: Stock
) -> None:
    """On the same inputs, against float64; the margin is one rounding of the compared type."""
    case = make(13, seed=7, state=state, act=act, requests=3, correlated=correlated)
    record = records_for(case).layer(0)
    out, conv = run_own(case, record)
    mine = errors(case, out, conv, replayed(case, record))
    stock_out, stock_states = run_stock(case, stock_kernel)
    stock_conv = run_stock_conv(case, stock_kernel)[0] if act == torch.float32 else conv
    stock = errors(case, stock_out, stock_conv, lambda r, row, _: stock_states[r, row].double().numpy())
    assert mine.out <= stock.out + 3e-7
    assert mine.state <= stock.state + 5e-7
    assert mine.conv <= stock.conv + 3e-7


def test_convolution_in_bfloat16_rounds_once() -> None:
    case = make(17, seed=3, act=torch.bfloat16)
    _, conv = run_own(case, records_for(case).layer(0))
    for r, tree in enumerate(case.trees):
        table = ref_tree.conv_ancestors(tree.parent, tree.num_nodes, TAPS + 1)
        want = ref.conv_tree(case.x_of(r), case.window_of(r), case.weight.double().numpy(), None, table)
        got = conv[r * 17 : r * 17 + tree.num_nodes].double().numpy()
        np.testing.assert_allclose(got, want[: tree.num_nodes], rtol=2.0**-7, atol=1e-6)  # the interpreter truncates


def test_strong_forgetting_keeps_close_ancestors_exact() -> None:
    """Log decays that sum to hundreds: differences of sums must not lose the near terms."""
    case = make(33, seed=5)
    strong = Case(**{**vars(case), "a_log": torch.full((VALUE_HEADS,), 3.5)})
    record = records_for(strong).layer(0)
    out, conv = run_own(strong, record)
    worst = errors(strong, out, conv, replayed(strong, record), all_states=False)
    assert worst.out < 2e-6
    assert worst.state < 5e-6


def test_padding_requests_are_computed_from_zeros_and_never_committed() -> None:
    case = make(9, seed=11)
    padded = Case(**{**vars(case), "slots": torch.tensor([-1, 1], dtype=torch.int32)})
    records = records_for(padded)
    out, conv = run_own(padded, records.layer(0))
    zero = ref.gdn_tree(padded.rows(0), np.zeros((VALUE_HEADS, DIM, DIM)), padded.trees[0].parent)
    used = padded.trees[0].num_nodes
    np.testing.assert_allclose(out[0, :used].numpy(), zero.out[:used], atol=2e-6)
    assert torch.isfinite(conv).all()
    before, windows = padded.states.clone()[None], padded.conv_states.clone()[None]
    states, conv_states = before.clone(), windows.clone()
    last = torch.tensor([t.num_nodes - 1 for t in padded.trees], dtype=torch.int32)
    gdn.commit_tree(records, padded.buffers.ancestors, padded.buffers.conv_ancestors, last, states, conv_states,
                    padded.slots)  # fmt: skip
    changed = [i for i in range(5) if not torch.equal(states[0, i], before[0, i])]
    assert changed == [1]
    assert [i for i in range(5) if not torch.equal(conv_states[0, i], windows[0, i])] == [1]


@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [2, 9, 65])
def test_commit_writes_the_accepted_paths_state(rows: int, state: torch.dtype) -> None:
    rng = np.random.default_rng(rows)
    layers = 2
    cases = [make(rows, seed=rows, state=state) for _ in range(1)]
    second = make(rows, seed=rows + 1000, state=state)
    # The same trees in every layer, other inputs.
    shared = {name: getattr(cases[0], name) for name in ("trees", "buffers", "slots")}
    cases.append(Case(**{**vars(second), **shared}))
    records = records_for(cases[0], layers)
    for index, case in enumerate(cases):
        run_own(case, records.layer(index))
    states = torch.stack([c.states for c in cases])
    conv_states = torch.stack([c.conv_states.transpose(1, 2) for c in cases]).transpose(2, 3)
    before, windows = states.clone(), conv_states.clone()
    trees = cases[0].trees
    last = [int(rng.integers(t.num_nodes)) for t in trees]
    paths = [t.path(row) for t, row in zip(trees, last, strict=True)]
    track_rows = torch.tensor([paths[0][len(paths[0]) // 2], -1])
    track_slots = torch.tensor([2, 0])
    gdn.commit_tree(records, cases[0].buffers.ancestors, cases[0].buffers.conv_ancestors, torch.tensor(last), states,
                    conv_states, cases[0].slots, track_slots, track_rows)  # fmt: skip
    tolerance = 5e-6 if state == torch.float32 else 0.02
    for index, case in enumerate(cases):
        for r, (tree, path) in enumerate(zip(trees, paths, strict=True)):
            want = ref.gdn_tree(case.rows(r), case.state_of(r), tree.parent)
            slot = int(case.slots[r])
            np.testing.assert_allclose(states[index, slot].double(), want.states[path[-1]], atol=tolerance)
            window = ref.conv_window(case.x_of(r), case.window_of(r), path)
            np.testing.assert_array_equal(conv_states[index, slot].double(), window)
        half = paths[0][: len(paths[0]) // 2 + 1]
        want = ref.gdn_tree(case.rows(0), case.state_of(0), trees[0].parent)
        np.testing.assert_allclose(states[index, 2].double(), want.states[half[-1]], atol=tolerance)
        np.testing.assert_array_equal(
            conv_states[index, 2].double(), ref.conv_window(case.x_of(0), case.window_of(0), half)
        )
        for slot in (0, 4):  # neither committed nor tracked
            assert torch.equal(states[index, slot], before[index, slot])
            assert torch.equal(conv_states[index, slot], windows[index, slot])


def test_records_are_a_tenth_of_the_snapshots() -> None:
    """The 27B shapes: 48 value heads, 16 key heads, 128 x 128 states, 10240 channels in bf16, 4 taps."""
    snapshot = {4: 48 * 128 * 128 * 4 + 10240 * 3 * 2, 2: 48 * 128 * 128 * 2 + 10240 * 3 * 2}
    record = gdn.GdnRecords.bytes_per_row(16, 48, 128, 128, 10240)
    assert record * 10 <= snapshot[2] < snapshot[4]
    allocated = gdn.GdnRecords.allocate(2, 3, 5, 16, 48, 128, 128, 10240, torch.bfloat16, "cpu")
    assert allocated.nbytes == record * 2 * 3 * 5


def test_refusals() -> None:
    case = make(3, seed=1)
    record = records_for(case).layer(0)
    with pytest.raises(ValueError, match="rows of q"):
        gdn.gdn_tree(case.q[:, :-1], case.k, case.v, case.a, case.b, a_log=case.a_log, dt_bias=case.dt_bias,
                     ssm_states=case.states, state_indices=case.slots, ancestors=case.buffers.ancestors,
                     record=record)  # fmt: skip
    with pytest.raises(ValueError, match="conv_state"):
        gdn.conv_tree(case.x, case.conv_states[:, :, :2], case.weight, None, case.slots, case.buffers.conv_ancestors,
                      record.x)  # fmt: skip
