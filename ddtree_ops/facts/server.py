"""What a running server says of itself: ``/model_info``, ``/server_info`` and ``/metrics``, read by pure functions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from ddtree_ops.model import Mode


@dataclass(frozen=True)
class Served:
    """The figures of ``status``, from ``/metrics``; None where the server does not give one (yet)."""

    accept_length: float | None = None
    tokens_per_s: float | None = None
    running: int | None = None
    queued: int | None = None
    requests_total: float | None = None


def parse_metrics(text: str) -> Served:
    """Read SGLang's Prometheus text. Ranks repeat a gauge: counts are of rank 0, a rate is the sum over dp ranks."""
    values: dict[str, list[tuple[Mapping[str, str], float]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            values.setdefault(sample.name, []).append((sample.labels, sample.value))

    def one(name: str) -> float | None:
        ranked = [v for labels, v in values.get(name, []) if labels.get("tp_rank", "0") == "0"]
        return sum(ranked) if ranked else None

    def mean(name: str) -> float | None:
        ranked = [v for _, v in values.get(name, []) if v > 0]
        return sum(ranked) / len(ranked) if ranked else None

    def count(name: str) -> int | None:
        value = one(name)
        return None if value is None else int(value)

    return Served(
        accept_length=mean("sglang:spec_accept_length"),
        tokens_per_s=one("sglang:gen_throughput"),
        running=count("sglang:num_running_reqs"),
        queued=count("sglang:num_queue_reqs"),
        requests_total=one("sglang:num_requests_total"),
    )


@dataclass(frozen=True)
class Resolved:
    """What the server resolved its arguments to, from ``/server_info``."""

    algorithm: str | None
    mode: Mode | None
    budget: int | None
    topk_cap: int | None
    version: str | None
    stand_in: bool
    raw: Mapping[str, Any]


def weight_version(body: str) -> str | None:
    """The release that answers, from ``/model_info``; None if it names none."""
    value = _object(body).get("weight_version")
    return value if isinstance(value, str) else None


def parse_server_info(body: str) -> Resolved:
    """Read ``/server_info``; a body that is not a JSON object reads as one that says nothing.

    The plugin shows what it runs with under ``internal_states[0].ddtree``; without it the algorithm tells the mode.
    """
    info = _object(body)
    algorithm = info.get("speculative_algorithm")
    states = info.get("internal_states")
    first = states[0] if isinstance(states, list) and states and isinstance(states[0], dict) else {}
    ddtree = first.get("ddtree")
    shown: dict[str, Any] = ddtree if isinstance(ddtree, dict) else {}
    return Resolved(
        algorithm=algorithm if isinstance(algorithm, str) else None,
        mode=_mode(shown.get("mode"), algorithm, info),
        budget=_int(shown.get("budget")),
        topk_cap=_int(shown.get("topk_cap")),
        version=info.get("version") if isinstance(info.get("version"), str) else None,
        stand_in=bool(info.get("stand_in")),
        raw=info,
    )


def _mode(shown: object, algorithm: object, info: Mapping[str, Any]) -> Mode | None:
    """The mode that is shown, or that SGLang's own algorithm is; None for an algorithm that is not ours."""
    if shown in set(Mode):
        return Mode(str(shown))
    if algorithm in (None, "", "NONE"):
        return Mode.AR if info else None
    return Mode.LINEAR if algorithm == "DFLASH" else None


def _object(body: str) -> dict[str, Any]:
    try:
        value = json.loads(body)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _int(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
