"""Each hook on the real functions: what it does for DDTREE, and that it does nothing for any other algorithm."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sglang_setup

pytestmark = pytest.mark.xdist_group("sglang")


@pytest.fixture(autouse=True)
def _sglang(sglang_src: Path) -> None:
    sglang_setup.load(sglang_src)


def server_args(budget: int | None, block: int = 16, **values: Any) -> Any:
    from sglang_ddtree import config

    base = {"speculative_algorithm": "DFLASH" if budget is None else "DDTREE", "speculative_num_steps": 1,
            "speculative_eagle_topk": 1 if budget is None else 8, "page_size": 1,
            "max_speculative_num_draft_tokens": block if budget is None else budget + 1,
            "speculative_num_draft_tokens": block if budget is None else budget + 1}  # fmt: skip
    made = SimpleNamespace(**{**base, **values})
    if budget is not None:
        config.attach(made, config.Resolved(config.DDTreeConfig(mode="tree", budget=budget), block))
    return made


@pytest.mark.parametrize(("budget", "slots"), [(1, 16), (15, 16), (16, 17), (64, 65)])
def test_a_round_reserves_the_larger_of_block_and_tree(budget: int, slots: int) -> None:
    """A tree narrower than the block still drafts the block; SGLang would reserve the tree's rows only."""
    from sglang.srt.mem_cache import allocation_sizing

    args = server_args(budget)
    assert allocation_sizing.get_alloc_len_per_decode(args) == slots
    assert allocation_sizing.get_alloc_reserve_per_decode(args) == 2 * slots


@pytest.mark.parametrize("budget", [1, 16, 64])
def test_rows_of_the_slot_table_have_room_for_the_reserve(budget: int) -> None:
    from sglang.srt.mem_cache import allocation_sizing

    args = server_args(budget)
    extra = allocation_sizing.get_req_to_token_extra_context_len(args)
    assert extra >= allocation_sizing.get_alloc_reserve_per_decode(args)


def test_other_algorithms_reserve_as_before() -> None:
    from sglang.srt.mem_cache import allocation_sizing

    args = server_args(None)
    assert allocation_sizing.get_alloc_len_per_decode(args) == 16
    assert allocation_sizing.get_req_to_token_extra_context_len(args) == 20


def runner(args: Any, *, draft: bool) -> Any:
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    algorithm = SpeculativeAlgorithm.from_string(args.speculative_algorithm)
    model_runner = SimpleNamespace(server_args=args, is_draft_worker=draft, spec_algorithm=algorithm, attn_backend=1)
    buffers = SimpleNamespace(custom_mask="mask")
    made = SimpleNamespace(model_runner=model_runner, buffers=buffers, captured_req_width=16)
    made._capture_ragged_verify_layout = lambda _tokens: None
    return made


def test_the_target_is_captured_with_a_mask_and_the_drafter_without() -> None:
    from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner as Runner
    from sglang.srt.speculative.dflash_info import DFlashVerifyInput
    from sglang_ddtree.info import DDTreeVerifyInput

    target = Runner.get_spec_info(runner(server_args(32), draft=False), 33)
    assert isinstance(target, DDTreeVerifyInput)
    assert (target.custom_mask, target.draft_token_num, target.num_tokens_per_req) == ("mask", 33, 33)
    assert (target.max_tree_depth, target.tree_topk) == (16, -1)
    assert target.is_verify_input()
    draft = Runner.get_spec_info(runner(server_args(32), draft=True), 16)
    assert isinstance(draft, DFlashVerifyInput)
    assert (draft.custom_mask, draft.draft_token_num) == (None, 16)


def test_warm_up_inputs_have_each_sides_width() -> None:
    from sglang.srt.speculative import spec_info
    from sglang.srt.speculative.dflash_info import DFlashVerifyInput
    from sglang_ddtree.info import DDTreeVerifyInput

    algorithm = spec_info.SpeculativeAlgorithm.from_string("DDTREE")
    target = spec_info.create_dummy_verify_input(algorithm, server_args(32), "mask", 33, False)
    draft = spec_info.create_dummy_verify_input(algorithm, server_args(32), "mask", 16, True)
    assert isinstance(target, DDTreeVerifyInput)
    assert target.draft_token_num == 33
    assert isinstance(draft, DFlashVerifyInput)
    assert draft.draft_token_num == 16
    plain = spec_info.create_dummy_verify_input(
        spec_info.SpeculativeAlgorithm.DFLASH, server_args(None), None, 16, True
    )
    assert isinstance(plain, DFlashVerifyInput)


def test_the_drafter_keeps_its_block_whatever_the_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt import runtime_context
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    algorithm = SpeculativeAlgorithm.from_string("DDTREE")
    monkeypatch.setattr(runtime_context, "get_server_args", lambda: server_args(64))
    assert algorithm.get_num_tokens_per_req_for_target_verify(65, is_draft_worker=True) == 16
    assert algorithm.get_num_tokens_per_req_for_target_verify(65, is_draft_worker=False) == 65


MIB = 1 << 20
ROW_27B = (144 << 20) + 2949120  # state and window of one row of a 27B hybrid, all layers, float32 states


def test_the_largest_budget_leaves_a_tenth_for_keys_and_values() -> None:
    from sglang_ddtree import hooks

    free = 40 << 30
    fits = hooks.largest_budget(ROW_27B, 8, free)
    used = 9 * (fits + 1 + 1) * ROW_27B
    assert used <= free * 0.9 < used + 9 * ROW_27B


def test_a_budget_too_large_for_memory_is_refused_with_the_largest_that_fits() -> None:
    from sglang_ddtree import config, hooks

    resolved = config.Resolved(config.DDTreeConfig(mode="tree", budget=64), 16)
    with pytest.raises(ValueError, match=r"largest budget that fits is 25\b") as told:
        hooks.refuse_oversized(resolved, ROW_27B, 8, 40 << 30)
    assert "--max-running-requests" in str(told.value)
    hooks.refuse_oversized(config.Resolved(config.DDTreeConfig(mode="tree", budget=25), 16), ROW_27B, 8, 40 << 30)
    with pytest.raises(ValueError, match="no budget fits"):
        hooks.refuse_oversized(resolved, ROW_27B, 48, 2 << 30)


def test_server_info_shows_what_runs() -> None:
    from sglang_ddtree import hooks

    state = SimpleNamespace(internal_state={})
    worker = SimpleNamespace(ddtree_counters=lambda: {"counters": {"trees": 3}})
    hooks.after_internal_state(state, SimpleNamespace(server_args=server_args(32), draft_worker=worker), None)
    shown = state.internal_state["ddtree"]
    assert (shown["mode"], shown["budget"], shown["verify_rows"], shown["block_size"]) == ("tree", 32, 33, 16)
    assert shown["counters"] == {"trees": 3}
    untouched = SimpleNamespace(internal_state={})
    hooks.after_internal_state(untouched, SimpleNamespace(server_args=server_args(None), draft_worker=None), None)
    assert untouched.internal_state == {}
