"""What a server runs with: from flags to resolved settings, as SGLang and the plugin settle them."""

from __future__ import annotations

import argparse
import json
import os
from typing import Any, NamedTuple

from .faults import Faults

DDTREE = "speculative_ddtree_"
DEFAULT_MAX_RUNNING = 48
MAX_BUDGET = 255
MAX_TOPK_CAP = 16
MAX_RECORDS_BUDGET = 64
VERIFIES = ("tree", "auto")
DEFAULT_WIDTHS = "8,16,32"


class Refusal(Exception):
    """SGLang would refuse to start with these arguments; the text is what its traceback ends with."""


class Settings(NamedTuple):
    """The resolved settings that matter to the stand-in; ``args`` are all of SGLang's."""

    args: dict[str, Any]
    mode: str
    budget: int
    topk_cap: int
    block_size: int
    model: dict[str, Any]
    ddtree: dict[str, Any] | None

    @property
    def rows(self) -> int:
        """Rows the target verifies in a round, for each request."""
        return self.budget + 1 if self.mode in VERIFIES else self.block_size


def read_config(path: str | None, what: str) -> dict[str, Any]:
    """A model's config.json; a path without one is what SGLang fails on too."""
    file = os.path.join(path or "", "config.json")
    try:
        with open(file) as handle:
            config = json.load(handle)
    except (OSError, ValueError) as error:
        raise Refusal(f"OSError: Can't load the configuration of the {what} '{path}': {error}") from error
    assert isinstance(config, dict)
    return config


def asked(args: argparse.Namespace) -> dict[str, str]:
    """What the command line asks for, for STANDIN_ONLY."""
    algorithm = (args.speculative_algorithm or "").upper()
    mode = {"": "ar", "DFLASH": "linear"}.get(algorithm) or getattr(args, DDTREE + "mode", None) or "linear"
    budget = getattr(args, DDTREE + "budget", None)
    if mode == "auto":
        budget = max(widths(args))
    return {"mode": mode, "budget": str(budget or 16), "weight_version": str(args.weight_version)}


def widths(args: argparse.Namespace) -> list[int]:
    """Nodes of the trees that mode auto chooses among, ascending."""
    return sorted(int(word) for word in (getattr(args, DDTREE + "widths", None) or DEFAULT_WIDTHS).split(","))


def _within_limits(args: argparse.Namespace) -> None:
    """The engine's own limits, in its words."""
    budget, cap = (getattr(args, DDTREE + name, None) for name in ("budget", "topk_cap"))
    if budget is not None and not 1 <= budget <= MAX_BUDGET:
        flag = "--speculative-ddtree-budget"
        raise Refusal(f"ValueError: {flag} is {budget}; a tree has 1 to {MAX_BUDGET} nodes besides its root.")
    if cap is not None and not 1 <= cap <= MAX_TOPK_CAP:
        flag = "--speculative-ddtree-topk-cap"
        raise Refusal(f"ValueError: {flag} is {cap}; choose 1 to {MAX_TOPK_CAP} children a node.")


def resolve(args: argparse.Namespace, faults: Faults) -> Settings:
    """Settle what was asked, or refuse it."""
    values = {name: value for name, value in vars(args).items() if not name.startswith(DDTREE)}
    ours = {name: value for name, value in vars(args).items() if name.startswith(DDTREE) and value is not None}
    algorithm = (args.speculative_algorithm or "").upper()
    if algorithm not in ("", "DFLASH", "DDTREE"):
        raise Refusal(f"the stand-in knows no speculative algorithm but DFLASH and DDTREE, not {algorithm}")
    if algorithm == "DDTREE" and not hasattr(args, DDTREE + "mode"):
        raise Refusal("ValueError: Unknown speculative algorithm name: DDTREE")
    if ours and algorithm != "DDTREE":
        flags = ", ".join("--" + name.replace("_", "-") for name in sorted(ours))
        raise Refusal(f"ValueError: {flags} set without --speculative-algorithm DDTREE.")
    _within_limits(args)
    model = read_config(args.model_path, "model")
    wanted = asked(args)
    mode, budget = faults.mode or wanted["mode"], faults.budget or int(wanted["budget"])
    topk = min(getattr(args, DDTREE + "topk_cap", None) or 8, budget)
    block = 0
    values.setdefault("served_model_name", None)
    values["served_model_name"] = values["served_model_name"] or args.model_path
    values["tokenizer_path"] = args.tokenizer_path or args.model_path
    if algorithm:
        block = int(read_config(args.speculative_draft_model_path, "draft model").get("block_size", 16))
        tree = mode in VERIFIES
        values.update(
            speculative_algorithm=algorithm,
            speculative_num_steps=1,
            speculative_eagle_topk=max(2, topk) if tree else 1,
            speculative_num_draft_tokens=budget + 1 if tree else block,
        )
        values["max_running_requests"] = args.max_running_requests or DEFAULT_MAX_RUNNING
        if tree and not args.attention_backend:
            values["attention_backend"] = "triton"
    unsafe = bool(getattr(args, DDTREE + "allow_hybrid_unsafe", None))
    verdict = _hybrid_verdict(mode, model, unsafe, faults)
    public = None
    if algorithm == "DDTREE":
        public = {
            "mode": mode, "budget": budget, "topk_cap": topk, "allow_hybrid_unsafe": unsafe, "block_size": block,
            "keep_spine": bool(getattr(args, DDTREE + "keep_spine", None)),
            "verify_rows": budget + 1 if mode in VERIFIES else block, "hybrid_verdict": verdict,
            "states": kept(args, mode, budget, model),
        }  # fmt: skip
        if mode == "auto":
            public["widths"] = [*map(str, widths(args)), "chain"]
    return Settings(values, mode, budget, topk, block, model, public)


def kept(args: argparse.Namespace, mode: str, budget: int, model: dict[str, Any]) -> str:
    """How a tree's states are kept: as asked, else as the engine decides for the lab's targets."""
    hybrid = "linear_attention" in (model.get("layer_types") or ())
    fits = mode in VERIFIES and hybrid and budget <= MAX_RECORDS_BUDGET
    chosen = getattr(args, DDTREE + "states", None) if mode in VERIFIES else None
    return chosen or ("records" if fits else "snapshots")


def _hybrid_verdict(mode: str, model: dict[str, Any], unsafe: bool, faults: Faults) -> str:
    hybrid = "linear_attention" in (model.get("layer_types") or ())
    if mode not in VERIFIES or not hybrid:
        return ""
    if not faults.refuse_hybrid:
        return "proven by the stand-in's word"
    if not unsafe:
        architecture = (model.get("architectures") or ["model"])[0]
        raise Refusal(
            f"ValueError: --speculative-ddtree-mode {mode} on the hybrid {architecture} has not passed its parity "
            "suite on this GPU and backend. Run the self-test, or pass --speculative-ddtree-allow-hybrid-unsafe."
        )
    return "unproven, admitted by --speculative-ddtree-allow-hybrid-unsafe"


def warnings(args: argparse.Namespace, settings: Settings) -> list[str]:
    """What the log says about every value that is not the one asked for."""
    wanted = asked(args)
    lines = []
    if wanted["mode"] != settings.mode:
        lines.append("DDTREE: mode {} is not possible here; running {}.".format(wanted["mode"], settings.mode))
    public, most = settings.ddtree or {}, MAX_RECORDS_BUDGET
    unasked = getattr(args, DDTREE + "states", None) is None and public.get("hybrid_verdict")
    if unasked and public["states"] == "snapshots":
        why = f"records are written for at most {most} nodes and the budget is {settings.budget}"
        lines.append(f"DDTREE: recurrent states are kept as snapshots: {why}.")
    if settings.mode in VERIFIES and int(wanted["budget"]) != settings.budget:
        lines.append(f"DDTREE: budget {wanted['budget']} does not fit; running {settings.budget}.")
    return lines
