"""Which arms a section names, and that SGLang itself accepts every arm's command line on an H200."""

from __future__ import annotations

import dataclasses
import tomllib
from pathlib import Path
from typing import Any

import parse_arms
import pytest
import sglang_setup
from cpu_pair import FOLDER
from sglang_ddtree import selftest
from sglang_ddtree.parity import models, plan, sections

from benchmarks.gpu import pair_two, stages

ROOT = Path(__file__).parents[2]
ALL = [
    *(f"{target}/{name}" for target in ("hybrid", "dense") for name in
      ("matrix", "variants", "behaviour", "audits", "oracle", "auto", "bf16", "selftest")),
    *(f"hybrid/{name}@records" for name in ("matrix", "behaviour", "audits", "oracle", "auto", "bf16", "selftest")),
    "hybrid/costs", "shape-27b-12/costs", "shape-27b/costs", "shape-27b/costs-of-eight",
    "hybrid/costs@records", "shape-27b-12/costs@records", "shape-27b/costs@records", "shape-27b/costs-of-eight@records",
    *stages.PARITY, *stages.PARITY_RECORDS, *stages.PARITY_REST, *stages.COSTS, *stages.COSTS_SLICE,
    *stages.COSTS_OF_EIGHT, *stages.PARITY_LONG,
]  # fmt: skip


def bench_arms() -> dict[str, list[str]]:
    """The servers of the benchmark's file: their flags."""
    table = tomllib.loads((ROOT / "benchmarks/engine/h200.toml").read_text())
    return {
        f"bench/{entry['name']}": [*table["common"], *(table["speculation"] if "speculation" in entry else ()),
                                   *entry.get("speculation", ())]
        for entry in table["arm"]
    }  # fmt: skip


def on_two_by_nccl() -> list[plan.Arm]:
    """What the session's stages for two GPUs run, beside pair_two."""
    proven = [selftest.with_weights(arm) for arm in selftest.arms(FOLDER)]
    records = [dataclasses.replace(arm, name=f"{arm.name}@records", states="records") for arm in proven]
    arms = [arm for arm in (*sections.gather(stages.PARITY_TWO), *proven, *records) if arm.kind != "auto"]
    spread = [plan.spread(arm, 2, nccl_only="--nccl-only" in stages.ON_TWO) for arm in arms]
    return [dataclasses.replace(arm, name=f"{arm.name} by nccl") for arm in spread]


@pytest.fixture(scope="module")
def settled(sglang_src: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    if absent := sglang_setup.missing():
        pytest.skip(f"tests/engine/requirements.txt is not installed: no {', '.join(absent)}")
    folder = tmp_path_factory.mktemp("models")
    models.write(folder)

    def line(arm: plan.Arm) -> tuple[list[str], bool, dict[str, str]]:
        spec = arm.spec(folder, folder / "lock")
        return spec["argv"], spec["extra_buffer"], spec["environ"]

    asked: dict[str, Any] = {arm.name: line(arm) for arm in sections.gather(ALL) if not arm.extra_buffer}
    asked |= {name: (argv, False) for name, argv in bench_arms().items()}
    pair = [selftest.with_weights(arm) for arm in selftest.arms(FOLDER)]
    asked |= {arm.name: line(arm) for arm in pair if not arm.extra_buffer}
    shared = [
        *sections.gather(["hybrid/selftest", "dense/selftest"]),
        *pair,
    ]
    two = [dataclasses.replace(plan.spread(a, 2), name=f"{a.name} on two") for a in shared if a.kind != "auto"]
    asked |= {arm.name: line(arm) for arm in two if not arm.extra_buffer}
    asked |= {arm.name: line(arm) for arm in (*on_two_by_nccl(), *pair_two.arms(FOLDER))}
    # last, since the architecture stays listed
    asked |= {arm.name: line(arm) for arm in (*sections.gather(ALL), *pair, *two) if arm.extra_buffer}
    found = parse_arms.resolved(asked, sglang_src)
    assert set(found) == set(asked)
    return found


def test_sglang_accepts_every_arm_on_an_h200(settled: dict[str, Any]) -> None:
    refused = {name: found["error"] for name, found in settled.items() if "error" in found}
    assert refused == {}


def test_arms_run_as_their_names_say(settled: dict[str, Any]) -> None:
    for arm in sections.gather(ALL):
        found = settled[arm.name]
        if arm.kind in ("tree", "auto"):
            assert found["speculative_num_draft_tokens"] == arm.budget + 1, arm.name
        assert found["disable_overlap_schedule"] == ("overlap" in arm.name or "/oracle-" in arm.name), arm.name
        assert found["disable_radix_cache"] == ("radix" not in arm.name), arm.name
        assert found["max_running_requests"] == arm.requests, arm.name
        assert found["states"] == (
            ("records" if "@records" in arm.name else "snapshots") if arm.kind in ("tree", "auto") else None
        )
    behaviour = ("hybrid/ar-radix", "hybrid/tree-radix", "hybrid/tree-radix@records")
    for name in (*behaviour, "pair/ar-radix", "pair/tree-radix", "pair/tree-radix on two", "hybrid/tree-radix on two"):
        radix = settled[name]
        assert not radix["disable_radix_cache"]
        assert radix["uses_mamba_radix_cache"]
        assert radix["mamba_radix_cache_strategy"] == "extra_buffer"


def test_two_gpus_sum_by_nccl_alone_and_nothing_asks_for_multicast(settled: dict[str, Any]) -> None:
    arms = [arm for arm in (*on_two_by_nccl(), *pair_two.arms(FOLDER)) if arm.tp > 1]
    assert len(arms) > 30
    for arm in arms:
        found = settled[arm.name]
        assert (found["tp_size"], found["disable_custom_all_reduce"]) == (2, True), arm.name
        assert found["flashinfer_allreduce_fusion_backend"] is None
        asks = ("enable_nccl_nvls", "enable_symm_mem", "enable_torch_symm_mem", "enable_mscclpp")
        assert not any(found[name] for name in asks), arm.name
        assert arm.spec(FOLDER, FOLDER)["environ"]["NCCL_NVLS_ENABLE"] == "0"
    assert not settled["hybrid/tree-16-8 on two"]["disable_custom_all_reduce"]  # a host proves what it serves with


def test_a_section_is_whole_or_the_named_arms_with_their_references() -> None:
    assert [arm.name for arm in sections.parse("hybrid/matrix")] == [arm.name for arm in plan.matrix("hybrid")]
    assert [arm.name for arm in sections.parse("hybrid/matrix:tree-16-2")] == ["hybrid/ar", "hybrid/tree-16-2"]
    named = [arm.name for arm in sections.parse("dense/behaviour:tree-10k,tree-radix")]
    assert named == ["dense/ar-10k", "dense/ar-radix", "dense/tree-10k", "dense/tree-radix"]
    assert [arm.name for arm in sections.parse("hybrid/bf16:bf16-linear")] == [
        "hybrid/bf16-dflash",
        "hybrid/bf16-linear",
    ]
    assert [arm.name for arm in sections.parse("hybrid/costs@records:cost-tree-16")] == ["hybrid/cost-tree-16@records"]
    twice = sections.gather(["hybrid/matrix:tree-16-2", "hybrid/matrix:tree-16-2,tree-32-8"])
    assert [arm.name for arm in twice] == ["hybrid/ar", "hybrid/tree-16-2", "hybrid/tree-32-8"]


def test_records_are_compared_with_the_same_plain_decoding_and_change_trees_only() -> None:
    changing = {arm.name: arm for arm in sections.parse("hybrid/auto@records")}
    assert {arm.states for arm in changing.values() if arm.kind == "auto"} == {"records"}
    assert sections.reference_of(changing["hybrid/auto-cycle@records"]) == "hybrid/ar"
    assert changing["hybrid/auto-cycle@records"].widths == plan.AUTO_WIDTHS
    named = sections.parse("hybrid/behaviour@records:tree-radix")
    assert [(arm.name, arm.states) for arm in named] == [
        ("hybrid/ar-radix", "snapshots"), ("hybrid/tree-radix@records", "records"),
    ]  # fmt: skip
    arms = {arm.name: arm for arm in sections.parse("hybrid/matrix@records")}
    assert {arm.states for arm in arms.values() if arm.kind == "tree"} == {"records"}
    assert sections.reference_of(arms["hybrid/tree-16-8@records"]) == "hybrid/ar"
    whole = {arm.name: arm.memory for arm in sections.parse("shape-27b/costs@records")}
    assert set(whole.values()) == {(1, 2)}


@pytest.mark.parametrize(
    ("text", "says"),
    [("hybrid", "is no section"), ("hybrid/matrix@logs", "is no section"),
     ("hybrid/none", "is no section"), ("tiny/matrix", "is no section"),
     ("hybrid/matrix:tree-3-3", "has no arm hybrid/tree-3-3; it has")],
)  # fmt: skip
def test_what_does_not_exist_is_said_with_what_does(text: str, says: str) -> None:
    with pytest.raises(sections.SectionError, match=says):
        sections.parse(text)


def test_every_arm_is_compared_with_one_that_its_section_brings() -> None:
    for text in ALL:
        if "costs" in text or "oracle" in text:
            continue
        arms = {arm.name: arm for arm in sections.parse(text)}
        plain = {arm.name for arm in plan.matrix(text.partition("/")[0])}
        for arm in arms.values():
            assert sections.reference_of(arm) in {*arms, *plain}, arm.name


def test_real_sizes_are_timed_at_one_and_eight_requests_and_share_the_memory() -> None:
    whole = {arm.name.removeprefix("shape-27b/cost-"): arm for arm in sections.parse("shape-27b/costs")}
    assert {job["batch"] for job in whole["tree-64"].jobs} == {1}
    assert whole["ar"].memory == whole["tree-32"].memory == (1, 2)
    assert whole["tree-64"].memory == (2, 2)  # 18 GiB of snapshots beside 54 GB of weights
    eight = sections.parse("shape-27b/costs-of-eight")
    assert {arm.kind: arm.memory for arm in eight} == {"ar": (1, 2), "linear": (2, 2), "tree": (2, 2)}
    assert {arm.budget for arm in eight if arm.kind == "tree"} == {8, 15, 16, 31, 32, 63, 64}
    for target in ("shape-27b-12", "hybrid"):
        (batches,) = {tuple(job["batch"] for job in arm.jobs) for arm in sections.parse(f"{target}/costs")}
        assert batches == (1, 1, 8, 8)
    vocabularies = {job["vocab"] for arm in sections.parse("hybrid/costs") for job in arm.jobs}
    assert vocabularies == {models.VOCAB}
