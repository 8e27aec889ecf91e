"""The linear baseline of a host, engine and model: where it is kept, and whether one can be compared with. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from ddtree_ops.gates import measure
from ddtree_ops.gates.measure import Measurement
from ddtree_ops.gates.prompts import prompt_set
from ddtree_ops.model import GateSettings, Mode, Settings

KINDS = (Mode.LINEAR, Mode.AR)
"""Modes whose measurements are kept: linear to be compared with, ar because only it tells how sure each token was."""

OTHER_SHAPE = 4
"""Streams of one more run when a baseline would have one batch shape only: linear must be able to part from itself."""


def baseline_facts(settings: Settings, engine: str, gates: GateSettings, kind: Mode) -> dict[str, Any]:
    """Everything that must be equal for two measurements to be compared; the mode, its sizes and places are not."""
    facts: dict[str, Any] = {
        "kind": kind.value,
        "engine": engine,
        "model": settings.model,
        "gpus": len(settings.gpus),
        "context_length": settings.context_length,
        "max_running_requests": settings.max_running_requests,
        "launch_module": settings.launch_module,
        "extra_args": list(settings.extra_args),
        "prompts": prompt_set(gates.prompts, gates.tokens),
        "rounds": gates.rounds,
    }
    if kind is Mode.LINEAR:
        facts["drafter"] = settings.drafter
    return facts


def baseline_key(settings: Settings, engine: str, gates: GateSettings, kind: Mode) -> str:
    """The name of the baseline's file on the host."""
    facts = baseline_facts(settings, engine, gates, kind)
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def baseline_concurrencies(gates: GateSettings) -> tuple[int, ...]:
    """What a baseline is measured at: what is declared, and another shape if that is only one."""
    declared = tuple(sorted(set(gates.concurrencies)))
    return declared if len(declared) > 1 else tuple(sorted({*declared, OTHER_SHAPE}))


def pack(measurement: Measurement, facts: Mapping[str, Any], release: str, at: float) -> dict[str, Any]:
    """The file's content."""
    return {"facts": dict(facts), "release": release, "at": at, "runs": measure.dump(measurement)}


def unpack(stored: Mapping[str, Any] | None, gates: GateSettings) -> Measurement | None:
    """The stored measurement; None if there is none or it lacks a declared concurrency."""
    if not stored:
        return None
    found = measure.load(stored["runs"], gates.tokens)
    return found if all(found.at(concurrency) for concurrency in gates.concurrencies) else None
