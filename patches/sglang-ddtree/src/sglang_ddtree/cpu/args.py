"""SGLang's command line for the CPU engine: the same flags, resolved as SGLang and the plugin resolve them.

`flags.json` lists the flags of SGLang 0.5.17 (a test regenerates it from the pinned sources), so a command line that
SGLang would refuse is refused here too. What only concerns a GPU is accepted and listed in the log as without effect.
"""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_ddtree import keeping, states
from sglang_ddtree.cpu.decode import TOPK_MAX, Mode
from sglang_ddtree.cpu.weights import load_config

FLAGS = Path(__file__).with_name("flags.json")
DDTREE = "speculative_ddtree_"
DEFAULT_MAX_RUNNING = 48
NO_FIELDS = ("config", "prefill_round_robin_balance", "collect_tokens_histogram")  # flags that are no arguments of it
USED = frozenset({
    "model_path", "host", "port", "served_model_name", "tokenizer_path", "context_length", "max_running_requests",
    "max_total_tokens", "api_key", "weight_version", "enable_metrics", "speculative_algorithm",
    "speculative_draft_model_path",
})  # fmt: skip


class Refusal(Exception):
    """SGLang would refuse to start with these arguments; the text is what its traceback ends with."""


@dataclass(frozen=True)
class Launch:
    """A resolved command line. ``args`` are all of SGLang's, as /server_info shows them."""

    args: dict[str, Any]
    mode: Mode
    target: Path
    drafter: Path | None
    block: int
    model: dict[str, Any]
    ddtree: dict[str, Any] | None
    unused: tuple[str, ...]

    @property
    def context(self) -> int:
        """Tokens of a prompt and its answer together."""
        return int(self.args["context_length"] or self.model["max_position_embeddings"])

    @property
    def rows(self) -> int:
        """Rows the target verifies in a round; 0 without speculation."""
        return self.mode.budget + 1 if self.mode.name == "tree" else self.block


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m sglang_ddtree.cpu.server", allow_abbrev=False)
    kinds = {"int": int, "float": float, "size": human_readable_int, "str": str}
    for flag in json.loads(FLAGS.read_text()):
        options = {key: flag[key] for key in ("dest", "nargs", "const", "choices", "required") if key in flag}
        options["default"] = flag.get("default")
        if flag["kind"] == "switch":
            options["action"] = "store_true"
        elif flag["kind"] == "switch-or-not":
            options["action"] = argparse.BooleanOptionalAction
        else:
            options["type"] = kinds[flag["kind"]]
        parser.add_argument(*flag["names"], **options)
    add_plugin_flags(parser)
    return parser


def add_plugin_flags(parser: argparse.ArgumentParser) -> None:
    """The plugin's own; it registers them on SGLang's parser, which is not here."""
    parser.add_argument("--speculative-ddtree-mode", choices=("linear", "shadow-linear", "tree", "auto"))
    parser.add_argument("--speculative-ddtree-budget", type=int)
    parser.add_argument("--speculative-ddtree-widths")
    parser.add_argument("--speculative-ddtree-topk-cap", type=int)
    parser.add_argument("--speculative-ddtree-keep-spine", action="store_true", default=None)
    parser.add_argument("--speculative-ddtree-allow-hybrid-unsafe", action="store_true", default=None)
    parser.add_argument("--speculative-ddtree-proofs-dir")
    parser.add_argument("--speculative-ddtree-states", choices=states.CHOICES)


def human_readable_int(text: str) -> int:
    """A whole number, or one with SGLang's suffixes: ``25.6k`` is 25600, ``1Ki`` is 1024."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(?:([kMGT])|([KMGT])i)", text.strip())
    if match is None:
        return int(text)
    if match[3]:
        return int(match[1]) << 10 * (1 + "KMGT".index(match[3]))
    return int(float(match[1]) * 10 ** (3 * (1 + "kMGT".index(match[2]))))


def resolve(argv: list[str]) -> Launch:
    """Parse and settle a command line, or refuse it."""
    parser = build_parser()
    space = parser.parse_args(argv)
    values = {name: value for name, value in vars(space).items() if not name.startswith(DDTREE)}
    ours = {name: value for name, value in vars(space).items() if name.startswith(DDTREE) and value is not None}
    algorithm = (space.speculative_algorithm or "").upper()
    if algorithm not in ("", "DFLASH", "DDTREE"):
        raise Refusal(f"the CPU engine speculates by DFLASH and DDTREE, not by {algorithm}")
    if ours and algorithm != "DDTREE":
        flags = ", ".join("--" + name.replace("_", "-") for name in sorted(ours))
        raise Refusal(f"ValueError: {flags} set without --speculative-algorithm DDTREE.")
    model = _config(space.model_path, "model")
    mode = _mode(algorithm, space)
    block, drafter = 0, None
    if mode.drafts:
        block = int(_config(space.speculative_draft_model_path, "draft model").get("block_size", 16))
        drafter = Path(space.speculative_draft_model_path)
    values["served_model_name"] = values.get("served_model_name") or space.model_path
    values["tokenizer_path"] = space.tokenizer_path or space.model_path
    values |= {"device": "cpu", "disable_cuda_graph": bool(space.disable_cuda_graph)}
    for name in NO_FIELDS:
        del values[name]
    if mode.drafts:
        values.update(_speculative(algorithm, mode, block, space))
    shown = _public(mode, block, space, model) if algorithm == "DDTREE" else None
    unused = tuple(name for name in _given(parser, space) if name not in USED and not name.startswith(DDTREE))
    return Launch(values, mode, Path(space.model_path), drafter, block, model, shown, unused)


def _config(folder: str | None, what: str) -> dict[str, Any]:
    try:
        return load_config(Path(folder or ""))
    except (OSError, ValueError) as error:
        raise Refusal(f"OSError: Can't load the configuration of the {what} '{folder}': {error}") from error


def _mode(algorithm: str, space: argparse.Namespace) -> Mode:
    if not algorithm:
        return Mode("ar")
    name = "linear" if algorithm == "DFLASH" else space.speculative_ddtree_mode or "linear"
    budget = 16 if space.speculative_ddtree_budget is None else space.speculative_ddtree_budget
    if name == "auto":
        raise Refusal("mode auto chooses by measured speed, and the CPU engine's speed means nothing; use mode tree.")
    cap = space.speculative_ddtree_topk_cap
    if not 1 <= budget <= 255:
        raise Refusal(f"--speculative-ddtree-budget is {budget}; a tree has 1 to 255 nodes besides its root.")
    if cap is not None and not 1 <= cap <= TOPK_MAX:
        raise Refusal(f"--speculative-ddtree-topk-cap is {cap}; choose 1 to {TOPK_MAX} children a node.")
    return Mode(name, budget, min(cap or 8, budget), bool(space.speculative_ddtree_keep_spine))


def _speculative(algorithm: str, mode: Mode, block: int, space: argparse.Namespace) -> dict[str, Any]:
    tree = mode.name == "tree"
    return {
        "speculative_algorithm": algorithm,
        "speculative_num_steps": 1,
        "speculative_eagle_topk": max(2, mode.topk_cap) if tree else 1,
        "speculative_num_draft_tokens": mode.budget + 1 if tree else block,
        "max_running_requests": space.max_running_requests or DEFAULT_MAX_RUNNING,
    }


def _public(mode: Mode, block: int, space: argparse.Namespace, model: dict[str, Any]) -> dict[str, Any]:
    """The plugin's block of /server_info."""
    return {
        "mode": mode.name,
        "budget": mode.budget,
        "topk_cap": mode.topk_cap,
        "keep_spine": mode.keep_spine,
        "allow_hybrid_unsafe": bool(space.speculative_ddtree_allow_hybrid_unsafe),
        "block_size": block,
        "verify_rows": mode.budget + 1 if mode.name == "tree" else block,
        "hybrid_verdict": "the reference itself" if mode.name == "tree" else "",
        "states": _kept(mode, space.speculative_ddtree_states, model),
    }


def _kept(mode: Mode, asked: str | None, model: dict[str, Any]) -> str:
    """The word that the plugin would resolve; the reference keeps each row's state, and has one type for all."""
    if mode.name != "tree":
        return states.SNAPSHOTS
    target = keeping.Target(
        architecture=str(next(iter(model.get("architectures") or ["the target"]))),
        gdn="linear_attention" in (model.get("layer_types") or ()),
        heads=(int(model.get("linear_key_head_dim") or 0), int(model.get("linear_value_head_dim") or 0)),
        activation=str(model.get("hidden_act") or "silu"),
    )
    return keeping.choose(asked, target.gdn, keeping.gap(target, mode.budget, states.MAX_BUDGET))[0]


def _given(parser: argparse.ArgumentParser, space: argparse.Namespace) -> list[str]:
    """Flags whose value is not the default."""
    return sorted(name for name, value in vars(space).items() if value != parser.get_default(name))
