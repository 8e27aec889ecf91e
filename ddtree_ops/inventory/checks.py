"""What must hold beyond types: in one instance's settings, and between the instances of one host. Pure."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from ddtree_ops.model import MAX_BUDGET, MAX_RECORDS_BUDGET, MAX_TOPK_CAP, Mode, Settings
from ddtree_ops.text import unusable

OWNED_VARIABLES = frozenset({"PYTHONPATH", "CUDA_DEVICE_ORDER", "CUDA_VISIBLE_DEVICES"})
"""What the unit sets by itself: the engine is found by the first, the GPUs are pinned by the others."""

OWNED_FLAGS = {
    "--model-path": "model", "--model": "model", "--port": "port", "--host": "bind", "--tp-size": "gpus",
    "--tensor-parallel-size": "gpus", "--weight-version": "", "--speculative-algorithm": "mode",
    "--speculative-draft-model-path": "drafter", "--speculative-draft-model": "drafter",
    "--max-running-requests": "max_running_requests",
    **{f"--speculative-ddtree-{name.replace('_', '-')}": name
       for name in ("mode", "budget", "widths", "topk_cap", "states")},
    "--speculative-ddtree-allow-hybrid-unsafe": "allow_hybrid_unsafe",
}  # fmt: skip
"""Flags that settings decide, and the key of each."""

_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True)
class Problem:
    """One thing wrong: the key (of the settings) it hangs on, what is wrong, why it matters, how to repair it."""

    key: str
    found: str
    why: str = ""
    fix: str = ""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`` Did you mean 'x'?`` or an empty string."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f" Did you mean {close[0]!r}?" if close else ""


def settings_problems(settings: Settings) -> list[Problem]:
    """What is wrong in one instance's settings by themselves."""
    return [*_mode_problems(settings), *_variable_problems(settings), *_argument_problems(settings), *_texts(settings)]


def _mode_problems(settings: Settings) -> Iterator[Problem]:
    if settings.mode.speculates and not settings.drafter:
        yield Problem(
            "mode",
            f"mode {settings.mode} has no drafter",
            "every mode but ar verifies what a DFlash drafter proposes",
            'set drafter = "/path/to/drafter", or use mode ar',
        )
    if settings.mode.verifies_trees and settings.states == "records" and settings.nodes > MAX_RECORDS_BUDGET:
        size = "width" if settings.mode is Mode.AUTO else "budget"
        yield Problem(
            "states",
            f"states as records with {size} {settings.nodes}",
            f"the engine keeps records of trees of at most {MAX_RECORDS_BUDGET} nodes",
            f'use a {size} of at most {MAX_RECORDS_BUDGET}, or states = "snapshots"',
        )
    if settings.mode is Mode.AUTO:
        yield from _auto_problems(settings)
    if settings.allow_hybrid_unsafe and not (settings.unsafe_reason or "").strip():
        yield Problem(
            "allow_hybrid_unsafe",
            "the unsafe flag is set without a reason",
            "it admits a combination whose parity suite has not passed; who reads status later must learn why",
            'give --reason "..." on the command line, or set unsafe_reason = "..." in the inventory',
        )
    if len(set(settings.gpus)) != len(settings.gpus):
        yield Problem("gpus", f"gpus {list(settings.gpus)} names one GPU twice", "", "name each GPU once")


def _auto_problems(settings: Settings) -> Iterator[Problem]:
    if len(set(settings.widths)) != len(settings.widths):
        yield Problem("widths", f"widths {list(settings.widths)} names one width twice", "", "name each width once")
    if len(settings.gpus) > 1:
        why = "each rank would choose widths by its own measurements, and they must run the same"
        yield Problem("gpus", f"{len(settings.gpus)} GPUs in mode auto", why, "use one GPU, or mode tree")


def _variable_problems(settings: Settings) -> Iterator[Problem]:
    for name in settings.env:
        if name in OWNED_VARIABLES:
            why = "the unit sets it: the engine or the GPUs hang on it"
            yield Problem(f"env.{name}", f"env may not set {name}", why, "remove it")
        elif not _ENV_NAME.fullmatch(name):
            found = f"{name!r} is not the name of an environment variable"
            yield Problem(f"env.{name}", found, "systemd would ignore the line", "use letters, digits and underscores")


def _argument_problems(settings: Settings) -> Iterator[Problem]:
    """Extra arguments come last and win, so they may not take what identity and plans rest on."""
    given = {word.partition("=")[0] for word in settings.extra_args}
    for flag, key in OWNED_FLAGS.items():
        if flag in given:
            fix = f"set {key} instead" if key else "remove it"
            yield Problem("extra_args", f"extra_args gives {flag}", "the unit gives it, and is judged by it", fix)
    if "--config" in given and any(name in SERVER_SECRETS for name in settings.secrets):
        found = "extra_args gives --config, and so does the server's key"
        yield Problem("extra_args", found, "SGLang takes one file", "write the file's flags into extra_args")


def _texts(settings: Settings) -> Iterator[Problem]:
    """Texts that no unit can hold."""
    texts = {"model": settings.model, "drafter": settings.drafter or "", "bind": settings.bind}
    texts |= {"served_model_name": settings.served_model_name or ""}
    texts |= {f"env.{name}": value for name, value in settings.env.items()}
    texts |= {f"extra_args[{i}]": value for i, value in enumerate(settings.extra_args)}
    for key, value in texts.items():
        if reason := unusable(value):
            yield Problem(key, f"{key} cannot be written to a unit: {reason}", "", "remove the character")


SERVER_SECRETS = ("api_key", "admin_api_key")
"""Secrets that the server takes as arguments; every other one is an environment variable, named in capitals."""

_SECRET_VARIABLE = re.compile(r"[A-Z][A-Z0-9_]*")
_SOURCES = ("env", "file", "command")


def secret_problems(name: str, source: object) -> list[Problem]:
    """A secret has a name that can be delivered, and exactly one place where its value is found; never the value."""
    if name not in SERVER_SECRETS and not _SECRET_VARIABLE.fullmatch(name):
        fix = f"use {' or '.join(SERVER_SECRETS)}, or a variable in capitals"
        return [
            Problem(name, f"{name!r} is not a secret the server takes.{did_you_mean(name, SERVER_SECRETS)}", "", fix)
        ]
    example = f'write {name} = {{env = "{name.upper()}"}}, or file = "...", or command = ["..."]'
    if not isinstance(source, dict):
        why = "a secret in the inventory would be in its history, its backups and on every screen"
        return [Problem(name, f"secret {name} must say where its value is found, not what it is", why, example)]
    if len(source) != 1 or not set(source) <= set(_SOURCES):
        return [Problem(name, f"secret {name} must have exactly one of {', '.join(_SOURCES)}", "", example)]
    return []


def cap_topk(settings: Settings, *, stated: bool) -> tuple[Settings, str | None]:
    """A depth cannot hold more nodes than the tree: cap, and say so if the number was asked for."""
    if settings.topk_cap <= settings.nodes:
        return settings, None
    capped = settings.model_copy(update={"topk_cap": settings.nodes})
    said = stated and settings.mode.builds_trees
    notice = f"topk-cap {settings.topk_cap} is above the budget; capped at {settings.nodes}"
    return capped, f"{settings.instance}: {notice}" if said else None


def wide_for_records(settings: Settings) -> str | None:
    """That the engine will not keep records of a tree this wide, where nobody said how states are to be kept."""
    if not settings.mode.verifies_trees or settings.states is not None or settings.nodes <= MAX_RECORDS_BUDGET:
        return None
    size = "width" if settings.mode is Mode.AUTO else "budget"
    return (
        f"{size} {settings.nodes} is above {MAX_RECORDS_BUDGET} nodes: a hybrid target's states are kept as snapshots, "
        "not as records"
    )


def gpu_problem(settings: Settings, gpus_of_host: int) -> Problem | None:
    """A GPU index the host does not have."""
    beyond = [gpu for gpu in settings.gpus if gpus_of_host and gpu >= gpus_of_host]
    if not beyond:
        return None
    last = f"0 to {gpus_of_host - 1}" if gpus_of_host > 1 else "only 0"
    return Problem(
        "gpus", f"GPU {beyond[0]} is out of range: the host has {gpus_of_host} ({last})", "", f"use a GPU of {last}"
    )


def conflict(settings: Settings, others: Mapping[str, Settings]) -> Problem | None:
    """A port or GPU that another instance of the same host already has."""
    for name, other in others.items():
        if name == settings.instance:
            continue
        if other.port == settings.port:
            free = _free_port(settings.port, others)
            return Problem(
                "port",
                f"port {settings.port} is already instance {name}'s",
                "two servers cannot listen on one port",
                f"use another port, for example {free}",
            )
        if shared := sorted(set(settings.gpus) & set(other.gpus)):
            return Problem(
                "gpus",
                f"GPU {shared[0]} is already instance {name}'s",
                "two servers on one GPU run out of its memory",
                f"use a GPU that no other instance of the host has, or move {name} first",
            )
    return None


def _free_port(wanted: int, others: Mapping[str, Settings]) -> int:
    taken = {other.port for other in others.values()}
    return next(port for port in range(wanted + 1, wanted + 1000) if port not in taken)


def explain_validation(error: ValidationError, given: Mapping[str, Any]) -> list[Problem]:
    """Pydantic's findings in our words, one problem each."""
    return [_explain(detail, given) for detail in error.errors(include_url=False)]


def _explain(detail: ErrorDetails, given: Mapping[str, Any]) -> Problem:
    loc = detail["loc"]
    key = str(loc[0]) if loc else ""
    shown = _show(given.get(key))
    bounds = detail.get("ctx", {})
    if detail["type"] == "missing":
        return Problem(key, f"{key} is missing", "", f"set {key}")
    if key in _TREE_SIZES and detail["type"] in _RANGE:
        return Problem(key, f"{key} {shown} is out of range", *_TREE_SIZES[key])
    if detail["type"] == "enum":
        modes = [mode.value for mode in Mode]
        hint = did_you_mean(str(given.get(key)), modes)
        return Problem(key, f"{key} {shown} is not a mode.{hint}", "", f"use one of {', '.join(modes)}")
    if detail["type"] == "literal_error":
        found = f"{key} {shown} is neither {bounds['expected']}".replace(" or ", " nor ")
        return Problem(key, found, "", f"use one of {bounds['expected']}".replace(" or ", ", "))
    if detail["type"] in _RANGE:
        allowed = f"{_RANGE[detail['type']]} {next(iter(bounds.values()))}"
        return Problem(key, f"{key} {shown} must be {allowed}", "", f"give {key} a value of {allowed}")
    if detail["type"] == "string_pattern_mismatch" and key == "instance":
        return Problem(
            key,
            f"{key} {shown} is not usable as a name",
            "it becomes part of a unit's name and of paths",
            "use lower-case letters, digits and dashes, at most 48",
        )
    if detail["type"] == "string_pattern_mismatch":
        why, example = _PATTERNS.get(key, ("", "..."))
        return Problem(key, f"{key} {shown} is not usable", why, f'write it like {key} = "{example}"')
    wanted, example = _WANTED.get(detail["type"], (detail["msg"].lower(), ""))
    where = ".".join(map(str, loc)) if key == "env" else key
    fix = f"write it like {where} = {example}" if example else f"change {key}"
    return Problem(key, f"{key} {shown} {wanted}", "", fix)


_TREE_SIZES = {
    "budget": (
        f"a tree has 1 to {MAX_BUDGET} nodes besides its root; the engine refuses others at start",
        f"use a budget of 1 to {MAX_BUDGET}, for example 16",
    ),
    "widths": (
        f"a tree has 1 to {MAX_BUDGET} nodes besides its root; the engine refuses others at start",
        "use widths of 1 to 255, for example [8, 16, 32]",
    ),
    "topk_cap": (
        f"a node has 1 to {MAX_TOPK_CAP} children; the engine refuses others at start",
        f"use a topk_cap of 1 to {MAX_TOPK_CAP}, for example 8",
    ),
}
"""Why, and the repair."""

_PATTERNS = {
    "venv": (
        "it must be an absolute path without quotes, backslashes or $, since a program in it is started by systemd",
        "/opt/sglang/venv",
    ),
    "launch_module": ("it must be the dotted name of a Python module", "sglang.launch_server"),
    "user": ("it must be the name of a user", "sglang"),
}
"""Why, and what would do."""

_RANGE = {
    "greater_than_equal": "at least",
    "less_than_equal": "at most",
    "greater_than": "more than",
    "less_than": "less than",
}
_WANTED = {
    "int_type": ("must be a whole number", "16"),
    "int_from_float": ("must be a whole number", "16"),
    "float_type": ("must be a number", "0.8"),
    "finite_number": ("must be a finite number", "0.8"),
    "string_type": ("must be a text in quotes", '"..."'),
    "bool_type": ("must be true or false", "true"),
    "tuple_type": ("must be a list", "[...]"),
    "list_type": ("must be a list", "[...]"),
    "dict_type": ("must be a table", "{...}"),
}
"""What a value must be, and how one is written."""


def _show(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
