from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddtree_ops.facts.memory import compare, parse_memory_log
from ddtree_ops.model import Mode
from ddtree_ops.planner import (
    GIB,
    MIB,
    Ask,
    image_pool,
    largest_budget,
    largest_context,
    largest_running,
    logits_bytes,
    plan_memory,
)
from ddtree_ops.shapes import parse_drafter, parse_model

CONFIGS = Path(__file__).parent / "fixtures/configs"
TARGET = parse_model((CONFIGS / "shape-27b.json").read_text(), "config.json")
DRAFTER = parse_drafter((CONFIGS / "shape-27b-dflash.json").read_text(), "config.json")
H200 = 143771 * MIB
RTX_PRO_6000 = 97887 * MIB
ASK = Ask(
    target=TARGET,
    weights=54_000_000_000,
    gpu_bytes=H200,
    drafter=DRAFTER,
    drafter_weights=3_460_000_000,
    mode=Mode.LINEAR,
)


def item(ask: Ask, name: str) -> int:
    return next(i.bytes for i in plan_memory(ask).items if i.name == name)


def test_a_snapshot_of_the_27b_shapes() -> None:
    """48 recurrent layers, 48 value heads, 128 x 128: 144 MiB in fp32, 72 MiB in bf16, 2.81 MiB of convolution."""
    gdn = TARGET.recurrence
    assert gdn is not None
    assert (gdn.layers, TARGET.attention.layers) == (48, 16)
    assert gdn.state_bytes(4) == 150_994_944 == 144 * MIB
    assert gdn.state_bytes(2) == 75_497_472 == 72 * MIB
    assert gdn.conv_channels() == 10240
    assert gdn.conv_bytes(2) == 2_949_120


@pytest.mark.parametrize(
    ("budget", "fp32", "bf16"), [(15, 2.29, 1.17), (16, 2.44, 1.24), (32, 4.73, 2.41), (64, 9.32, 4.75)]
)
def test_snapshots_of_one_request_by_budget(budget: int, fp32: float, bf16: float) -> None:
    for dtype, want in (("float32", fp32), ("bfloat16", bf16)):
        ask = replace(ASK, mode=Mode.TREE, budget=budget, running=1, state_dtype=dtype, states="snapshots")
        both = item(ask, "state snapshots") + item(ask, "convolution snapshots")
        assert both / 2 / GIB == pytest.approx(want, abs=0.006), "one request and the padding slot"


def test_snapshots_that_a_server_reported() -> None:
    """The log of SGLang 0.5.17 on these shapes, 8 requests x 16 rows: intermediate_ssm_state_cache size: 20.25GB."""
    assert item(replace(ASK, running=8), "state snapshots") == 20.25 * GIB


def test_budget_32_with_8_requests() -> None:
    """33 rows: 41.8 GiB of snapshots beside 53.5 GiB of weights; it fits an H200, not a 96 GB card."""
    ask = replace(ASK, mode=Mode.TREE, budget=32, running=8, radix="off", states="snapshots")
    assert item(ask, "state snapshots") == 9 * 33 * 144 * MIB
    assert plan_memory(ask).fits
    assert not plan_memory(replace(ask, gpu_bytes=RTX_PRO_6000)).fits
    assert largest_running(replace(ask, gpu_bytes=RTX_PRO_6000)) == 4
    assert largest_budget(replace(ask, gpu_bytes=RTX_PRO_6000)) == 17
    assert plan_memory(replace(ask, gpu_bytes=RTX_PRO_6000, budget=17)).fits


def test_mode_auto_takes_the_memory_of_its_widest_tree() -> None:
    tree = replace(ASK, mode=Mode.TREE, budget=32)
    for kept in (replace(tree, states="snapshots"), replace(tree, states="records")):
        assert plan_memory(replace(kept, mode=Mode.AUTO)).items == plan_memory(kept).items


def test_budget_32_with_8_requests_and_records() -> None:
    """53440 bytes a row and layer: 0.63 GiB in place of 42.6, and the 96 GB card serves what the H200 does."""
    kept = replace(ASK, mode=Mode.TREE, budget=32, running=8, radix="off", states="records", gpu_bytes=RTX_PRO_6000)
    gdn = TARGET.recurrence
    assert gdn is not None
    assert gdn.record_bytes(2) == 48 * (4 * (48 * 128 + 16 * 128 + 48) + 2 * 10240) == 48 * 53440
    assert item(kept, "state records") == 8 * 33 * 48 * 53440
    assert not [i.name for i in plan_memory(kept).items if "snapshots" in i.name]
    assert plan_memory(kept).fits
    assert largest_running(kept) == 75
    assert largest_budget(kept) == 64  # as wide as the kernels go
    snapshots = plan_memory(replace(kept, states="snapshots"))
    assert not snapshots.fits
    assert (
        plan_memory(kept).left - snapshots.left
        == 9 * 33 * 48 * (48 * 128 * 128 * 4 + 10240 * 3 * 2) - 8 * 33 * 48 * 53440
    )


def test_states_are_planned_as_the_engine_keeps_them_by_itself() -> None:
    for mode in (Mode.TREE, Mode.AUTO):
        ask = replace(ASK, mode=mode, running=1)
        for budget, way in ((1, "records"), (16, "records"), (64, "records"), (65, "snapshots")):
            asked = replace(ask, budget=budget)
            assert asked.kept.states == way
            assert plan_memory(asked).items == plan_memory(replace(asked, states=way)).items
            assert bool(asked.kept.why) == (way == "snapshots")
    small = replace(ASK, mode=Mode.TREE, running=8, gpu_bytes=RTX_PRO_6000, budget=128)
    assert largest_budget(small) == 64, "wider trees keep snapshots, and those do not fit"
    assert largest_budget(replace(small, running=1)) > 64


@pytest.mark.parametrize("mode", [Mode.AR, Mode.LINEAR, Mode.SHADOW_LINEAR])
def test_only_trees_keep_records(mode: Mode) -> None:
    assert plan_memory(replace(ASK, mode=mode, states="records")).items == plan_memory(replace(ASK, mode=mode)).items


def test_logits_of_65_rows_are_65_mb_a_request() -> None:
    assert logits_bytes(replace(ASK, mode=Mode.TREE, budget=64, running=1)) == 65 * 248320 * 4


def test_kv_cache_of_a_token() -> None:
    assert TARGET.attention.bytes_per_token(2) == 16 * 4 * 256 * 2 * 2
    plan = plan_memory(ASK)
    assert plan.bytes_per_token == (16 * 4 * 256 + 5 * 8 * 128) * 2 * 2
    assert plan_memory(replace(ASK, mode=Mode.AR)).bytes_per_token == 16 * 4 * 256 * 2 * 2


def test_a_fraction_that_was_given_is_what_counts() -> None:
    plan = plan_memory(replace(ASK, mem_fraction=0.8))
    assert plan.mem_fraction == pytest.approx(0.8, abs=0.001)
    assert plan.left < plan_memory(ASK).left


OLDER, SIZE = "SGLANG_USE_CUDA_IPC_TRANSPORT", "SGLANG_MM_FEATURE_CACHE_MB"


@pytest.mark.parametrize(
    ("flags", "env", "mib"),
    [
        ({}, {}, 1024),
        ({}, {SIZE: "256"}, 256),
        ({"--mm-feature-transport": "cpu"}, {}, 0),
        ({"--mm-feature-transport": "cuda_ipc"}, {OLDER: "0"}, 1024),
        ({}, {OLDER: "0"}, 0),
        ({}, {OLDER: "True"}, 1024),
    ],
)
def test_a_target_that_sees_has_a_pool_for_images(flags: dict[str, str], env: dict[str, str], mib: int) -> None:
    seeing = replace(TARGET, architecture="Qwen3_5ForConditionalGeneration")
    assert image_pool(seeing, flags, env) == mib * MIB
    assert image_pool(TARGET, flags, env) == 0
    ask = replace(ASK, image_pool=image_pool(seeing, flags, env))
    assert plan_memory(ASK).left - plan_memory(ask).left == mib * MIB


def test_limits_are_rendered_explicitly() -> None:
    plan = plan_memory(replace(ASK, mode=Mode.TREE, budget=16, running=4))
    assert plan.flags() == (
        "--max-running-requests", "4", "--cuda-graph-max-bs-decode", "4",
        "--mem-fraction-static", f"{plan.mem_fraction:.3f}",
        "--max-mamba-cache-size", "20", "--mamba-ssm-dtype", "float32",
    )  # fmt: skip
    assert 0.85 < plan.mem_fraction < 0.93


def test_a_dense_target_has_no_states() -> None:
    dense = parse_model((CONFIGS / "tiny-dense.json").read_text(), "config.json")
    plan = plan_memory(Ask(target=dense, weights=GIB, gpu_bytes=H200, mode=Mode.TREE, drafter=DRAFTER))
    assert [i.name for i in plan.items] == ["target weights", "drafter weights"]
    assert "--max-mamba-cache-size" not in plan.flags()


@given(
    budget=st.integers(1, 200),
    running=st.integers(1, 64),
    context=st.integers(1024, 262144),
    tp=st.sampled_from([1, 2]),
)
def test_more_never_fits_better(budget: int, running: int, context: int, tp: int) -> None:
    """What is asked for only ever takes more: so the largest that fits can be found by halving."""
    ask = replace(ASK, mode=Mode.TREE, budget=budget, running=running, context=context, tp=tp)
    for more in (replace(ask, budget=budget + 1), replace(ask, running=running + 1), replace(ask, context=context + 1)):
        assert plan_memory(ask).fits or not plan_memory(more).fits
        assert plan_memory(more).left <= plan_memory(ask).left


def test_the_largest_is_the_last_that_fits() -> None:
    ask = replace(ASK, mode=Mode.TREE, budget=16, running=4)
    for found, name in ((largest_running(ask), "running"), (largest_budget(ask), "budget")):
        assert plan_memory(replace(ask, **{name: found})).fits
        assert not plan_memory(replace(ask, **{name: found + 1})).fits
    assert largest_context(ask) <= TARGET.context
    assert largest_running(replace(ask, weights=200 * GIB)) == 0


# In the format of SGLang 0.5.17's own statements; of the sizes only the snapshots' was recorded on a GPU.
LOG = """\
[2026-11-30 05:10:11] Load weight end. elapsed=12.60 s, type=Qwen3_5ForCausalLM, avail mem=84.11 GB, mem usage=50.29 GB.
[2026-11-30 05:10:13] Load weight end. elapsed=0.80 s, type=DFlashDraftModel, avail mem=81.00 GB, mem usage=3.22 GB.
[2026-11-30 05:10:14] Mamba Cache is allocated. max_mamba_cache_size: 8, conv_state size: 0.02GB, \
ssm_state size: 1.27GB intermediate_ssm_state_cache size: 20.25GB intermediate_conv_window_cache size: 0.15GB
"""


def test_plan_beside_the_log() -> None:
    rows = compare(plan_memory(replace(ASK, radix="off")), parse_memory_log(LOG))
    assert [row.name for row in rows] == [
        "target weights",
        "drafter weights",
        "recurrent states",
        "convolution states",
        "state snapshots",
        "convolution snapshots",
    ]
    assert all(row.close for row in rows), rows
    other = compare(plan_memory(replace(ASK, radix="off", running=9)), parse_memory_log(LOG))
    assert not next(row for row in other if row.name == "state snapshots").close


def test_a_log_of_records_beside_the_plan() -> None:
    states = LOG.replace(" intermediate_ssm_state_cache size: 20.25GB intermediate_conv_window_cache size: 0.15GB", "")
    line = (
        "[2026-11-30 05:10:14] DDTREE: records of recurrent states for 8 requests of 33 rows take 0.63 GiB; snapshots "
        "would take 42.58 GiB.\n"
    )
    plan = plan_memory(replace(ASK, radix="off", mode=Mode.TREE, budget=32, states="records"))
    rows = {row.name: row for row in compare(plan, parse_memory_log(states + line))}
    assert rows["state records"].close
    assert "state snapshots" not in rows
    assert not compare(plan, parse_memory_log(line.replace("0.63", "0.70")))[-1].close


@given(st.text(max_size=200) | st.integers(0, len(LOG)).map(lambda n: LOG[:n]))
def test_a_cut_log_is_no_error(text: str) -> None:
    compare(plan_memory(ASK), parse_memory_log(text))
