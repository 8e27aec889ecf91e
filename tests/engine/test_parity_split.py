"""The stages of a round told apart in a profile's kernels, on rounds in the order the engine launches them."""

from __future__ import annotations

import dataclasses

import pytest
from sglang_ddtree.parity import split
from sglang_ddtree.parity.split import Kernel

LAYERS = 8
ELEMENTWISE = "void at::native::elementwise_kernel<128, 4, bfloat16_copy>"
NORM = "void flashinfer::norm::FusedAddRMSNormKernel<8u, __nv_bfloat16>"
PRODUCT = "nvjet_sm90_tst_128x8_64x12_2x1_v_bz_splitK_TNT"
LAYER = (NORM, PRODUCT, "_fwd_kernel")


@dataclasses.dataclass
class Tape:
    """Kernels of 10 microseconds, 1 apart, unless said otherwise."""

    kernels: list[Kernel] = dataclasses.field(default_factory=list)
    now: float = 1000.0
    launch: int = 100

    def alone(self, *names: str) -> None:
        for name in names:
            self.launch += 1
            self.put(name)

    def graph(self, *names: str) -> None:
        self.launch += 1
        for name in names:
            self.put(name)

    def put(self, name: str, took: float = 10.0) -> None:
        self.kernels.append(Kernel(name, self.now, self.now + took, self.launch))
        self.now += took + 1.0


def tree_round(tape: Tape) -> None:
    tape.alone("_prepare_round_kernel", "void at::native::index_select_kernel")
    tape.graph(
        *LAYER * LAYERS, NORM, "nvjet_sm90_tst_384x24_64x4_4x1", "splitKreduce_kernel",
        "_topk_chunks_kernel", "_topk_merge_chunks_kernel", ELEMENTWISE, "_build_tree_kernel",
    )  # fmt: skip
    tape.alone("_tree_mask_kernel", ELEMENTWISE, "Memcpy DtoD (Device -> Device)")
    tape.graph(*LAYER * 2 * LAYERS, "nvjet_sm90_tst_384x24_64x4_4x1")
    tape.alone("void at::native::reduce_kernel<512, 1, ArgMaxOps<float>>", "_accept_kernel")
    tape.alone("mamba_state_scatter", "copy_all_layer_kv_cache", PRODUCT)


def chain_round(tape: Tape) -> None:
    tape.alone("_prepare_dflash_draft_block_contig_kernel")
    tape.graph(*LAYER * LAYERS, NORM, "nvjet_sm90_tst_384x24_64x4_4x1", "reduce_kernel<512, 1, ArgMaxOps<float>>")
    tape.alone(ELEMENTWISE)
    tape.graph(*LAYER * 2 * LAYERS, "nvjet_sm90_tst_384x24_64x4_4x1")
    tape.alone("reduce_kernel<512, 1, ArgMaxOps<float>>", "_dflash_accept_bonus_contig_kernel", "mamba_state_scatter")


def plain_round(tape: Tape) -> None:
    tape.graph(*LAYER * LAYERS, PRODUCT)
    tape.alone("reduce_kernel<512, 1, ArgMaxOps<float>>", ELEMENTWISE)


def test_the_stages_of_a_tree_round() -> None:
    tape = Tape()
    for _ in range(4):
        tree_round(tape)
    found = split.split(tape.kernels)
    assert found["draft"] == 10.0 * (2 + 3 * LAYERS + 1)
    assert found["head"] == 10.0 * 5  # the product, its reduction, two launches of top-k and a copy
    assert found["build"] == 10.0 * (1 + 3)
    assert found["verify"] == 10.0 * (6 * LAYERS + 1 + 1)
    assert found["commit"] == 10.0 * 4
    assert found["rounds"] == 3
    assert found["gaps"] == pytest.approx(len(tape.kernels) / 4)


def test_the_stages_of_a_chain_and_of_plain_decoding() -> None:
    chain, plain = Tape(), Tape()
    for _ in range(3):
        chain_round(chain)
        plain_round(plain)
    found = split.split(chain.kernels)
    assert (found["head"], found["commit"]) == (20.0, 20.0)
    assert found["verify"] == 10.0 * (6 * LAYERS + 2)
    found = split.split(plain.kernels)
    assert (found["draft"], found["head"], found["build"]) == (0.0, 0.0, 0.0)
    assert found["verify"] == 10.0 * (3 * LAYERS + 1)
    assert found["commit"] == 20.0


def test_order_does_not_matter_and_a_prefill_is_left_out() -> None:
    tape = Tape()
    tree_round(tape)
    tape.graph(*LAYER * 3 * LAYERS)  # a prefill's graph falls into the first round
    for _ in range(3):
        tree_round(tape)
    assert split.split(tape.kernels[::-1]) == split.split(tape.kernels)
    assert split.split(tape.kernels)["rounds"] == 2


def test_streams_that_overlap_are_no_negative_gap() -> None:
    line = [Kernel("a", 0.0, 10.0, 1), Kernel("copy", 2.0, 4.0, 2), Kernel("b", 12.0, 15.0, 3)]
    assert split.idle(line, 20.0) == 2.0 + 5.0


@pytest.mark.parametrize("without", ["graphs", "rounds"])
def test_what_cannot_be_told_apart_is_said(without: str) -> None:
    tape = Tape()
    for _ in range(3):
        tree_round(tape)
    eager = [dataclasses.replace(kernel, launch=number) for number, kernel in enumerate(tape.kernels)]
    with pytest.raises(ValueError, match="without CUDA graphs" if without == "graphs" else "none whole"):
        split.split(eager if without == "graphs" else [])


def test_a_job_keeps_the_last_rounds_as_they_were() -> None:
    from sglang_ddtree.parity import jobs

    tape = Tape()
    for _ in range(6):
        tree_round(tape)
    found = jobs.by_stage(tape.kernels, kept=2)
    again = [Kernel(found["names"][n], start, start + took, launch) for n, start, took, launch in found["timeline"]]
    assert len(split.cut(again)) == 1  # two rounds; the second's end is not seen any more
    assert found["stages_us"] == split.split(tape.kernels)
    assert jobs.by_stage([])["stages_us"] is None
    assert jobs.by_kernel(tape.kernels, 6, 3)["launches_per_round"] == len(tape.kernels) / 6
