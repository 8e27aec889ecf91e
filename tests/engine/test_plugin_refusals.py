"""Every reason not to start a server, each with the flag to change, and the configuration that has none."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
from sglang_ddtree import refusals
from sglang_ddtree.config import DDTreeConfig
from sglang_ddtree.refusals import Facts

DENSE = Facts(architecture="Qwen3ForCausalLM", drafter_block=16, capability="9.0")
HYBRID = Facts("Qwen3_5ForCausalLM", hybrid="gdn", drafter_block=16, capability="9.0", proof="record.json")
CACHED = dataclasses.replace(HYBRID, prefix_cache="extra_buffer", cache_proof="record.json")
UNSAFE = "--speculative-ddtree-allow-hybrid-unsafe"


def args(**changes: Any) -> Any:
    base = {
        "tokenizer_worker_num": 1, "pp_size": 1, "dp_size": 1, "tp_size": 1, "enable_dp_attention": False,
        "disaggregation_mode": "null", "enable_lora": None, "lora_paths": None, "speculative_adaptive": False,
        "speculative_use_rejection_sampling": False, "enable_pdmux": False, "enable_two_batch_overlap": False,
        "speculative_draft_model_path": "drafter", "page_size": 1, "attention_backend": "triton",
        "prefill_attention_backend": None, "decode_attention_backend": None, "speculative_draft_window_size": None,
        "speculative_dflash_block_size": None, "mamba_radix_cache_strategy": "extra_buffer",
        "enable_linear_replayssm": False, "enable_linear_replayssm_spec": False,
        "speculative_attention_mode": "prefill",
        "speculative_accept_threshold_single": 1.0, "speculative_accept_threshold_acc": 1.0,
        "disable_radix_cache": True, "uses_mamba_radix_cache": True, "enable_deterministic_inference": False,
        "enable_unified_memory": False, "enable_page_major_kv_layout": False, "enable_hisparse": False,
        "enable_int8_mamba_checkpoint": False, "enable_hierarchical_cache": False,
    }  # fmt: skip
    unknown = set(changes) - set(base)
    assert not unknown, f"no rule reads {unknown}"
    return SimpleNamespace(**{**base, **changes})


def reasons(mode: str, facts: Facts = DENSE, config: dict[str, Any] | None = None, **changes: Any) -> list[str]:
    return refusals.reasons(args(**changes), DDTreeConfig(mode=mode, **(config or {})), facts)


@pytest.mark.parametrize("mode", ["linear", "shadow-linear", "tree"])
@pytest.mark.parametrize("facts", [DENSE, HYBRID])
def test_a_plain_server_is_admitted(mode: str, facts: Facts) -> None:
    assert reasons(mode, facts) == []


ALWAYS = [
    ({"tokenizer_worker_num": 2}, "--tokenizer-worker-num 1"),
    ({"pp_size": 2}, "--pipeline-parallel-size 1"),
    ({"dp_size": 2}, "--data-parallel-size 1"),
    ({"enable_dp_attention": True}, "--enable-dp-attention"),
    ({"disaggregation_mode": "decode"}, "--disaggregation-mode null"),
    ({"enable_lora": True}, "--enable-lora"),
    ({"lora_paths": ["a=b"]}, "--lora-paths"),
    ({"speculative_adaptive": True}, "--speculative-adaptive"),
    ({"speculative_use_rejection_sampling": True}, "--speculative-use-rejection-sampling"),
    ({"enable_pdmux": True}, "--enable-pdmux"),
    ({"enable_two_batch_overlap": True}, "--enable-two-batch-overlap"),
    ({"speculative_draft_model_path": None}, "--speculative-draft-model-path"),
]
TREE_ONLY = [
    ({"page_size": 16}, "--page-size 1"),
    ({"attention_backend": "fa3"}, "--attention-backend triton"),
    ({"decode_attention_backend": "flashinfer"}, "--attention-backend triton"),
    ({"attention_backend": "trtllm_mha"}, "--attention-backend triton"),
    ({"speculative_draft_window_size": 512}, "--speculative-draft-window-size"),
    ({"speculative_dflash_block_size": 8}, "--speculative-dflash-block-size is 8"),
    ({"enable_linear_replayssm": True}, "--enable-linear-replayssm"),
    ({"enable_linear_replayssm_spec": True}, "--enable-linear-replayssm"),
    ({"speculative_attention_mode": "decode"}, "--speculative-attention-mode prefill"),
    ({"speculative_accept_threshold_single": 0.5}, "--speculative-accept-threshold-single"),
    ({"speculative_accept_threshold_acc": 0.5}, "--speculative-accept-threshold-acc"),
    ({"enable_deterministic_inference": True}, "--enable-deterministic-inference"),
    ({"enable_unified_memory": True}, "--enable-unified-memory"),
    ({"enable_page_major_kv_layout": True}, "--enable-page-major-kv-layout"),
    ({"enable_hisparse": True}, "--enable-hisparse"),
]


@pytest.mark.parametrize(("change", "names"), ALWAYS)
@pytest.mark.parametrize("mode", ["linear", "shadow-linear", "tree"])
def test_what_no_mode_serves(change: dict[str, Any], names: str, mode: str) -> None:
    (reason,) = reasons(mode, **change)
    assert names in reason


@pytest.mark.parametrize(("change", "names"), TREE_ONLY)
def test_what_trees_do_not_serve(change: dict[str, Any], names: str) -> None:
    (reason,) = reasons("tree", **change)
    assert names in reason
    assert reasons("linear", **change) == []


@pytest.mark.parametrize(
    ("facts", "names"),
    [
        ({"sliding_window": True}, "sliding-window"),
        ({"mla": True}, "MLA"),
        ({"hybrid": "NemotronHConfig"}, "NemotronHConfig"),
        ({"plan_stream": True}, "SGLANG_ENABLE_OVERLAP_PLAN_STREAM"),
        ({"simulated_acceptance": True}, "SGLANG_SIMULATE_ACC_LEN"),
    ],
)
def test_what_the_models_or_the_environment_rule_out(facts: dict[str, Any], names: str) -> None:
    found = reasons("tree", Facts(**{"drafter_block": 16, "proof": "x", **facts}))
    assert len(found) == 1
    assert names in found[0]


def test_lazy_state_buffers_are_refused_for_hybrids_only() -> None:
    lazy = {"mamba_radix_cache_strategy": "extra_buffer_lazy"}
    assert "extra_buffer" in reasons("tree", HYBRID, **lazy)[0]
    assert reasons("tree", DENSE, **lazy) == []


def test_prefix_caches_that_would_continue_from_a_wrong_state() -> None:
    cached = {"disable_radix_cache": False}
    unsafe = {"allow_hybrid_unsafe": True}
    (reason,) = reasons("tree", HYBRID, unsafe, uses_mamba_radix_cache=False, **cached)
    assert "in plain decoding too" in reason
    (reason,) = reasons("tree", HYBRID, unsafe, mamba_radix_cache_strategy="no_buffer", **cached)
    assert "extra_buffer" in reason
    for facts in (HYBRID, CACHED):  # whatever is proven
        assert reasons("tree", facts, mamba_radix_cache_strategy="no_buffer", **cached) == [reason]
        (lazy,) = reasons("tree", facts, unsafe, mamba_radix_cache_strategy="extra_buffer_lazy", **cached)
        assert "set --mamba-radix-cache-strategy extra_buffer" in lazy
        assert "in plain decoding too" in reasons("tree", facts, uses_mamba_radix_cache=False, **cached)[0]
    assert reasons("tree", HYBRID, unsafe, **cached) == []
    assert reasons("tree", DENSE, **cached) == []
    assert reasons("shadow-linear", HYBRID, **cached) == []


def test_the_prefix_cache_is_admitted_where_a_record_says_so() -> None:
    cached = {"disable_radix_cache": False}
    assert reasons("tree", CACHED, **cached) == []
    why = "a.json is about trees without the prefix cache"
    unproven = dataclasses.replace(CACHED, cache_proof=None, cache_reasons=(why,))
    (reason,) = reasons("tree", unproven, **cached)
    for part in (why, "9.0", "self-test on this host with --states snapshots,", "--disable-radix-cache", UNSAFE):
        assert part in reason
    kept = {"states": "records", "heads": (128, 128), "activation": "silu"}
    (reason,) = reasons("tree", dataclasses.replace(unproven, tp=2, **kept), tp_size=2, **cached)
    assert "self-test on this host with --tp 2," in reason
    (reason,) = reasons("tree", dataclasses.replace(unproven, auto=True), **cached)
    assert "use --speculative-ddtree-mode tree, set --disable-radix-cache" in reason
    assert "self-test" not in reason
    found = reasons("tree", dataclasses.replace(unproven, proof=None, proof_reasons=("b.json did not pass",)), **cached)
    assert len(found) == 2
    assert sum("b.json" in reason for reason in found) == 1
    assert why not in "".join(found)


@pytest.mark.parametrize("flag", ["enable_int8_mamba_checkpoint", "enable_hierarchical_cache"])
def test_a_proof_is_about_states_as_computed_on_the_gpu(flag: str) -> None:
    given = {"disable_radix_cache": False, flag: True}
    (reason,) = reasons("tree", CACHED, **given)
    assert f"--{flag.replace('_', '-')}" in reason
    assert reasons("tree", CACHED, {"allow_hybrid_unsafe": True}, **given) == []
    assert reasons("tree", CACHED, **{**given, "disable_radix_cache": True}) == []


def test_an_unproven_hybrid_names_the_self_test_and_the_flag() -> None:
    unproven = Facts(architecture="Qwen3_5ForCausalLM", hybrid="gdn", capability="12.0", drafter_block=16,
                     proof_reasons=("old.json is about engine 'x', not 'y'",))  # fmt: skip
    (reason,) = reasons("tree", unproven)
    for part in ("Qwen3_5ForCausalLM", "12.0", "self-test", "--speculative-ddtree-allow-hybrid-unsafe", "old.json"):
        assert part in reason
    assert reasons("tree", unproven, {"allow_hybrid_unsafe": True}) == []
    assert reasons("shadow-linear", unproven) == []


RECORDS = Facts("Qwen3_5ForCausalLM", hybrid="gdn", drafter_block=16, capability="9.0", proof="record.json",
                states="records", heads=(128, 128), activation="silu")  # fmt: skip


def test_records_are_served_where_the_kernels_are_written_for() -> None:
    assert reasons("tree", RECORDS, {"budget": 64}) == []
    assert reasons("tree", dataclasses.replace(HYBRID, heads=(96, 96)), {"budget": 255}) == []  # snapshots


@pytest.mark.parametrize(
    ("facts", "budget", "names"),
    [
        ({}, 65, "--speculative-ddtree-budget 64"),
        ({"heads": (96, 128)}, 16, "96 and 128"),
        ({"heads": (128, 24)}, 16, "128 and 24"),
        ({"heads": (8, 16)}, 16, "8 and 16"),
        ({"heads": None}, 16, "0 and 0"),
        ({"activation": "gelu"}, 16, "'gelu'"),
        ({"dtypes": ("float16", "bfloat16")}, 16, "SGLANG_MAMBA_CONV_DTYPE=float16"),
        ({"hybrid": ""}, 16, "Qwen3_5ForCausalLM has none"),
    ],
)
def test_what_records_do_not_serve(facts: dict[str, Any], budget: int, names: str) -> None:
    (reason,) = reasons("tree", dataclasses.replace(RECORDS, **facts), {"budget": budget, "allow_hybrid_unsafe": True})
    assert names in reason
    assert "--speculative-ddtree-states snapshots" in reason


def test_unproven_records_are_refused_as_such() -> None:
    (reason,) = reasons("tree", dataclasses.replace(RECORDS, proof=None))
    assert "kept as records" in reason
    assert "Run the self-test on this host, or" in reason  # it proves records by itself
    (reason,) = reasons("tree", dataclasses.replace(RECORDS, proof=None, states="snapshots"))
    assert "kept as snapshots" in reason
    assert "Run the self-test on this host with --states snapshots, or" in reason
    assert reasons("tree", dataclasses.replace(RECORDS, proof=None), {"allow_hybrid_unsafe": True}) == []


@pytest.mark.parametrize("facts", [DENSE, HYBRID])
def test_a_model_on_several_gpus_needs_a_proof_whatever_its_layers(facts: Facts) -> None:
    """Ranks that part write plausible text too, and no record about one GPU is about them."""
    why = "a.json is about a model on 1 GPU, not on 2"
    unproven = dataclasses.replace(facts, proof=None, proof_reasons=(why,), tp=2)
    (reason,) = reasons("tree", unproven, tp_size=2)
    for part in (
        facts.architecture,
        why,
        "with --states snapshots --tp 2,",
        "with 2 GPUs",
        "--speculative-ddtree-allow-hybrid-unsafe",
    ):
        assert part in reason
    assert ("--tensor-parallel-size 1" in reason) is not bool(facts.hybrid)  # a hybrid one needs a proof there as well
    assert reasons("tree", unproven, {"allow_hybrid_unsafe": True}, tp_size=2) == []
    assert reasons("tree", dataclasses.replace(unproven, proof="two.json"), tp_size=2) == []
    for mode in ("linear", "shadow-linear"):
        assert reasons(mode, unproven, tp_size=2) == []


def test_the_unsafe_flag_admits_nothing_else() -> None:
    """It stands for 'nobody has checked this GPU', never for wrong states."""
    lightning = Facts(architecture="X", hybrid="BailingHybridConfig", drafter_block=16)
    assert len(reasons("tree", lightning, {"allow_hybrid_unsafe": True})) == 1
    assert len(reasons("tree", HYBRID, {"allow_hybrid_unsafe": True}, page_size=16)) == 1


def test_all_reasons_are_told_at_once() -> None:
    found = reasons("tree", page_size=16, dp_size=2, pp_size=2)
    assert len(found) == 3
    text = refusals.message(DDTreeConfig(mode="tree"), found)
    assert text.count("\n  - ") == 3
    assert "mode tree" in text
