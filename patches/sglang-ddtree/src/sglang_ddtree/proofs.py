"""Which hybrid targets a tree may be verified on: combinations shipped as proven, and self-test records of this host.

A sibling that sees its sibling's recurrent state instead of its parent's still writes plausible text, so nobody
notices. The kernels are exact where the parity suite passed, and the suite must have passed on the very
combination of model architecture, attention backend, compute capability and engine source. A record is one JSON
file:

    {"schema": 1, "engine": "<engine_digest()>", "architecture": "Qwen3_5ForCausalLM", "backend": "triton",
     "compute_capability": "12.0", "driver": "580.159.04", "max_budget": 64, "passed": true,
     "states": "records", "tp": 2, "when": "2026-11-30T08:00:00Z",
     "suite": {...what ran and its figures, free form...}}

`driver` may be absent; where it stands it must be the running one, since a driver carries the compiler of the kernels.
`states` says how recurrent states were kept; absent, it means snapshots. `tp` is the number of GPUs that share a model;
absent, it means one. In mode auto the width changes between rounds, and a record holds there only if it has
`"auto": "<auto_digest()>"` as well. With the prefix cache on, states along the paths of trees are kept for later
requests, and a record holds there only if it has `"prefix_cache": {"extra_buffer": 64}`: by SGLang's strategy, the
widest tree whose states went through the cache and were right. No record is about both.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

SCHEMA = 1
# A test holds that the worker imports nothing of this package that is neither here nor in the list of bystanders there.
STATE_SOURCES = (
    "algo.py",
    "config.py",
    "head.py",
    "hooks.py",
    "info.py",
    "kernels/accept.py",
    "kernels/buffers.py",
    "kernels/build.py",
    "kernels/keys.py",
    "kernels/mask.py",
    "kernels/sample.py",
    "kernels/slots.py",
    "kernels/topk.py",
    "tags.py",
    "verify.py",
    "worker.py",
)
# What computes beside them where states are kept as records; the same test holds it for their worker.
RECORD_SOURCES = (
    "kernels/gdn.py",
    "kernels/gdn_commit.py",
    "kernels/gdn_conv.py",
    "kernels/gdn_verify.py",
    "kernels/hybrid.py",
    "records.py",
    "records_worker.py",
    "states.py",
)
# What keeps the ranks of a model on several GPUs together; the same test holds that it needs nothing else.
RANK_SOURCES = ("ranks.py",)
# What mode auto computes a round with beyond those: which width runs decides no token, but a width's objects could.
AUTO_SOURCES = (
    "auto/captures.py",
    "auto/settings.py",
    "auto/shapes.py",
    "auto/timing.py",
    "auto/worker.py",
    "states.py",
)
# And where each of its widths leaves records; RECORD_SOURCES are in the other digest.
AUTO_RECORD_SOURCES = ("auto/records.py",)
# Classes that wrap another one's layers: the vision wrapper of Qwen3.5 runs the text model's own, state for state.
FAMILY = {"Qwen3_5ForConditionalGeneration": "Qwen3_5ForCausalLM"}
_PACKAGE = Path(__file__).parent
_DRIVER_FILE = Path("/sys/module/nvidia/version")


@dataclasses.dataclass(frozen=True)
class Combination:
    """What a proof is about. budget: nodes of the tree, since wider trees use other tile shapes. states: snapshots or
    records (see states.py). tp: GPUs that share the model. `engine` is the digest for the two. auto: `auto_digest()` in
    mode auto, whose budget is the widest, else None; a record that names none is about trees of one width. dense: no
    recurrent states, so that of a proof only the ranks matter, and any architecture's will do. prefix_cache: the
    strategy by which recurrent states are kept for later requests, None where none are.
    """

    architecture: str
    backend: str
    compute_capability: str
    engine: str
    driver: str | None
    budget: int
    states: str = "snapshots"
    tp: int = 1
    auto: str | None = None
    dense: bool = False
    prefix_cache: str | None = None

    def label(self) -> str:
        several = f", {self.tp} GPUs" if self.tp > 1 else ""
        return f"{self.architecture} on {self.backend}, compute capability {self.compute_capability}{several}"


def needs_proof(hybrid: bool, tp: int) -> bool:
    """Whether something could go wrong in silence: a recurrent state, or ranks that part, whatever the layers are. A
    dense target on one GPU has neither.
    """
    return hybrid or tp > 1


def engine_digest(root: Path = _PACKAGE, states: str = "snapshots", tp: int = 1) -> str:
    """sha256 over the sources that decide what a tree round computes: what a proof vouches for."""
    more = (*(RECORD_SOURCES if states == "records" else ()), *(RANK_SOURCES if tp > 1 else ()))
    return _digest(root, (*STATE_SOURCES, *more))


def auto_digest(root: Path = _PACKAGE, states: str = "snapshots") -> str:
    """sha256 over the sources that a round of mode auto computes with beyond a tree's."""
    return _digest(root, (*AUTO_SOURCES, *(AUTO_RECORD_SOURCES if states == "records" else ())))


def _digest(root: Path, sources: tuple[str, ...]) -> str:
    digest = hashlib.sha256()
    for name in sources:
        digest.update(name.encode() + b"\0" + (root / name).read_bytes() + b"\0")
    return digest.hexdigest()


def running_driver(path: Path = _DRIVER_FILE) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def reject(record: Any, wanted: Combination) -> str | None:
    """None if the record proves the combination, else the first reason why it does not."""
    if not isinstance(record, dict) or record.get("schema") != SCHEMA:
        return f"is no record of schema {SCHEMA}"
    if record.get("passed") is not True:
        return "records a suite that did not pass"
    if not wanted.dense and record.get("architecture") not in (wanted.architecture, FAMILY.get(wanted.architecture)):
        return f"is about architecture {record.get('architecture')!r}, not {wanted.architecture!r}"
    kept = record.get("states", "snapshots")
    if kept != wanted.states:
        return f"is about states kept as {kept!r}, not {wanted.states!r}"
    ranks = record.get("tp", 1)
    if ranks != wanted.tp:
        return f"is about a model on {ranks!r} GPU{'s' * (ranks != 1)}, not on {wanted.tp}"
    for field in ("backend", "compute_capability", "engine"):
        if record.get(field) != getattr(wanted, field):
            return f"is about {field} {record.get(field)!r}, not {getattr(wanted, field)!r}"
    if record.get("driver") is not None and wanted.driver is not None and record["driver"] != wanted.driver:
        return f"was made under driver {record['driver']}; {wanted.driver} runs now"
    if not isinstance(record.get("max_budget"), int) or record["max_budget"] < wanted.budget:
        return f"covers budgets up to {record.get('max_budget')!r}, not {wanted.budget}"
    if wanted.auto is not None and record.get("auto") is None:
        return "is about trees of one width, not about mode auto, which changes it"
    if wanted.auto is not None and record["auto"] != wanted.auto:
        return f"is about auto {record['auto']!r}, not {wanted.auto!r}"
    return None if wanted.prefix_cache is None else _reject_cache(record.get("prefix_cache"), wanted)


def _reject_cache(shown: Any, wanted: Combination) -> str | None:
    """The same for what a record says of the prefix cache."""
    if wanted.auto is not None:
        return "is not about mode auto with the prefix cache, which no arm of the suite runs together"
    if shown is None:
        return "is about trees without the prefix cache"
    widest = shown.get(wanted.prefix_cache) if isinstance(shown, dict) else None
    if not isinstance(widest, int):
        return f"is about the prefix cache with {shown!r}, not with {wanted.prefix_cache!r}"
    if widest < wanted.budget:
        return f"covers the prefix cache under trees of up to {widest} nodes, not {wanted.budget}"
    return None


def read_records(directory: Path) -> list[tuple[str, Any]]:
    """(name, content) of each record; content is None where a file is no JSON."""
    found: list[tuple[str, Any]] = []
    if not directory.is_dir():
        return found
    for path in sorted(directory.glob("*.json")):
        try:
            found.append((path.name, json.loads(path.read_text())))
        except (OSError, ValueError):
            found.append((path.name, None))
    return found


def shipped(path: Path = _PACKAGE / "proven.json") -> list[tuple[str, Any]]:
    """The records this package ships; each names the sources it was made with, so an edit withdraws it."""
    return [(f"{path.name}#{index}", record) for index, record in enumerate(json.loads(path.read_text()))]


def judge(wanted: Combination, records: list[tuple[str, Any]]) -> tuple[str | None, list[str]]:
    """(name of the record that proves the combination or None, why each other one does not)."""
    reasons = []
    for name, record in records:
        reason = reject(record, wanted)
        if reason is None:
            return name, reasons
        reasons.append(f"{name} {reason}")
    return None, reasons
