"""Why a server is not started: every combination of settings that DDTREE cannot serve exactly, as one table of
pure rules.

A rule reads the server's arguments, the DDTree settings and a few facts about the models, and answers with the
reason and the flag to change, or with None. All rules run before weights load, and every reason is reported at
once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from sglang_ddtree import keeping, proofs, states
from sglang_ddtree.auto.settings import AutoConfig
from sglang_ddtree.config import DDTreeConfig


@dataclasses.dataclass(frozen=True)
class Facts:
    """What the rules need beside the arguments, read once by the caller (see args.gather_facts)."""

    architecture: str = ""
    hybrid: str = ""  # '' dense, 'gdn' Gated DeltaNet, else the name of another recurrent family
    sliding_window: bool = False
    mla: bool = False
    drafter_block: int | None = None
    plan_stream: bool = False
    simulated_acceptance: bool = False
    capability: str = ""
    proof: str | None = None
    proof_reasons: tuple[str, ...] = ()
    auto: bool = False  # mode auto, whose config is that of its widest tree
    prefix_cache: str | None = None  # the strategy by which recurrent states are kept for later requests, if any are
    cache_proof: str | None = None  # as proof and its reasons, with the prefix cache
    cache_reasons: tuple[str, ...] = ()
    states: str = states.SNAPSHOTS
    states_why: str = ""  # why it is snapshots, though nobody asked for them and trees have states to keep
    tp: int = 1
    heads: tuple[int, int] | None = None  # key and value head size of Gated DeltaNet layers
    activation: str = ""  # behind their convolution
    dtypes: tuple[str, str] = ("", "")  # of the activations and of the convolution's windows


Rule = Callable[[Any, DDTreeConfig, Facts], "str | None"]


def _flag(test: Callable[[Any], bool], reason: str) -> Rule:
    return lambda args, _config, _facts: reason if test(args) else None


def _backends(args: Any) -> tuple[str | None, str | None]:
    base = args.attention_backend
    return args.prefill_attention_backend or base, args.decode_attention_backend or base


# In every mode: what the scheduler side of DFLASH does not support, or what would bypass this plugin.
ALWAYS: tuple[Rule, ...] = (
    _flag(
        lambda a: a.tokenizer_worker_num != 1,
        "tokenizer workers do not load plugins and stop at the unknown algorithm; set --tokenizer-worker-num 1",
    ),
    _flag(lambda a: a.pp_size != 1, "a draft worker exists on one pipeline stage only; set --pipeline-parallel-size 1"),
    _flag(lambda a: a.dp_size != 1, "the data-parallel controller does not load plugins; set --data-parallel-size 1"),
    _flag(
        lambda a: a.enable_dp_attention, "DFlash drafts need the whole batch on each rank; drop --enable-dp-attention"
    ),
    _flag(
        lambda a: a.disaggregation_mode != "null",
        "the draft's keys and values are not sent between prefill and decode servers; set --disaggregation-mode null",
    ),
    _flag(
        lambda a: bool(a.enable_lora or a.lora_paths),
        "the drafter has no adapters, and SGLang admits LoRA with NGRAM only; drop --enable-lora and --lora-paths",
    ),
    _flag(lambda a: a.speculative_adaptive, "DFlash blocks have one width; drop --speculative-adaptive"),
    _flag(
        lambda a: a.speculative_use_rejection_sampling,
        "a DFlash drafter yields no proposal to reject against; drop --speculative-use-rejection-sampling",
    ),
    _flag(lambda a: a.enable_pdmux, "split prefill bypasses the draft worker; drop --enable-pdmux"),
    _flag(lambda a: a.enable_two_batch_overlap, "a verify batch cannot be split; drop --enable-two-batch-overlap"),
    _flag(
        lambda a: a.speculative_draft_model_path is None,
        "a DFlash drafter is needed; set --speculative-draft-model-path",
    ),
)


def _window(args: Any, _config: DDTreeConfig, facts: Facts) -> str | None:
    if facts.sliding_window:
        return (
            "the target has sliding-window attention, whose kernel measures the window by node index instead of depth "
            "and would drop keys; use --speculative-ddtree-mode linear"
        )
    if args.speculative_draft_window_size is not None:
        return "a draft window rebuilds slots the tree also uses; drop --speculative-draft-window-size"
    return None


def _block(args: Any, _config: DDTreeConfig, facts: Facts) -> str | None:
    wanted = args.speculative_dflash_block_size
    if wanted is not None and facts.drafter_block is not None and wanted != facts.drafter_block:
        return (
            f"--speculative-dflash-block-size is {wanted} but the drafter was trained with blocks of "
            f"{facts.drafter_block}: its distributions would be wrong; drop the flag"
        )
    return None


def _backend(args: Any, _config: DDTreeConfig, _facts: Facts) -> str | None:
    prefill, decode = _backends(args)
    if prefill == decode == "triton":
        return None
    return (
        f"the target's attention backend is {decode}; tree masks are proven on triton only; "
        f"set --attention-backend triton"
    )


def _family(args: Any, _config: DDTreeConfig, facts: Facts) -> str | None:
    if facts.hybrid not in ("", "gdn"):
        return (
            f"{facts.architecture} has {facts.hybrid} layers, which this plugin has no proven tree path for; "
            f"use --speculative-ddtree-mode linear"
        )
    if facts.mla:
        return "latent attention (MLA) has no proven tree path; use --speculative-ddtree-mode linear"
    if facts.hybrid and args.mamba_radix_cache_strategy == "extra_buffer_lazy":
        return (
            "lazily allocated state buffers are not proven with trees; "
            "set --mamba-radix-cache-strategy extra_buffer or --disable-radix-cache"
        )
    if args.enable_linear_replayssm or args.enable_linear_replayssm_spec:
        return "the state ring of ReplaySSM holds chains only; drop --enable-linear-replayssm(-spec)"
    return None


def _prefix_cache(args: Any, config: DDTreeConfig, facts: Facts) -> str | None:
    if not facts.hybrid or args.disable_radix_cache:
        return None
    if not args.uses_mamba_radix_cache:
        return (
            f"SGLang 0.5.17 keeps no recurrent states for {facts.architecture}, so a prefix hit would continue from a "
            f"wrong one, in plain decoding too; set --disable-radix-cache"
        )
    if args.mamba_radix_cache_strategy == "no_buffer":
        return (
            "strategy no_buffer caches the state behind the last accepted token, which lies past the end of a request "
            "that ends inside a path; set --mamba-radix-cache-strategy extra_buffer or --disable-radix-cache"
        )
    if config.allow_hybrid_unsafe:
        return None
    if args.enable_int8_mamba_checkpoint or args.enable_hierarchical_cache:
        return (
            "states in the prefix cache are proven as the target computes them, on the GPU; drop "
            "--enable-int8-mamba-checkpoint and --enable-hierarchical-cache, or set --disable-radix-cache"
        )
    return _unproven_cache(args, config, facts)


def _unproven_cache(args: Any, config: DDTreeConfig, facts: Facts) -> str | None:
    if facts.cache_proof is not None:
        return None
    seen = "; ".join(facts.cache_reasons) or f"there is no record in {config.proofs_dir}"
    seen = f" ({seen})" if facts.proof is not None else ""  # else _proven says what the records are about
    change = "use --speculative-ddtree-mode tree" if facts.auto else f"run {_selftest(args, facts)}"
    return (
        f"nobody has proven states along tree paths in the prefix cache on compute capability {facts.capability}{seen};"
        f" {change}, set --disable-radix-cache, or admit them unproven with --speculative-ddtree-allow-hybrid-unsafe"
    )


def _selftest(args: Any, facts: Facts) -> str:
    """The self-test that would prove this combination, in words."""
    flags = [*([f"--states {facts.states}"] if facts.states != states.RECORDS else []),
             *([f"--tp {args.tp_size}"] if args.tp_size > 1 else [])]  # fmt: skip
    return "the self-test on this host" + (f" with {' '.join(flags)}" if flags else "")


def records_gap(config: DDTreeConfig, facts: Facts) -> keeping.Gap | None:
    """What this tree and this target would need that the record kernels are not written for."""
    target = keeping.Target(
        facts.architecture, facts.hybrid == "gdn", facts.heads or (0, 0), facts.activation, facts.dtypes
    )
    return keeping.gap(target, config.budget, states.MAX_BUDGET)


def _records(_args: Any, config: DDTreeConfig, facts: Facts) -> str | None:
    """Records that were asked for and cannot be kept; where nobody asked, snapshots are (args.kept_states)."""
    found = records_gap(config, facts) if facts.states == states.RECORDS else None
    if found is None:
        return None
    change = f"{found.change}, or " if found.change else ""
    return f"{found.why}; {change}use --speculative-ddtree-states snapshots"


def _proven(args: Any, config: DDTreeConfig, facts: Facts) -> str | None:
    if (
        not proofs.needs_proof(bool(facts.hybrid), args.tp_size)
        or facts.proof is not None
        or config.allow_hybrid_unsafe
    ):
        return None
    seen = "; ".join(facts.proof_reasons) or f"there is no record in {config.proofs_dir}"
    several = args.tp_size > 1
    what = "is a hybrid target" if facts.hybrid else f"is to run on {args.tp_size} GPUs"
    about = f"tree states, kept as {facts.states}," if facts.hybrid else "ranks to stay together"
    where = f"compute capability {facts.capability}" + (f" with {args.tp_size} GPUs" if several else "")
    return (
        f"{facts.architecture} {what} and nobody has proven this engine's {about} on {where} ({seen}). Run "
        f"{_selftest(args, facts)}, "
        f"{'set --tensor-parallel-size 1, ' if several and not facts.hybrid else ''}or admit it unproven with "
        f"--speculative-ddtree-allow-hybrid-unsafe"
    )


def _lossy(args: Any, _config: DDTreeConfig, _facts: Facts) -> str | None:
    if args.speculative_accept_threshold_single != 1.0 or args.speculative_accept_threshold_acc != 1.0:
        return (
            "acceptance thresholds below 1 change the distribution and trees ignore them; "
            "drop --speculative-accept-threshold-single and --speculative-accept-threshold-acc"
        )
    return None


_WATCHES: tuple[Rule, ...] = (
    lambda _a, _c, f: (
        "SGLANG_SIMULATE_ACC_LEN invents acceptance, trees report the real one; unset it"
        if f.simulated_acceptance
        else None
    ),
    _block,
)
TREE: tuple[Rule, ...] = (
    *_WATCHES,
    _flag(lambda a: a.page_size not in (None, 1), "the tree's slots are single tokens; set --page-size 1"),
    _backend,
    _window,
    _family,
    _records,
    _prefix_cache,
    _lossy,
    _flag(
        lambda a: a.enable_deterministic_inference,
        "its one-stage attention reads mask cells of the prefix, which a tree leaves unwritten; "
        "drop --enable-deterministic-inference",
    ),
    _flag(
        lambda a: a.speculative_attention_mode != "prefill",
        "verification uses the prefill attention path; set --speculative-attention-mode prefill",
    ),
    _flag(
        lambda a: a.enable_unified_memory or a.enable_page_major_kv_layout,
        "accepted keys and values move slot by slot; drop --enable-unified-memory and --enable-page-major-kv-layout",
    ),
    _flag(lambda a: a.enable_hisparse, "hierarchical sparse attention has no tree path; drop --enable-hisparse"),
    lambda _a, _c, f: (
        "the plan stream copies masks before the tree exists; unset SGLANG_ENABLE_OVERLAP_PLAN_STREAM"
        if f.plan_stream
        else None
    ),
    _proven,
)
RULES = {"linear": ALWAYS, "shadow-linear": ALWAYS + _WATCHES, "tree": ALWAYS + TREE}


def chain_too_long(widest: int, block_size: int) -> str:
    return (
        f"the widest width is {widest} and this drafter's chain, which mode auto always chooses among, has "
        f"{block_size - 1} nodes; give --speculative-ddtree-widths one of at least {block_size - 1}"
    )


def auto_reasons(args: Any, config: DDTreeConfig, facts: Facts, auto: AutoConfig) -> list[str]:
    """What mode auto needs beyond a tree of its widest width."""
    found = []
    if facts.drafter_block is not None and config.budget < facts.drafter_block - 1:
        found.append(chain_too_long(config.budget, facts.drafter_block))
    if args.tp_size != 1:
        found.append(
            "each rank would choose by costs and counts of its own, and they must run the same width; set "
            "--tensor-parallel-size 1, or use --speculative-ddtree-mode tree"
        )
    backend = args.cuda_graph_config.decode.backend
    if auto.choice == "measured" and backend != "full":
        found.append(
            f"the costs of the widths are measured on captured rounds, and the decode graphs' backend is {backend}; "
            f"set --cuda-graph-backend-decode full, or use --speculative-ddtree-mode tree"
        )
    return found


def reasons(args: Any, config: DDTreeConfig, facts: Facts, auto: AutoConfig | None = None) -> list[str]:
    found = [reason for rule in RULES[config.mode] if (reason := rule(args, config, facts)) is not None]
    return found if auto is None else found + auto_reasons(args, config, facts, auto)


def message(config: DDTreeConfig, found: list[str], auto: AutoConfig | None = None) -> str:
    listed = "".join(f"\n  - {reason}." for reason in found)
    mode = config.mode if auto is None else "auto"
    return f"DDTREE in mode {mode} cannot serve this configuration:{listed}"
