"""What cannot run, by architecture, compute capability, mode and SGLang's flags: said before minutes of loading. Pure.

The rules are those of SGLang 0.5.17 and of the engine's own refusals; the engine checks again at start. A rule that
needs a fact nobody knows (a GPU that does not say what it is) does not fire.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from ddtree_ops.bundle.wheel import SGLANG_VERSION
from ddtree_ops.keeping import Dtypes, Kept, dtypes, gap, kept
from ddtree_ops.model import Mode, States
from ddtree_ops.shapes import ModelShape

Capability = tuple[int, int]


@dataclass(frozen=True)
class Case:
    """What is to be started where."""

    mode: Mode
    flags: Mapping[str, str]
    target: ModelShape | None = None
    capability: Capability | None = None
    sglang: str = SGLANG_VERSION
    env: Mapping[str, str] = field(default_factory=dict)

    def flag(self, *names: str) -> str:
        """The value of the first of these flags that is given; empty if none is."""
        return next((self.flags[name] for name in names if name in self.flags), "")

    @property
    def tp(self) -> int:
        """GPUs that share the model."""
        given = self.flag("--tp-size", "--tensor-parallel-size", "--tp")
        return int(given) if given.isdigit() else 1

    def dtypes(self, target: ModelShape) -> Dtypes:
        """Of the target's activations and of its convolutions' windows."""
        return dtypes(target, self.flags, self.env)

    def kept(self, budget: int) -> Kept:
        """How trees of ``budget`` nodes keep recurrent states."""
        asked = cast(States | None, self.flag("--speculative-ddtree-states") or None)
        types = self.dtypes(self.target) if self.target else None
        return kept(asked, self.mode, self.target, budget, types)

    @property
    def prefix_cache(self) -> str | None:
        """The strategy by which recurrent states along tree paths are kept for later requests; None where none are."""
        if not self.mode.verifies_trees or self.target is None or not self.target.hybrid:
            return None
        if "--disable-radix-cache" in self.flags:
            return None
        given = self.flag("--mamba-radix-cache-strategy", "--mamba-scheduler-strategy") or "auto"
        if given != "auto":
            return given
        # SGLang's _mamba_radix_cache_resolution, with pages of one token
        linear = self.flag("--linear-attn-backend") or "triton"
        return "extra_buffer" if linear == "triton" and "--disable-overlap-schedule" not in self.flags else "no_buffer"

    @property
    def sm(self) -> int | None:
        return None if self.capability is None else self.capability[0] * 10 + self.capability[1]

    @property
    def attention(self) -> str:
        """The target's attention backend in a verify pass; SGLang's own choice where none is given."""
        given = self.flag("--prefill-attention-backend", "--attention-backend")
        if given or self.capability is None:
            return given
        # ServerArgs._get_default_attn_backend; for trees, whose top-k is above 1, the engine chooses.
        if self.mode.verifies_trees:
            return ""
        return {9: "fa3", 10: "trtllm_mha"}.get(self.capability[0], "")


Rule = Callable[[Case], str | None]


def parse_capability(text: str | None) -> Capability | None:
    """``12.0`` as nvidia-smi writes it."""
    major, dot, minor = (text or "").partition(".")
    return (int(major), int(minor)) if dot and major.isdigit() and minor.isdigit() else None


def parse_flags(argv: Sequence[str]) -> dict[str, str]:
    """``--name value`` and ``--name=value``; a flag without a value gets an empty one. The last one wins."""
    found: dict[str, str] = {}
    name = ""
    for word in argv:
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            found[name] = value
            name = "" if equals else name
        elif name:
            found[name], name = word, ""
    return found


def refusals(case: Case) -> tuple[str, ...]:
    """Why this cannot run; every reason, each with the flag to change. Empty for a version without a table."""
    return tuple(said for rule in RULES.get(case.sglang, ()) if (said := rule(case)) is not None)


# -- SGLang's own rules -----------------------------------------------------------------------------------------------


def _fa3(case: Case) -> str | None:
    if "fa3" not in (case.attention, case.flag("--speculative-draft-attention-backend")):
        return None
    if case.capability is None or case.capability[0] in (8, 9):
        return None
    return f"FA3 runs on compute capability 8.x and 9.x, this GPU has {dotted(case)}: set --attention-backend triton"


def _trtllm(case: Case) -> str | None:
    if case.attention != "trtllm_mha":
        return None
    if case.mode.verifies_trees:
        return "trtllm_mha verifies chains only: set --attention-backend triton"
    if case.sm is not None and case.sm not in (90, 100, 103, 120):
        return f"trtllm_mha does not run on compute capability {dotted(case)}: set --attention-backend triton"
    return None


def _prefill_trtllm(case: Case) -> str | None:
    if case.attention == "trtllm_mha" and case.sm is not None and case.sm not in (100, 103):
        return f"trtllm_mha prefills on compute capability 10.x only, this GPU has {dotted(case)}"
    return None


def _kv_dtype(case: Case) -> str | None:
    dtype = case.flag("--kv-cache-dtype")
    if dtype in ("nvfp4", "mxfp8", "fp4_e2m1") and case.sm is not None and case.sm < 100:
        return f"--kv-cache-dtype {dtype} needs compute capability 10.0 or newer, this GPU has {dotted(case)}"
    return None


def _linear_attention(case: Case) -> str | None:
    chosen = case.flag("--linear-attn-verify-backend", "--linear-attn-backend")
    if case.target is None or not case.target.hybrid or chosen in ("", "triton"):
        return None
    if case.mode.verifies_trees:
        return f"{chosen} verifies chains only on recurrent layers: set --linear-attn-backend triton"
    dtype = case.flag("--mamba-ssm-dtype") or case.target.state_dtype
    if chosen == "flashinfer" and case.sm is not None and case.sm >= 100 and dtype != "bfloat16":
        return "--linear-attn-backend flashinfer on this GPU needs --mamba-ssm-dtype bfloat16"
    return None


def _lazy_buffer(case: Case) -> str | None:
    if case.mode.speculates and case.flag("--mamba-radix-cache-strategy") == "extra_buffer_lazy":
        return "DFlash does not plan lazy state slots: set --mamba-radix-cache-strategy extra_buffer"
    return None


# -- the drafter's and the engine's -----------------------------------------------------------------------------------


def _speculation(flag: str, allowed: Sequence[str], why: str, change: str, *, tree_only: bool = False) -> Rule:
    """A flag that speculation (or the tree alone) does not get along with, unless it has one of ``allowed``."""

    def rule(case: Case) -> str | None:
        concerned = case.mode.verifies_trees if tree_only else case.mode.speculates
        if not concerned or flag not in case.flags or case.flags[flag] in allowed:
            return None
        return f"{why}: {change}"

    return rule


def _ranks(case: Case) -> str | None:
    if case.tp == 1 or case.target is None:
        return None
    if case.mode is Mode.AUTO:
        return "each rank would choose widths by its own measurements: use one GPU, or mode tree"
    layers = case.target.recurrence
    if layers is not None and (layers.key_heads % case.tp or layers.value_heads % case.tp):
        heads = f"{layers.key_heads} key and {layers.value_heads} value heads"
        return f"recurrent layers of {heads} cannot be shared by {case.tp} GPUs: give the instance a divisor of both"
    return None


def _tree_attention(case: Case) -> str | None:
    if not case.mode.verifies_trees or case.attention in ("", "triton", "fa3", "trtllm_mha"):
        return None
    return f"tree masks are proven on triton, not on {case.attention}: set --attention-backend triton"


def _tree_fa3(case: Case) -> str | None:
    if case.mode.verifies_trees and case.attention == "fa3" and case.capability and case.capability[0] in (8, 9):
        return "tree masks are proven on triton, not on fa3: set --attention-backend triton"
    return None


# Whose recurrent states SGLang 0.5.17 keeps at places that it chooses: _MAMBA_EXTRA_BUFFER_ARCHS, which a test reads.
KEEPS_STATES = frozenset(
    {
        "BailingMoeV2_5ForCausalLM",
        "FalconH1ForCausalLM",
        "GraniteMoeHybridForCausalLM",
        "InternS2PreviewForConditionalGeneration",
        "KimiK3ForConditionalGeneration",
        "KimiLinearForCausalLM",
        "MiniCPMV4_6ForConditionalGeneration",
        "NemotronHForCausalLM",
        "NemotronHPuzzleForCausalLM",
        "Qwen3NextForCausalLM",
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5MoeForConditionalGeneration",
    }
)


def prefix_cache_refusal(case: Case) -> str | None:
    """What no proof admits; whether there is one for the rest is asked where a host's records are known (proofs.py)."""
    strategy, off = case.prefix_cache, "add --disable-radix-cache"
    if strategy is None or case.target is None:
        return None
    if case.target.architecture not in KEEPS_STATES:
        return f"SGLang keeps no recurrent states for {case.target.architecture} that a hit could go on from: {off}"
    if strategy == "no_buffer":
        return f"strategy no_buffer keeps states past the end of a request: use extra_buffer and overlap, or {off}"
    if "--speculative-ddtree-allow-hybrid-unsafe" in case.flags:
        return None
    if "--enable-int8-mamba-checkpoint" in case.flags or "--enable-hierarchical-cache" in case.flags:
        return f"states in the prefix cache are proven as computed, on the GPU: drop int8 and the hierarchy, or {off}"
    if case.mode is Mode.AUTO:
        return f"mode auto has not been proven with the prefix cache: use mode tree, or {off}"
    return None


def _records(case: Case) -> str | None:
    """Records that were asked for; where nobody asked, the engine keeps snapshots instead. That a tree is too wide for
    them is said when settings are read.
    """
    if case.flag("--speculative-ddtree-states") != "records" or case.target is None:
        return None
    found = gap(case.target, 1, case.dtypes(case.target))
    if found is None:
        return None
    change = f"{found.change}, or " if found.change else ""
    return f"{found.why}: {change}set --speculative-ddtree-states snapshots"


ONE = ("1",)
RULES: dict[str, tuple[Rule, ...]] = {
    "0.5.17": (
        _fa3,
        _trtllm,
        _prefill_trtllm,
        _kv_dtype,
        _linear_attention,
        _lazy_buffer,
        _speculation("--enable-dp-attention", (), "a draft needs the whole batch", "drop --enable-dp-attention"),
        _speculation("--pp-size", ONE, "a draft worker exists on one stage", "set --pp-size 1"),
        _speculation("--pipeline-parallel-size", ONE, "a draft worker exists on one stage", "set it to 1"),
        _speculation("--tokenizer-worker-num", ONE, "tokenizer workers load no plugins", "set it to 1"),
        _speculation("--disaggregation-mode", ("null",), "a draft's keys are not sent on", "set it to null"),
        _speculation("--enable-lora", (), "the drafter has no adapters", "drop --enable-lora"),
        _speculation("--page-size", ONE, "a tree's slots are single tokens", "set --page-size 1", tree_only=True),
        _speculation(
            "--speculative-draft-window-size", (), "a draft window uses slots of the tree", "drop it", tree_only=True
        ),
        _speculation(
            "--enable-deterministic-inference",
            (),
            "its attention reads mask cells that a tree leaves unwritten",
            "drop --enable-deterministic-inference",
            tree_only=True,
        ),
        _ranks,
        _tree_attention,
        _tree_fa3,
        prefix_cache_refusal,
        _records,
    )
}


def dotted(case: Case) -> str:
    return "unknown" if case.capability is None else f"{case.capability[0]}.{case.capability[1]}"
