"""Records on SGLang's own pool and backend: what is allocated, computed and committed, against float64."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import sglang_setup
import torch
from engine_trees import buffers_of, poison, random_tree
from sglang_ddtree.reference import gdn as ref
from sglang_ddtree.reference import tree as ref_tree

pytestmark = pytest.mark.xdist_group("sglang")
LAYERS, HEADS, VALUE_HEADS, DIM, TAPS = (0, 1, 3), 1, 2, 16, 3  # layer 2 would be full attention
CHANNELS = 2 * HEADS * DIM + VALUE_HEADS * DIM
REQUESTS, ROWS, PADDED = 3, 9, 4


@pytest.fixture(autouse=True)
def _sglang(sglang_src: Path) -> None:
    sglang_setup.load(sglang_src)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The process-wide arguments: a tree of ROWS rows whose states are kept as records."""
    return serve(monkeypatch, "records")


def serve(monkeypatch: pytest.MonkeyPatch, kept: str, rows: int = ROWS, mode: str = "tree") -> Any:
    from sglang.srt import runtime_context
    from sglang.srt.utils import common
    from sglang_ddtree import config, states

    args = SimpleNamespace(
        speculative_algorithm="DDTREE", speculative_eagle_topk=2, enable_unified_memory=False,
        max_speculative_num_draft_tokens=rows, enable_mamba_extra_buffer=lambda: False,
    )  # fmt: skip
    config.attach(args, states.Resolved(config.DDTreeConfig(mode=mode, budget=rows - 1), 16, "", kept))
    monkeypatch.setattr(runtime_context, "get_server_args", lambda: args)
    monkeypatch.setattr(common, "get_cuda_graph_max_batch_size", lambda _args, size: -(-size // 4) * 4)  # aligned
    monkeypatch.setattr(common, "get_eager_max_batch_size", lambda _args, size: size)
    return args


def cache_params(state: torch.dtype = torch.float32) -> Any:
    from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateDType, Mamba2StateShape

    shape = Mamba2StateShape.create(
        tp_world_size=1, intermediate_size=VALUE_HEADS * DIM, n_groups=HEADS, num_heads=VALUE_HEADS, head_dim=DIM,
        state_size=DIM, conv_kernel=TAPS + 1,
    )  # fmt: skip
    return Mamba2CacheParams(
        shape=shape, layers=list(LAYERS), dtype=Mamba2StateDType(conv=torch.float32, temporal=state)
    )


def make_pool(state: torch.dtype = torch.float32, rows: int | None = ROWS) -> Any:
    """SGLang's pool of requests with its pool of states, filled with values."""
    from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool

    pool = HybridReqToTokenPool(
        size=REQUESTS, mamba_size=5, mamba_spec_state_size=REQUESTS, max_context_len=8, device="cpu",
        enable_memory_saver=False, cache_params=cache_params(state), mamba_layer_ids=list(LAYERS),
        enable_mamba_extra_buffer=False, speculative_num_draft_tokens=rows, speculative_eagle_topk=2,
    )  # fmt: skip
    torch.manual_seed(3)
    cache = pool.mamba_pool.mamba_cache
    cache.conv[0].copy_(torch.randn(cache.conv[0].shape))
    cache.temporal.copy_(torch.randn(cache.temporal.shape))
    pool.req_index_to_mamba_index_mapping[: REQUESTS + 1] = torch.tensor([0, 4, 2, 5], dtype=torch.int32)
    return pool


# -- memory ------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("server")
def test_the_pool_holds_records_in_place_of_snapshots(caplog: pytest.LogCaptureFixture) -> None:
    from sglang.srt.mem_cache.memory_pool import MambaPool
    from sglang_ddtree import records, states

    with caplog.at_level(logging.INFO, "sglang_ddtree.records"):
        pool = make_pool()
    cache = pool.mamba_pool.mamba_cache
    assert type(cache) is MambaPool.State  # as for plain decoding
    assert cache.temporal.shape == (len(LAYERS), 6, VALUE_HEADS, DIM, DIM)
    kept = records.of_pool(pool)
    assert kept is not None
    assert kept.tree.tokens.shape == (PADDED, ROWS)  # padding is written, too
    assert kept.records.delta.shape == (len(LAYERS), PADDED, ROWS, VALUE_HEADS, DIM)
    assert kept.records.x.shape == (len(LAYERS), PADDED, ROWS, CHANNELS)
    sizes = states.Sizes.of(cache_params())
    assert kept.records.nbytes == sizes.records(PADDED, ROWS)
    held = sum(t.numel() * t.element_size() for t in (cache.temporal, cache.conv[0])) + kept.records.nbytes
    assert pool.mamba_pool.mem_usage * (1 << 30) == pytest.approx(held)
    assert "4 requests of 9 rows" in caplog.text


@pytest.fixture
def zeros_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang asks for its snapshots on a GPU by name."""
    real = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *a, **k: real(*a, **{**k, "device": "cpu"}))


@pytest.mark.usefixtures("zeros_on_cpu")
def test_what_is_said_to_be_spared_is_what_sglang_would_allocate(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang_ddtree import states

    serve(monkeypatch, "snapshots")
    cache = make_pool().mamba_pool.mamba_cache
    stock = [cache.intermediate_ssm, *cache.intermediate_conv_window]
    assert states.Sizes.of(cache_params()).snapshots(REQUESTS, ROWS) == sum(t.nbytes for t in stock)


@pytest.mark.usefixtures("zeros_on_cpu")
@pytest.mark.parametrize(("kept", "mode"), [("snapshots", "tree"), ("records", "linear"), ("records", "tree")])
def test_other_pools_are_allocated_as_before(monkeypatch: pytest.MonkeyPatch, kept: str, mode: str) -> None:
    """Another choice, another mode, or a pool that no verify reads (the last)."""
    from sglang.srt.mem_cache.memory_pool import MambaPool
    from sglang_ddtree import records

    serve(monkeypatch, kept, mode=mode)
    verified = (kept, mode) != ("records", "tree")
    pool = make_pool(rows=ROWS if verified else None)
    assert records.of_pool(pool) is None
    assert isinstance(pool.mamba_pool.mamba_cache, MambaPool.SpeculativeState) == verified


def configurator(args: Any) -> Any:
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    return SimpleNamespace(
        server_args=args, mambaish_config=SimpleNamespace(mamba2_cache_params=cache_params()),
        spec_algorithm=SpeculativeAlgorithm.from_string("DDTREE"), hybrid_gdn_config=None,
        ps=SimpleNamespace(pp_size=1, attn_dp_size=1), model_config=None, _calculate_mamba_ratio=lambda: 1,
    )  # fmt: skip


@pytest.fixture
def schedule(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What SGLang's sizing reads and overrides in its process-wide settings."""
    from sglang.srt import runtime_context
    from sglang.srt.mem_cache import kv_cache_configurator as module

    values = SimpleNamespace(max_running_requests=REQUESTS, max_mamba_cache_size=None)
    mamba = SimpleNamespace(enable_linear_replayssm_spec=False)
    found = {
        "get_schedule": values, "get_exec": SimpleNamespace(mamba=mamba),
        "get_memory": SimpleNamespace(disable_radix_cache=True), "get_spec": SimpleNamespace(
            speculative_num_draft_tokens=ROWS),
        "get_context": SimpleNamespace(override=lambda _why, **new: vars(values).update(new)),
    }  # fmt: skip
    for name, value in found.items():
        for place in (runtime_context, module):
            if hasattr(place, name):
                monkeypatch.setattr(place, name, lambda value=value: value)
    return values


def test_the_kv_cache_gets_what_records_spare(server: Any, schedule: SimpleNamespace, monkeypatch: Any) -> None:
    from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
    from sglang_ddtree import states

    free = 1.0
    left = KVCacheConfigurator._handle_max_mamba_cache(configurator(server), free)
    sizes = states.Sizes.of(cache_params())
    assert schedule.max_mamba_cache_size == REQUESTS
    assert (free - left) * (1 << 30) == pytest.approx((REQUESTS + 1) * sizes.state + sizes.records(PADDED, ROWS))
    schedule.max_mamba_cache_size = None
    snapshots = serve(monkeypatch, "snapshots")
    stock = KVCacheConfigurator._handle_max_mamba_cache(configurator(snapshots), free)
    assert (free - stock) * (1 << 30) == pytest.approx((REQUESTS + 1) * sizes.state + sizes.snapshots(REQUESTS, ROWS))


def test_a_budget_whose_records_do_not_fit_is_refused_before_sglang_counts(
    server: Any, schedule: SimpleNamespace
) -> None:
    from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
    from sglang_ddtree import states

    sizes = states.Sizes.of(cache_params())
    states_alone, a_row = (PADDED + 1) * sizes.state, PADDED * sizes.record
    enough = (states_alone + 6.5 * a_row) / 0.9 / (1 << 30)  # for 6 rows and a half: a root and 5 nodes
    with pytest.raises(ValueError, match=r"largest budget that fits is 5\b") as told:
        KVCacheConfigurator._handle_max_mamba_cache(configurator(server), enough)
    assert "state records" in str(told.value)
    with pytest.raises(ValueError, match="no budget fits; lower --max-running-requests"):
        KVCacheConfigurator._handle_max_mamba_cache(configurator(server), states_alone / (1 << 30))
    assert schedule.max_mamba_cache_size is None


def test_no_memory_makes_a_tree_larger_than_the_kernels_take() -> None:
    from sglang_ddtree import states
    from sglang_ddtree.kernels.gdn_verify import MAX_NODES

    assert states.Sizes(1, 1).largest_budget(8, 1 << 40) == states.MAX_BUDGET == MAX_NODES


# -- a round -----------------------------------------------------------------------------------------------------------


class Layer:
    """A Gated DeltaNet layer and the inputs of one pass, of the batch's rows and of padding behind them."""

    def __init__(self, layer_id: int, cells: int, seed: int) -> None:
        from sglang.srt.layers.radix_linear_attention import RadixLinearAttention

        torch.manual_seed(seed)
        self.mixed = torch.randn(cells, CHANNELS)
        gates = torch.randn(cells, 2 * VALUE_HEADS)  # one projection, as in the model: views with a row stride
        self.a, self.b = gates.split(VALUE_HEADS, dim=1)
        self.a_log, self.dt_bias = torch.randn(VALUE_HEADS), torch.randn(VALUE_HEADS)
        self.weight = torch.randn(CHANNELS, TAPS + 1)
        self.module = RadixLinearAttention(
            layer_id, HEADS, HEADS, VALUE_HEADS, DIM, DIM, DIM, self.weight, None, "silu", self.a_log, self.dt_bias
        )

    def reference(self, part: slice, state: np.ndarray, window: np.ndarray, tree: Any) -> ref.GdnTree:
        """What the rows of one request must give, in float64."""
        x = self.mixed[part].double().numpy()
        table = ref_tree.conv_ancestors(tree.parent, tree.num_nodes, TAPS + 1)
        mixed = ref.conv_tree(x, window, self.weight.double().numpy(), None, table)
        q, k, v = np.split(mixed, [HEADS * DIM, 2 * HEADS * DIM], axis=1)
        q, k, v = (t.reshape(len(x), -1, DIM) for t in (q, k, v))
        a, b = self.a[part].double().numpy(), self.b[part].double().numpy()
        rows = ref.GdnRows(q, k, v, a, b, self.a_log.double().numpy(), self.dt_bias.double().numpy())
        return ref.gdn_tree(rows, state, tree.parent)


class Round:
    """SGLang's hybrid backend over the pool, and a verify of random trees: eager, or as a graph's replay with padding.

    The batch's requests sit at places 3 and 1 of the table of requests, so at state slots 5 and 4.
    """

    requests = (3, 1)
    slots = (5, 4)

    def __init__(self, args: Any, state: torch.dtype, *, padded: int = 0, seed: int = 1) -> None:
        from sglang.srt.layers.attention.hybrid_linear_attn_backend import HybridLinearAttnBackend
        from sglang.srt.layers.attention.linear.gdn_backend import GDNAttnBackend
        from sglang_ddtree import records

        self.pool, self.padded = make_pool(state), padded
        runner = SimpleNamespace(
            device="cpu", server_args=args, is_draft_worker=False, req_to_token_pool=self.pool, token_to_kv_pool=None
        )
        self.linear = GDNAttnBackend(runner)
        full = SimpleNamespace(
            needs_cpu_seq_lens=False, token_to_kv_pool=None, req_to_token_pool=self.pool,
            init_forward_metadata=lambda _batch: None, init_forward_metadata_out_graph=lambda _batch, **_: None,
        )  # fmt: skip
        self.backend = HybridLinearAttnBackend(full, self.linear, [2])
        rng = np.random.default_rng(seed)
        self.trees = [random_tree(rng, ROWS, 6, used) for used in (ROWS, ROWS - 2)]
        self.kept = records.of_pool(self.pool)
        if self.kept is not None:
            for name, tensor in vars(buffers_of(self.trees, [5] * len(self.trees))).items():
                getattr(self.kept.tree, name)[: len(self.trees)] = tensor
            poison(self.kept.records.delta, self.kept.records.x)
        self.layers = [Layer(i, (len(self.trees) + padded) * ROWS, 10 * seed + i) for i in LAYERS]
        cache = self.pool.mamba_pool.mamba_cache
        self.before = cache.temporal.clone(), cache.conv[0].clone()

    def verify(self) -> list[torch.Tensor]:
        """The output of every layer."""
        from sglang.srt.model_executor.forward_batch_info import ForwardMode

        size = len(self.trees) + self.padded
        spec = SimpleNamespace(draft_token_num=ROWS, ragged_verify_layout=None, retrieve_next_token=None,
                               retrieve_next_sibling=None)  # fmt: skip
        requests = torch.tensor([*self.requests, *[0] * self.padded])
        batch = SimpleNamespace(
            forward_mode=ForwardMode.TARGET_VERIFY, batch_size=size, req_pool_indices=requests, spec_info=spec,
            input_ids=torch.zeros(size * ROWS, dtype=torch.int64), mamba_track_indices=None, mamba_track_mask=None,
            seq_lens_cpu=torch.tensor([7] * len(self.trees) + [1] * self.padded), num_padding=self.padded,
            _original_batch_size=None,
        )  # fmt: skip
        if self.padded:
            self.linear.init_cuda_graph_state(size, size * ROWS)
            self.backend.init_forward_metadata_out_graph(batch)
        else:
            self.backend.init_forward_metadata(batch)
        return [
            self.backend.forward(layer=one.module, forward_batch=batch, mixed_qkv=one.mixed, a=one.a, b=one.b)
            for one in self.layers
        ]

    def want(self, layer: int, request: int) -> ref.GdnTree:
        slot, part = self.slots[request], slice(request * ROWS, (request + 1) * ROWS)
        state, window = (pool[layer, slot].double().numpy() for pool in self.before)
        return self.layers[layer].reference(part, state, window, self.trees[request])

    def commit(self, last: list[int], track: tuple[list[int], list[int]] | None = None) -> None:
        track_slots, track_rows = (None, None) if track is None else map(torch.tensor, track)
        self.backend.update_mamba_state_after_mtp_verify(
            last_correct_step_indices=torch.tensor(last), mamba_track_indices=track_slots,
            mamba_steps_to_track=track_rows, model=None, req_pool_indices=torch.tensor(self.requests),
        )  # fmt: skip


@pytest.mark.parametrize(("state", "padded", "seed"), [(torch.float32, 0, 1), (torch.float32, 2, 2),
                                                        (torch.bfloat16, 2, 3)])  # fmt: skip
def test_a_verify_and_its_commit_equal_float64(server: Any, state: torch.dtype, padded: int, seed: int) -> None:
    played = Round(server, state, padded=padded, seed=seed)
    outputs = played.verify()
    cache = played.pool.mamba_pool.mamba_cache
    assert torch.equal(cache.temporal, played.before[0]), "a verify writes no state"
    assert torch.equal(cache.conv[0], played.before[1])
    for layer, out in enumerate(outputs):
        assert out.shape == (1, (2 + padded) * ROWS, VALUE_HEADS, DIM)
        assert torch.isfinite(out).all()
        for request, tree in enumerate(played.trees):
            got = out[0, request * ROWS : request * ROWS + tree.num_nodes].double().numpy()
            np.testing.assert_allclose(got, played.want(layer, request).out[: tree.num_nodes], atol=4e-6)
    last = [tree.num_nodes - 1 for tree in played.trees]
    played.commit(last)
    tolerance = 2e-5 if state == torch.float32 else 0.04
    for layer in range(len(LAYERS)):
        for request, tree in enumerate(played.trees):
            slot, path = played.slots[request], tree.path(last[request])
            want = played.want(layer, request).states[path[-1]]
            np.testing.assert_allclose(cache.temporal[layer, slot].double(), want, atol=tolerance)
            x = played.layers[layer].mixed[request * ROWS : (request + 1) * ROWS].numpy()
            window = ref.conv_window(x, played.before[1][layer, slot].numpy(), path)
            np.testing.assert_array_equal(cache.conv[0][layer, slot], window)
        for other in (0, 1, 2, 3):  # slot 0 is what padding is mapped to before it is marked
            assert torch.equal(cache.temporal[layer, other], played.before[0][layer, other])
            assert torch.equal(cache.conv[0][layer, other], played.before[1][layer, other])


def test_a_state_on_the_way_is_kept_for_the_prefix_cache(server: Any) -> None:
    played = Round(server, torch.float32)
    played.verify()
    last = [tree.num_nodes - 1 for tree in played.trees]
    path = played.trees[0].path(last[0])
    half = path[: len(path) // 2 + 1]
    played.commit(last, ([2, 0], [half[-1], -1]))  # the second request crosses no interval
    cache = played.pool.mamba_pool.mamba_cache
    for layer in range(len(LAYERS)):
        want = played.want(layer, 0)
        np.testing.assert_allclose(cache.temporal[layer, 2], want.states[half[-1]], atol=2e-5)
        np.testing.assert_allclose(cache.temporal[layer, 5], want.states[path[-1]], atol=2e-5)
        assert torch.equal(cache.temporal[layer, 0], played.before[0][layer, 0])


def test_the_next_verify_starts_from_what_was_committed(server: Any) -> None:
    played = Round(server, torch.float32)
    played.verify()
    played.commit([0, 0])  # no node accepted: the root's row alone
    cache = played.pool.mamba_pool.mamba_cache
    played.before = cache.temporal.clone(), cache.conv[0].clone()
    for layer, out in enumerate(played.verify()):
        got = out[0, ROWS : ROWS + played.trees[1].num_nodes].double().numpy()
        np.testing.assert_allclose(got, played.want(layer, 1).out[: played.trees[1].num_nodes], atol=4e-6)


def test_without_the_hook_on_the_verify_sglang_stops(server: Any) -> None:
    """A pool for records has no place for snapshots: stock kernels cannot go on with wrong states."""
    from sglang.srt.layers.attention.hybrid_linear_attn_backend import HybridLinearAttnBackend as Hybrid
    from sglang.srt.layers.attention.linear.gdn_backend import GDNAttnBackend

    played = Round(server, torch.float32)
    played.verify()
    batch = SimpleNamespace(forward_mode=SimpleNamespace(is_target_verify=lambda: True))
    one = played.layers[0]
    with pytest.raises(AssertionError):
        GDNAttnBackend.forward_extend.__wrapped__(played.linear, one.module, batch, one.mixed, one.a, one.b)
    with pytest.raises(AssertionError):
        Hybrid.update_mamba_state_after_mtp_verify.__wrapped__(played.backend, torch.tensor([0, 0]), None, None, None)


def test_prefill_is_sglangs_own(server: Any) -> None:
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang_ddtree import records

    played = Round(server, torch.float32)
    calls = []
    batch = SimpleNamespace(forward_mode=ForwardMode.EXTEND)

    def original(*args: Any, **given: Any) -> str:
        calls.append((args, given))
        return "stock"

    one = played.layers[0]
    assert records.around_extend(original, played.linear, one.module, batch, one.mixed, one.a, one.b, q=None) == "stock"
    ((backend,), given) = calls[0]
    assert backend is played.linear
    assert given == {"layer": one.module, "forward_batch": batch, "mixed_qkv": one.mixed, "a": one.a, "b": one.b,
                     "q": None}  # fmt: skip


# -- the worker --------------------------------------------------------------------------------------------------------


def test_the_worker_is_chosen_by_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang_ddtree import records
    from sglang_ddtree.records_worker import RecordsWorker
    from sglang_ddtree.worker import DDTreeWorker

    assert records.worker_class(serve(monkeypatch, "records")) is RecordsWorker
    assert records.worker_class(serve(monkeypatch, "snapshots")) is DDTreeWorker
    assert records.worker_class(serve(monkeypatch, "records", mode="linear")) is DDTreeWorker


@pytest.mark.usefixtures("server")
def test_rounds_build_the_trees_that_the_target_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang_ddtree import records
    from sglang_ddtree.kernels.buffers import TreeBuffers
    from sglang_ddtree.records_worker import RecordsWorker
    from sglang_ddtree.worker import DDTreeWorker

    pool = make_pool()
    worker = object.__new__(RecordsWorker)
    worker._target_worker = SimpleNamespace(model_runner=SimpleNamespace(req_to_token_pool=pool))

    def allocated(shape: tuple[int, int]) -> None:
        made = TreeBuffers.allocate(*shape, "cpu")
        monkeypatch.setattr(DDTreeWorker, "_allocate", lambda self: setattr(self, "trees", made))

    allocated((48, ROWS))  # for graphs that are asked for and never captured
    worker._allocate()
    assert worker.trees is records.of_pool(pool).tree
    allocated((48, ROWS + 1))
    with pytest.raises(RuntimeError, match="4 trees of 9 rows, but rounds have 3 of 10"):
        worker._allocate()
    allocated((48, ROWS))
    pool.size = 5
    with pytest.raises(RuntimeError, match="4 trees of 9 rows, but rounds have 5 of 9"):
        worker._allocate()
    delattr(pool.mamba_pool, "ddtree_records")
    with pytest.raises(RuntimeError, match="the state pool has no records"):
        worker._allocate()
