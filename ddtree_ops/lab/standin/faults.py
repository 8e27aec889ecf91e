"""The knobs and faults of the stand-in, read from the environment and from the host's faults file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

FAULTS_FILE = "/etc/ddtree-lab/faults"
PREFIX = "STANDIN_"
TOK_S = {"ar": 68.0, "linear": 94.0, "shadow-linear": 88.0, "tree": 117.0, "auto": 116.0}
ACCEPT = {"ar": 1.0, "linear": 4.1, "shadow-linear": 4.1, "tree": 5.3, "auto": 5.2}
KNOBS = ("LOAD_S", "WARM_S", "TOK_S", "ACCEPT", "DRAIN_S")
# fmt: off
FAULTS = (
    "CRASH_AT_START", "CRASH_AFTER_S", "HANG_LOADING", "HANG_COMPLETION", "SHORT_COMPLETION", "WEIGHT_VERSION",
    "BUDGET", "MODE", "REFUSE_HYBRID", "DIVERGE_AT", "SLOW_STOP_S", "STRAY_CHILD",
)
# fmt: on


class Faults(NamedTuple):
    """What this server does wrong, and how fast it is; a field of None or False is no fault."""

    load_s: float = 1.0
    warm_s: float = 0.3
    drain_s: float = 0.2
    tok_s: Mapping[str, float] = TOK_S
    accept: Mapping[str, float] = ACCEPT
    crash_at_start: bool = False
    crash_after_s: float | None = None
    hang_loading: bool = False
    hang_completion: bool = False
    short_completion: bool = False
    weight_version: str | None = None
    budget: int | None = None
    mode: str | None = None
    refuse_hybrid: bool = False
    diverge_at: int | None = None
    slow_stop_s: float = 0.0
    stray_child: bool = False


def from_file(path: str = FAULTS_FILE) -> dict[str, str]:
    """The variables that the host's file sets; none if there is no such file."""
    if not os.path.exists(path):
        return {}
    with open(path) as handle:
        lines = [line.strip() for line in handle if "=" in line and not line.startswith("#")]
    return dict(line.split("=", 1) for line in lines)


def variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The stand-in's variables, without their prefix. An unknown name is an error: a misspelt fault tests nothing."""
    ours = {name[len(PREFIX) :]: value for name, value in environment.items() if name.startswith(PREFIX)}
    unknown = sorted(set(ours) - {*KNOBS, *FAULTS, "ONLY"})
    if unknown:
        raise ValueError("no such fault: {}".format(", ".join(PREFIX + name for name in unknown)))
    return ours


def applies(condition: str, facts: Mapping[str, str]) -> bool:
    """Whether a STANDIN_ONLY condition holds: ``tree`` is short for ``mode=tree``; several are joined by commas.

    A release is named by the first characters of its digest, which is its server's weight version.
    """
    for part in filter(None, condition.split(",")):
        name, equals, wanted = part.strip().partition("=")
        if not equals:
            name, wanted = "mode", name
        found = facts.get(name, "")
        if not (found.startswith(wanted) if name == "weight_version" else found == wanted):
            return False
    return True


def read(values: Mapping[str, str], facts: Mapping[str, str]) -> Faults:
    """Values (see ``variables``) for a server with these facts (mode, budget, weight_version)."""
    faulty = applies(values.get("ONLY", ""), facts)

    def fault(name: str) -> str:
        return values.get(name, "") if faulty else ""

    def number(name: str) -> float | None:
        return float(fault(name)) if fault(name) else None

    def switch(name: str) -> bool:
        return fault(name) not in ("", "0")

    def table(name: str, default: Mapping[str, float]) -> Mapping[str, float]:
        pairs = (part.partition("=") for part in values.get(name, "").split(",") if part)
        return {**default, **{mode: float(value) for mode, _, value in pairs}}

    return Faults(
        load_s=float(values.get("LOAD_S") or 1.0),
        warm_s=float(values.get("WARM_S") or 0.3),
        drain_s=float(values.get("DRAIN_S") or 0.2),
        tok_s=table("TOK_S", TOK_S),
        accept=table("ACCEPT", ACCEPT),
        crash_at_start=switch("CRASH_AT_START"),
        crash_after_s=number("CRASH_AFTER_S"),
        hang_loading=switch("HANG_LOADING"),
        hang_completion=switch("HANG_COMPLETION"),
        short_completion=switch("SHORT_COMPLETION"),
        weight_version=fault("WEIGHT_VERSION") or None,
        budget=int(fault("BUDGET")) if fault("BUDGET") else None,
        mode=fault("MODE") or None,
        refuse_hybrid=switch("REFUSE_HYBRID"),
        diverge_at=int(fault("DIVERGE_AT")) if fault("DIVERGE_AT") else None,
        slow_stop_s=number("SLOW_STOP_S") or 0.0,
        stray_child=switch("STRAY_CHILD"),
    )
