"""Put a bundle on a host: ask what it lacks, send that and no more."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from ddtree_ops.bundle.build import Bundle

ASK_DEADLINE_S = 90.0
STAGE_DEADLINE_S = 600.0


class Caller(Protocol):
    """What is needed of ``agent.Agent``."""

    def call(
        self,
        op: str,
        args: dict[str, Any] | None = None,
        payload: bytes | None = None,
        *,
        deadline_s: float,
        on_event: Callable[[dict[str, Any]], None] | None = None,
    ) -> dict[str, Any]: ...


@dataclass(frozen=True)
class EngineState:
    """What a host has of an engine; ``blobs`` must travel. A host with another SGLang is refused before this."""

    engine: str
    staged: bool
    blobs: tuple[str, ...]
    sglang: str
    python: str


@dataclass(frozen=True)
class StagedEngine:
    """What staging did. Files are counted; ``copied`` is not 0 where the host's file systems allow no hard links."""

    engine: str
    staged: bool
    linked: int = 0
    copied: int = 0
    received: int = 0
    reused: int = 0
    sent_bytes: int = 0

    def __str__(self) -> str:
        if not self.staged:
            return f"engine {self.engine[:12]} was there"
        how = f"{self.linked} files linked, {self.received} sent ({self.sent_bytes / 1024:.0f} KiB)"
        if self.reused:
            how += f", {self.reused} taken from another engine"
        if self.copied:
            how += f", {self.copied} copied since they could not be linked"
        return f"engine {self.engine[:12]} staged: {how}"


def check_engine(agent: Caller, bundle: Bundle, venv: str) -> EngineState:
    """Ask what would have to travel; changes nothing. Raises RefusedError on a host with another SGLang."""
    found = agent.call("engine_missing", _args(bundle, venv), deadline_s=ASK_DEADLINE_S)
    return EngineState(
        engine=bundle.digest,
        staged=found["staged"],
        blobs=tuple(found["blobs"]),
        sglang=found["sglang"]["version"],
        python=found["sglang"]["tag"],
    )


def stage_engine(
    agent: Caller, bundle: Bundle, venv: str, *, on_event: Callable[[dict[str, Any]], None] | None = None
) -> StagedEngine:
    """Make the engine complete on the host, under its digest. The caller holds the host's lock."""
    state = check_engine(agent, bundle, venv)
    if state.staged:
        return StagedEngine(bundle.digest, staged=False)
    payload = bundle.pack(state.blobs)
    done = agent.call("stage_engine", _args(bundle, venv), payload, deadline_s=STAGE_DEADLINE_S, on_event=on_event)
    return StagedEngine(bundle.digest, sent_bytes=len(payload), **done)


def _args(bundle: Bundle, venv: str) -> dict[str, Any]:
    return {"manifest": bundle.manifest.model_dump(mode="json"), "venv": venv}
