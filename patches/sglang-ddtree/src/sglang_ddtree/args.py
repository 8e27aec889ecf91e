"""From flags and environment to the settings a server runs with.

Order matters. SGLang settles memory fractions, graph batch sizes, state-cache rules and the default attention
backend before it reaches the speculative algorithm, and all of those read the number of verify rows. So
`before_post_init` writes the tree's numbers first, and `resolve`, called where SGLang resolves the algorithm,
lets SGLang's own DFLASH handler work on the block (which it insists on reading from the same fields) and then
writes the tree's numbers again.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
from collections.abc import Iterable
from typing import Any

from sglang_ddtree import config as settings
from sglang_ddtree import keeping, proofs, refusals, states
from sglang_ddtree.auto import settings as choices
from sglang_ddtree.auto.settings import AutoConfig, AutoResolved
from sglang_ddtree.config import DDTreeConfig

logger = logging.getLogger(__name__)
NAME = "DDTREE"
_FLAG_FIELDS = ("mode", "budget", "widths", "topk_cap", "keep_spine", "allow_hybrid_unsafe", "proofs_dir")


def add_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("DDTree speculative decoding (--speculative-algorithm DDTREE)")
    group.add_argument(
        "--speculative-ddtree-mode",
        choices=choices.MODES,
        default=None,
        help="linear is SGLang's DFLASH; shadow-linear scores trees beside it; tree verifies them; auto verifies the "
        "chain or a tree of one of several widths, whichever gives more tokens a second. Default linear.",
    )
    group.add_argument(
        "--speculative-ddtree-budget",
        type=int,
        default=None,
        help="Nodes of the draft tree, its root not counted. Default 16.",
    )
    group.add_argument(
        "--speculative-ddtree-widths",
        type=choices.parse_widths,
        default=None,
        help="Mode auto: nodes of the trees to choose among, beside the chain. Default 8,16,32.",
    )
    group.add_argument(
        "--speculative-ddtree-topk-cap",
        type=int,
        default=None,
        help="Most children of a node. Default the budget, at most 8.",
    )
    group.add_argument(
        "--speculative-ddtree-keep-spine",
        action="store_true",
        default=None,
        help="Keep the drafter's whole top-1 chain in the tree.",
    )
    group.add_argument(
        "--speculative-ddtree-allow-hybrid-unsafe",
        action="store_true",
        default=None,
        help="Admit a hybrid target, or any on several GPUs, where the parity suite has not passed. "
        "States are computed in the same way; nobody has checked them there.",
    )
    group.add_argument(
        "--speculative-ddtree-states",
        choices=states.CHOICES,
        default=None,
        help="How a tree's recurrent states are kept until acceptance: snapshots is SGLang's whole state for each row, "
        "records what a row changes, replayed; either must be proven where it runs. Default records where they are "
        "written for (Gated DeltaNet, at most 64 nodes, ...; the log names what is not), else snapshots.",
    )
    group.add_argument(
        "--speculative-ddtree-proofs-dir",
        default=None,
        help=f"Where this host's self-test records lie. Default {settings.DEFAULT_PROOFS}.",
    )


def hook_add_cli_args(original: Any, parser: argparse.ArgumentParser) -> Any:
    result = original(parser)
    add_flags(parser)
    return result


def hook_from_cli_args(original: Any, cls: type, args: argparse.Namespace) -> Any:
    """Put the flags into the environment before ServerArgs resolves itself; flags win over a value set there."""
    given = {
        name: value for name in _FLAG_FIELDS if (value := getattr(args, f"speculative_ddtree_{name}", None)) is not None
    }
    kept = getattr(args, "speculative_ddtree_states", None)
    names = [*given, *(["states"] if kept is not None else [])]
    if names and (getattr(args, "speculative_algorithm", None) or "").upper() != NAME:
        flags = ", ".join(f"--speculative-ddtree-{name.replace('_', '-')}" for name in names)
        raise ValueError(f"{flags} set without --speculative-algorithm {NAME}.")
    if kept is not None:
        os.environ[states.ENV] = kept
    if given:
        os.environ[settings.ENV] = choices.to_json(*choices.read({**choices.environment(), **given}))
    return original(cls, args)


def _is_ours(server_args: Any) -> bool:
    return (server_args.speculative_algorithm or "").upper() == NAME


def before_post_init(server_args: Any, *_args: Any, **_kwargs: Any) -> None:
    """The numbers SGLang sizes memory by, in place before it does."""
    if not _is_ours(server_args):
        return
    config, _auto = choices.from_environment()
    if config.mode != "tree":
        return
    for field, flag in (
        ("speculative_num_draft_tokens", "num-draft-tokens"),
        ("speculative_eagle_topk", "eagle-topk"),
        ("speculative_num_steps", "num-steps"),
    ):
        if getattr(server_args, field) not in (None, tree_numbers(config)[field]):
            raise ValueError(
                f"--speculative-{flag} does not apply to trees; set --speculative-ddtree-budget and "
                f"--speculative-ddtree-topk-cap instead."
            )
    if server_args.is_attention_backend_not_set():
        server_args.attention_backend = "triton"
        logger.info("DDTREE: no attention backend was chosen; trees use triton.")
    _write(server_args, tree_numbers(config))


def tree_numbers(config: DDTreeConfig) -> dict[str, int]:
    """SGLang's names for the tree's sizes. A topk above 1 is what makes its backends keep links and dense windows."""
    return {
        "speculative_num_draft_tokens": config.budget + 1,
        "speculative_eagle_topk": max(2, config.children),
        "speculative_num_steps": 1,
    }


def _write(server_args: Any, fields: dict[str, Any]) -> None:
    for name, value in fields.items():
        setattr(server_args, name, value)
    server_args.__dict__.pop("max_speculative_num_draft_tokens", None)  # cached from the fields above


def resolve(server_args: Any) -> states.Resolved:
    """Refuse or settle; called by the algorithm where SGLang resolves it. Leaves the result on server_args."""
    from sglang.srt.arg_groups.overrides import resolved_view
    from sglang.srt.arg_groups.speculative_hook import _handle_dflash

    config, auto = choices.from_environment()
    view = resolved_view(server_args)
    facts = gather_facts(server_args, view, config, auto)
    found = refusals.reasons(view, config, facts, auto)
    if found:
        raise ValueError(refusals.message(config, found, auto))
    if config.mode == "tree":
        _write(server_args, {"speculative_num_draft_tokens": None, "speculative_eagle_topk": 1})
    _handle_dflash(server_args)
    block = int(server_args.speculative_num_draft_tokens)
    resolved = resolved_of(config, auto, block, facts)
    if config.mode == "tree":
        _write(server_args, tree_numbers(config))
    settings.attach(server_args, resolved)
    logger.info("DDTREE settings: %s", resolved.public())
    if facts.states_why:
        logger.info("DDTREE: recurrent states are kept as %s: %s.", facts.states, facts.states_why)
    return resolved


def resolved_of(config: DDTreeConfig, auto: AutoConfig | None, block: int, facts: refusals.Facts) -> states.Resolved:
    if auto is None:
        return states.Resolved(config, block, verdict(config, facts), facts.states)
    if config.budget < block - 1:  # the rules ran on the drafter's configuration, which may have been unreadable
        raise ValueError(refusals.message(config, [refusals.chain_too_long(config.budget, block)], auto))
    return AutoResolved(config, block, verdict(config, facts), facts.states, auto)


def verdict(config: DDTreeConfig, facts: refusals.Facts) -> str:
    if config.mode != "tree" or not proofs.needs_proof(bool(facts.hybrid), facts.tp):
        return ""
    proof = facts.proof if facts.prefix_cache is None else facts.cache_proof
    return f"proven by {proof}" if proof else "unproven, admitted by --speculative-ddtree-allow-hybrid-unsafe"


def gather_facts(server_args: Any, view: Any, config: DDTreeConfig, auto: AutoConfig | None = None) -> refusals.Facts:
    """Read what the rules need from the model configurations, the environment and the host."""
    from sglang.srt.configs.model_config import AttentionArch
    from sglang.srt.environ import envs
    from sglang.srt.speculative.spec_utils import SIMULATE_ACC_LEN

    if config.mode == "linear":
        return refusals.Facts()
    model = server_args.get_model_config()
    hybrid = hybrid_family(model)
    tp = int(view.tp_size)
    facts = refusals.Facts(
        architecture=(model.hf_config.architectures or [""])[0],
        hybrid=hybrid,
        sliding_window=has_sliding_window(model),
        mla=model.attention_arch == AttentionArch.MLA,
        drafter_block=drafter_block(server_args),
        plan_stream=bool(envs.SGLANG_ENABLE_OVERLAP_PLAN_STREAM.get()),
        simulated_acceptance=SIMULATE_ACC_LEN > 0,
        capability=compute_capability(int(view.base_gpu_id) + int(view.gpu_id_step) * rank for rank in range(tp)),
        tp=tp,
        **(recurrent_layers(model) if hybrid == "gdn" else {}),
    )
    if config.mode != "tree":
        return facts
    kept, why = kept_states(config, facts)
    return with_proof(dataclasses.replace(facts, states=kept, states_why=why), view, config, auto)


def kept_states(config: DDTreeConfig, facts: refusals.Facts) -> tuple[str, str]:
    """How a tree's states are kept, and why as snapshots if nobody asked for them."""
    return keeping.choose(states.from_environment(), bool(facts.hybrid), refusals.records_gap(config, facts))


def with_proof(facts: refusals.Facts, view: Any, config: DDTreeConfig, auto: AutoConfig | None) -> refusals.Facts:
    """The facts with the records that prove this tree, without and with the prefix cache, or why none does."""
    if not proofs.needs_proof(bool(facts.hybrid), facts.tp):
        return facts
    wanted = proofs.Combination(
        architecture=facts.architecture,
        backend=view.decode_attention_backend or view.attention_backend,
        compute_capability=facts.capability,
        engine=proofs.engine_digest(states=facts.states, tp=facts.tp),
        driver=proofs.running_driver(),
        budget=config.budget,
        states=facts.states,
        tp=facts.tp,
        auto=proofs.auto_digest(states=facts.states) if auto is not None else None,
        dense=not facts.hybrid,
    )
    proof, why = find_proof(config, wanted)
    facts = dataclasses.replace(facts, auto=auto is not None, proof=proof, proof_reasons=tuple(why))
    strategy = cache_strategy(view, facts)
    if strategy is None:
        return facts
    proof, why = find_proof(config, dataclasses.replace(wanted, prefix_cache=strategy))
    return dataclasses.replace(facts, prefix_cache=strategy, cache_proof=proof, cache_reasons=tuple(why))


def cache_strategy(view: Any, facts: refusals.Facts) -> str | None:
    """How SGLang keeps recurrent states for later requests; None where it keeps none."""
    if not facts.hybrid or view.disable_radix_cache or not view.uses_mamba_radix_cache:
        return None
    return str(view.mamba_radix_cache_strategy)


def recurrent_layers(model: Any) -> dict[str, Any]:
    """What the rules ask of Gated DeltaNet layers, from the model's configuration."""
    from sglang.srt.configs.hybrid_arch import hybrid_gdn_config
    from sglang.srt.configs.mamba_utils import mamba2_state_dtype

    text = hybrid_gdn_config(model)
    sizes = (getattr(text, "linear_key_head_dim", 0), getattr(text, "linear_value_head_dim", 0))
    dtypes = (str(model.dtype), str(mamba2_state_dtype(text).conv))
    return {
        "heads": sizes,
        "activation": str(getattr(text, "hidden_act", "")),
        "dtypes": tuple(dtype.removeprefix("torch.") for dtype in dtypes),
    }


def find_proof(config: DDTreeConfig, wanted: proofs.Combination) -> tuple[str | None, list[str]]:
    from pathlib import Path

    return proofs.judge(wanted, [*proofs.shipped(), *proofs.read_records(Path(config.proofs_dir))])


def hybrid_family(model: Any) -> str:
    from sglang.srt.configs import hybrid_arch

    if hybrid_arch.hybrid_gdn_config(model) is not None:
        return "gdn"
    if hybrid_arch.mambaish_config(model) is not None or hybrid_arch.hybrid_lightning_config(model) is not None:
        return type(model.hf_config).__name__
    return ""


def has_sliding_window(model: Any) -> bool:
    text = model.hf_config.get_text_config()
    types = getattr(text, "layer_types", None)
    if types is not None:
        return "sliding_attention" in types
    return bool(getattr(model, "is_hybrid_swa", False)) or model.sliding_window_size not in (None, -1)


def drafter_block(server_args: Any) -> int | None:
    """The block size in the drafter's own configuration; None where it cannot be read (SGLang then warns by itself)."""
    from sglang.srt.speculative.dflash_utils import parse_dflash_draft_config
    from sglang.srt.utils.hf_transformers_utils import get_config

    try:
        drafter = get_config(
            server_args.speculative_draft_model_path,
            trust_remote_code=server_args.trust_remote_code,
            revision=server_args.speculative_draft_model_revision,
        )
    except Exception as error:  # noqa: BLE001  any loader error; DFLASH's own handler meets it again and decides
        logger.warning("DDTREE: the drafter's configuration could not be read: %s", error)
        return None
    return parse_dflash_draft_config(draft_hf_config=drafter).resolve_block_size(default=None)


def compute_capability(gpus: Iterable[int] = (0,)) -> str:
    """Of the GPUs that share a model; of GPUs that differ, all of them, which no record is about."""
    import torch

    if not torch.cuda.is_available():
        return "none"
    here = torch.cuda.device_count()
    found = {torch.cuda.get_device_capability(index) for index in gpus if index < here}
    return "+".join(f"{major}.{minor}" for major, minor in sorted(found)) or "none"
