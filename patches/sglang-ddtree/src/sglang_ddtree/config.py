"""The settings of one DDTree server: what a user may choose (DDTreeConfig) and what follows from it (Resolved).

The choice travels as one JSON object in the environment variable SGLANG_DDTREE_CONFIG: the command line writes
it before SGLang builds its ServerArgs, users of `sglang.Engine` set it themselves, and spawned processes
inherit it. The resolved form travels with the ServerArgs object (`attach`, `of`), because only it knows the
drafter's block size.
"""

from __future__ import annotations

import dataclasses
import json
import os
from typing import Any

MODES = ("linear", "shadow-linear", "tree")
ENV = "SGLANG_DDTREE_CONFIG"
DEFAULT_PROOFS = "/opt/ddtree/proofs"
# The accept and mask kernels keep a node's ancestors in 64-bit words; wider trees never paid off on any
# published target.
MAX_BUDGET = 255
_ATTRIBUTE = "_ddtree"  # a leading underscore passes ServerArgs' read-only guard and survives pickle and deepcopy


@dataclasses.dataclass(frozen=True)
class DDTreeConfig:
    """What a user chooses.

    mode: linear (SGLang's DFLASH, untouched), shadow-linear (DFLASH decides, trees are scored beside it) or tree.
    budget: nodes in the tree without the root. topk_cap: most children of a node; None means min(budget, 8).
    allow_hybrid_unsafe: admit a hybrid target on a combination of architecture, backend and GPU that nobody has proven.
    keep_spine: keep the drafter's whole top-1 chain in the tree whatever its probability.
    proofs_dir: where self-test records of this host lie. log_interval: rounds between two log lines.
    """

    mode: str = "linear"
    budget: int = 16
    topk_cap: int | None = None
    allow_hybrid_unsafe: bool = False
    keep_spine: bool = False
    proofs_dir: str = DEFAULT_PROOFS
    log_interval: int = 1000

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"--speculative-ddtree-mode is {self.mode!r}; choose one of {', '.join(MODES)}.")
        if not 1 <= self.budget <= MAX_BUDGET:
            raise ValueError(
                f"--speculative-ddtree-budget is {self.budget}; a tree has 1 to {MAX_BUDGET} nodes besides its root."
            )
        if self.topk_cap is not None and not 1 <= self.topk_cap <= 16:
            raise ValueError(f"--speculative-ddtree-topk-cap is {self.topk_cap}; choose 1 to 16 children a node.")
        if self.log_interval < 1:
            raise ValueError(f"log_interval is {self.log_interval}; it counts rounds and is at least 1.")

    @property
    def children(self) -> int:
        """Most children a node may have, K. A tree of T nodes cannot use more than T."""
        return min(self.topk_cap or 8, self.budget)

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> DDTreeConfig:
        try:
            values = json.loads(text)
        except ValueError as error:
            raise ValueError(f"{ENV} is no JSON object: {error}") from None
        if not isinstance(values, dict):
            raise ValueError(f"{ENV} holds {type(values).__name__}, not a JSON object.")
        unknown = sorted(set(values) - {field.name for field in dataclasses.fields(cls)})
        if unknown:
            raise ValueError(f"{ENV} has unknown settings: {', '.join(unknown)}.")
        return cls(**values)

    @classmethod
    def from_environment(cls) -> DDTreeConfig:
        text = os.environ.get(ENV, "")
        return cls.from_json(text) if text else cls()


@dataclasses.dataclass(frozen=True)
class Resolved:
    """What the server runs with.

    block_size: B, the drafter's block including its anchor. rows: N, the target's verify rows for each request.
    width: W, the longest path with its root. verdict: why a hybrid target was admitted ('' for a dense one).
    """

    config: DDTreeConfig
    block_size: int
    verdict: str = ""

    @property
    def tree(self) -> bool:
        return self.config.mode == "tree"

    @property
    def rows(self) -> int:
        return self.config.budget + 1 if self.tree else self.block_size

    @property
    def width(self) -> int:
        return self.block_size

    @property
    def slots(self) -> int:
        """KV slots a round may touch past the committed length, for each request."""
        return max(self.rows, self.block_size)

    def public(self) -> dict[str, Any]:
        """The values a reader of /server_info or the log needs."""
        config = self.config
        return {
            "mode": config.mode,
            "budget": config.budget,
            "topk_cap": config.children,
            "keep_spine": config.keep_spine,
            "allow_hybrid_unsafe": config.allow_hybrid_unsafe,
            "block_size": self.block_size,
            "verify_rows": self.rows,
            "hybrid_verdict": self.verdict,
        }


def attach(server_args: Any, resolved: Resolved) -> None:
    object.__setattr__(server_args, _ATTRIBUTE, resolved)


def of(server_args: Any) -> Resolved | None:
    """The resolved settings a ServerArgs carries; None when it was not started with DDTREE."""
    return getattr(server_args, _ATTRIBUTE, None)
