"""``status``: what is wanted, on disk, loaded by systemd and running, told apart. Pure: facts and one look in.

A host that is down, a unit that is activating, restarting or failed, and a server that is up but not the right one
are different states, because a person does different things about them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from ddtree_ops.errors import DdtreeError, ExitCode
from ddtree_ops.facts.host import HostFacts, InstanceFacts
from ddtree_ops.facts.server import Resolved
from ddtree_ops.facts.unit import Condition
from ddtree_ops.health import Observation, State, judge
from ddtree_ops.model import Settings
from ddtree_ops.plan import settings_diff
from ddtree_ops.release import short


class Health(StrEnum):
    """How an instance is doing."""

    HEALTHY = "healthy"
    UNPROVEN = "not proven"
    STARTING = "starting"
    RESTARTING = "restarting"
    STOPPING = "stopping"
    FAILED = "failed"
    DOWN = "down"
    ABSENT = "not deployed"
    WRONG = "up but wrong"
    UNREACHABLE = "unreachable"

    @property
    def good(self) -> bool:
        return self is Health.HEALTHY


@dataclass(frozen=True)
class GpuMemory:
    """What the instance's GPUs hold, in MiB."""

    used: int
    total: int


@dataclass(frozen=True)
class InstanceStatus:
    """One instance, as a person and a program see it."""

    host: str
    instance: str
    health: Health
    line: str
    mode: str | None = None
    budget: int | None = None
    current: str | None = None
    loaded: bool = True
    running: str | None = None
    proven: str | None = None
    restarts: int = 0
    since: str = ""
    accept_length: float | None = None
    tokens_per_s: float | None = None
    requests: int | None = None
    queued: int | None = None
    gpu_memory: GpuMemory | None = None
    differs: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    stand_in: bool = False
    armed_until: float | None = None
    locked_by: str = ""
    error: DdtreeError | None = field(default=None, repr=False)

    @property
    def target(self) -> str:
        return f"{self.host}:{self.instance}"

    @property
    def code(self) -> ExitCode:
        if self.error is not None:
            return self.error.exit_code
        return ExitCode.DONE if self.health.good else ExitCode.MOVED

    @property
    def next(self) -> str:
        """One command that helps; empty where nothing is wrong, or somebody is at it."""
        if self.error is not None:
            return self.error.next
        return "" if self.health.good or self.locked_by else _NEXT[self.health].format(target=self.target)

    def as_json(self) -> dict[str, Any]:
        left_out = {"error", "health", "gpu_memory"}
        values = {name: getattr(self, name) for name in self.__dataclass_fields__ if name not in left_out}
        memory = self.gpu_memory
        return {
            "target": self.target,
            "health": str(self.health),
            **values,
            "gpu_memory_mib": {"used": memory.used, "total": memory.total} if memory else None,
            "exit_code": int(self.code),
            "next": self.next,
        }


_NEXT = {
    Health.UNPROVEN: "ddtree-ops deploy {target}",
    Health.STARTING: "ddtree-ops logs {target} -f",
    Health.RESTARTING: "ddtree-ops logs {target}",
    Health.STOPPING: "ddtree-ops logs {target} -f",
    Health.FAILED: "ddtree-ops logs {target}",
    Health.DOWN: "ddtree-ops deploy {target}",
    Health.ABSENT: "ddtree-ops deploy {target}",
    Health.WRONG: "ddtree-ops status {target} --drift",
    Health.UNREACHABLE: "ddtree-ops doctor {target}",
}


def unreachable(host: str, instance: str, error: DdtreeError) -> InstanceStatus:
    return InstanceStatus(host, instance, Health.UNREACHABLE, error.found, error=error)


def assess(wanted: Settings, facts: HostFacts, seen: Observation) -> InstanceStatus:
    """One instance from the host's facts and one look at it."""
    there = facts.instance(wanted.instance)
    there = replace(there, unit=seen.unit)  # the look is newer
    health, line = _health(there, wanted, seen)
    settings = there.settings
    resolved = seen.resolved
    served = seen.served
    return InstanceStatus(
        host=facts.host,
        instance=wanted.instance,
        health=health,
        line=line,
        mode=str(resolved.mode) if resolved and resolved.mode else str(settings.mode) if settings else None,
        budget=_budget(resolved, settings),
        current=there.current,
        loaded=not seen.unit.needs_reload,
        running=seen.release or there.running,
        proven=there.proven,
        restarts=seen.unit.restarts,
        since=seen.unit.since,
        accept_length=served.accept_length if served else None,
        tokens_per_s=served.tokens_per_s if served else None,
        requests=served.running if served else None,
        queued=served.queued if served else None,
        gpu_memory=_memory(facts, settings or wanted),
        differs=_differs(there, wanted),
        notes=(*_restarted(facts.host, there), *_notes(there, resolved)),
        stand_in=bool(resolved and resolved.stand_in),
        armed_until=there.armed_until,
        locked_by=f"{facts.lock.owner} ({facts.lock.purpose})" if facts.lock and facts.lock.live else "",
    )


def _health(there: InstanceFacts, wanted: Settings, seen: Observation) -> tuple[Health, str]:
    condition = seen.unit.condition
    port = (there.settings or wanted).port
    if there.current is None and condition in (Condition.ABSENT, Condition.DOWN):
        return Health.ABSENT, "nothing is deployed"
    verdict = judge(seen, there.current or "", port)
    if condition in (Condition.DOWN, Condition.ABSENT):
        return Health.DOWN, verdict.line
    by_condition = {
        Condition.FAILED: Health.FAILED,
        Condition.RESTARTING: Health.RESTARTING,
        Condition.STOPPING: Health.STOPPING,
    }
    if condition in by_condition:
        return by_condition[condition], verdict.line
    if verdict.state is State.WAITING:
        return Health.STARTING, verdict.line
    if verdict.state is State.FAILED:
        return Health.WRONG, verdict.line
    if wrong := _wrong_mode(there.settings, seen.resolved):
        return Health.WRONG, wrong
    if there.proven != there.current:
        return Health.UNPROVEN, "it answers, but no deploy has proven this release"
    return Health.HEALTHY, f"release {short(there.current)}"


def _wrong_mode(asked: Settings | None, resolved: Resolved | None) -> str:
    """A server that settled on something else than it was asked for."""
    if asked is None or resolved is None or resolved.mode is None:
        return ""
    if resolved.mode is not asked.mode:
        return f"it runs mode {resolved.mode}, its release asks for {asked.mode}"
    if asked.mode.builds_trees and resolved.budget not in (None, asked.nodes):
        return f"it runs budget {resolved.budget}, its release asks for {asked.nodes}"
    return ""


def _budget(resolved: Resolved | None, settings: Settings | None) -> int | None:
    if settings is None or not settings.mode.builds_trees:
        return None
    return resolved.budget if resolved and resolved.budget is not None else settings.nodes


def _memory(facts: HostFacts, settings: Settings) -> GpuMemory | None:
    ours = [gpu for gpu in facts.gpus or () if gpu.index in settings.gpus]
    return GpuMemory(sum(gpu.memory_used for gpu in ours), sum(gpu.memory_total for gpu in ours)) if ours else None


def _differs(there: InstanceFacts, wanted: Settings) -> tuple[str, ...]:
    """What the inventory wants otherwise than the release that is there."""
    if there.current is None:
        return ("the inventory wants it, nothing is deployed",)
    if there.settings is None:
        return ("another version of ddtree-ops deployed it",)
    return tuple(f"{c.setting}: {c.before} there, {c.after} wanted" for c in settings_diff(there.settings, wanted))


def _waived(there: InstanceFacts) -> list[str]:
    """The gates that a person skipped for the release that is there, with the reason given."""
    release = there.releases.get(there.current or "")
    results = ((release.gates or {}).get("gates") or {}) if release else {}
    return [
        f"gate {name} {result.get('line', '')}"
        for name, result in results.items()
        if isinstance(result, dict) and str(result.get("line", "")).startswith("skipped:")
    ]


def _restarted(host: str, there: InstanceFacts) -> list[str]:
    """A server that died and came up again looks healthy; who comes in the morning must learn it."""
    times = there.unit.restarts
    if not times:
        return []
    return [f"it died and was restarted {times} time{'' if times == 1 else 's'}: ddtree-ops logs {host}:{there.name}"]


def _notes(there: InstanceFacts, resolved: Resolved | None) -> tuple[str, ...]:
    notes = []
    if there.unit.needs_reload:
        notes.append("the unit on disk is newer than what systemd has loaded")
    if there.current and there.current in there.releases and there.releases[there.current].damage:
        notes.append(f"release {short(there.current)} is damaged: {'; '.join(there.releases[there.current].damage)}")
    if there.unit.drop_ins:
        notes.append(f"drop-ins change the unit: {', '.join(there.unit.drop_ins)}")
    if there.current in there.taken_back:
        notes.append(f"this release was taken back: {there.taken_back[there.current or '']}")
    if there.settings is not None and there.settings.allow_hybrid_unsafe:
        notes.append(f"unsafe flag: {there.settings.unsafe_reason}")
    notes += _waived(there)
    if resolved is not None and resolved.stand_in:
        notes.append("a stand-in answers, not SGLang")
    return tuple(notes)
