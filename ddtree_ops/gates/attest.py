"""Gate ``attest``: what was asked for is what the server resolved. Pure.

SGLang starts with less than was asked for and says so in one line of its log, if at all; the server then reports
healthy. So every flag we gave is compared with ``/server_info``, the plugin's own block there with the settings, and
the log with a table of its known concessions. A wrong value fails the gate; a concession that changes no figure is a
note.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ddtree_ops.gates.result import GateResult, Verdict, could_not_run
from ddtree_ops.model import Mode, Settings
from ddtree_ops.render import server_argv
from ddtree_ops.render.argv import ALGORITHM

Info = Mapping[str, Any]


@dataclass(frozen=True)
class Finding:
    """One difference: a stable name, a line, and whether the release is wrong for it."""

    name: str
    line: str
    wrong: bool = True

    def __str__(self) -> str:
        return f"{self.name}: {self.line}"


@dataclass(frozen=True)
class Concession:
    """A line of SGLang's log that says it does something else than it was asked to."""

    name: str
    pattern: str
    wrong: bool = True


CONCESSIONS = (
    Concession("max-running-requests", r"max_running_requests is capped to|Max running requests is reset to"),
    Concession("num-steps", r"overriding speculative_num_steps"),
    Concession("eagle-topk", r"overriding speculative_eagle_topk"),
    Concession("block-size", r"Failed to infer DFLASH block_size|speculative_num_draft_tokens is not set; defaulting"),
    Concession("draft-backend", r"DFLASH .*[Ff]alling back to"),
    Concession("attention-backend", r"attention backend.*(?:[Ff]all(?:ing)? back|instead)"),
    Concession("cuda-graph", r"Cuda graph is disabled|[Dd]isabling decode CUDA graph|CUDA graph is disabled"),
    Concession("overlap", r"Overlap sched\w+ is (?:not implemented|disabled)"),
    # it runs on with a slower kernel; the throughput gate judges what that costs
    Concession("jit-kernel", r"Failed to load JIT .+ kernel", wrong=False),
    Concession("prefill-cuda-graph", r"[Dd]isabling prefill CUDA graph", wrong=False),
    Concession("mixed-chunk", r"Mixed chunked prefill is disabled", wrong=False),
    Concession("radix-cache", r"[Rr]adix cache is disabled", wrong=False),
    # nobody said how: the engine prefers records, and says what they are not written for
    Concession("states", r"DDTREE: recurrent states are kept as snapshots: ", wrong=False),
)

# aliases of flags, and flags whose value the server does not repeat (or repeats as something else)
_ALIASES = {"tensor_parallel_size": "tp_size", "speculative_draft_model": "speculative_draft_model_path"}
_PATHS = frozenset({"model_path", "speculative_draft_model_path"})
_GRAPH_FLAGS = frozenset({"disable_cuda_graph", "cuda_graph_config", "cuda_graph_backend_decode"})
_NOT_REPEATED = frozenset({"config", "api_key", "admin_api_key"})


def judge(settings: Settings, release: str, info: Info, log: Sequence[str]) -> GateResult:
    """Compare the command line of this release with the server's own account of itself."""
    if not info:
        return could_not_run("attest", "the server does not answer /server_info")
    findings = [*_flags(settings, release, info), *_plugin(settings, info), *_runtime(settings, info), *_log(log)]
    wrong = [finding for finding in findings if finding.wrong]
    said = tuple(dict.fromkeys(str(finding) for finding in findings))
    evidence = {"stand_in": bool(info.get("stand_in")), "version": info.get("version"), "ddtree": _block(info)}
    if wrong:
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        return GateResult("attest", Verdict.FAILED, f"{wrong[0]}{more}", said, evidence)
    notes = f"; {len(said)} note{'s' if len(said) > 1 else ''}" if said else ""
    return GateResult("attest", Verdict.PASSED, f"the server resolved what was asked{notes}", said, evidence)


def asked_flags(argv: Sequence[str]) -> dict[str, str | bool]:
    """The flags of a server's command line by the name of their field; the last of a repeated flag counts."""
    asked: dict[str, str | bool] = {}
    name = ""
    for word in argv:
        if word.startswith("--"):
            flag, equals, value = word[2:].partition("=")
            name = _ALIASES.get(flag.replace("-", "_"), flag.replace("-", "_"))
            asked[name] = value if equals else True
            name = "" if equals else name
        elif name:
            if asked[name] is True:
                asked[name] = word
            else:
                asked[name] = f"{asked[name]} {word}"
    return asked


def _flags(settings: Settings, release: str, info: Info) -> Iterable[Finding]:
    for name, want in asked_flags(server_argv(settings, release)[3:]).items():
        if name.startswith("speculative_ddtree_") or name in _NOT_REPEATED or name not in info:
            continue
        have = info[name]
        if name in _PATHS and not str(want).startswith("/"):
            continue  # a hub name resolves to where its snapshot lies
        if not _same(want, have):
            yield Finding(name.replace("_", "-"), f"asked for {want}, resolved {have}")


def _same(want: str | bool, have: object) -> bool:
    if isinstance(want, bool) or isinstance(have, bool):
        return str(want).lower() == str(have).lower()
    if isinstance(have, (int, float)):
        try:
            return float(want) == float(have)
        except ValueError:
            return False
    if isinstance(have, list):
        return want.split() == [str(item) for item in have]
    return want == str(have)


def _plugin(settings: Settings, info: Info) -> Iterable[Finding]:
    """The plugin's own block: mode, budget, top-k cap, the width of a verify round, how states are kept."""
    if settings.mode is Mode.AR:
        if info.get("speculative_algorithm") not in (None, "", "NONE"):
            yield Finding("algorithm", f"asked for none, resolved {info['speculative_algorithm']}")
        return
    block = _block(info)
    if not block:
        yield Finding("plugin", f"the server shows no {ALGORITHM} settings: the plugin is not loaded")
        return
    wanted: dict[str, Any] = {"mode": settings.mode.value, "allow_hybrid_unsafe": settings.allow_hybrid_unsafe}
    if settings.mode.builds_trees:
        wanted |= {"budget": settings.nodes, "topk_cap": settings.topk_cap}
    if settings.mode.verifies_trees:
        wanted |= {"verify_rows": settings.nodes + 1}
        wanted |= {"states": settings.states} if settings.states is not None else {}
    if settings.mode is Mode.AUTO:
        wanted["widths"] = [*map(str, sorted(settings.widths)), "chain"]
    for key, want in wanted.items():
        if key in block and block[key] != want:
            yield Finding(key.replace("_", "-"), f"asked for {want}, resolved {block[key]}")


def _runtime(settings: Settings, info: Info) -> Iterable[Finding]:
    """What no flag of ours asked for, but which every figure rests on."""
    extra = asked_flags(settings.extra_args)
    serves = _state(info).get("effective_max_running_requests_per_dp")
    if isinstance(serves, int) and serves < settings.max_running_requests:
        yield Finding("max-running-requests", f"asked for {settings.max_running_requests}, serves {serves}")
    if info.get("disable_overlap_schedule") and "disable_overlap_schedule" not in extra:
        yield Finding("overlap", "the overlap scheduler is off")
    if _no_decode_graphs(info) and not extra.keys() & _GRAPH_FLAGS:
        yield Finding("cuda-graph", "CUDA graphs of decoding are off")


def _no_decode_graphs(info: Info) -> bool:
    config = info.get("cuda_graph_config")
    decode = config.get("decode") if isinstance(config, dict) else None
    return bool(info.get("disable_cuda_graph")) or (isinstance(decode, dict) and decode.get("backend") == "disabled")


def _log(lines: Iterable[str]) -> Iterable[Finding]:
    for line in lines:
        for concession in CONCESSIONS:
            if re.search(concession.pattern, line):
                yield Finding(concession.name, line.strip()[:200], concession.wrong)


def _state(info: Info) -> Info:
    states = info.get("internal_states")
    return states[0] if isinstance(states, list) and states and isinstance(states[0], dict) else {}


def _block(info: Info) -> Info:
    block = _state(info).get("ddtree")
    return block if isinstance(block, dict) else {}
