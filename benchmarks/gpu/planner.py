"""What may start now: a pure function of the stages, of what has ended, of what runs and of the time left."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

DONE = ("green", "red")  # judged; everything else is run again


@dataclass(frozen=True)
class Stage:
    """One subprocess.

    limit_s: when it is ended whatever it does. least_s: with less time left it is not begun. estimate_s: what it is
    expected to take. cores: CPU cores it wants at least. gpus: GPUs that it needs. alone: it times the GPU, so nothing
    runs beside it. In argv, {limit} stands for the seconds it has, {cores} for the cores that are free when it begins.
    """

    name: str
    why: str
    argv: tuple[str, ...]
    limit_s: float
    estimate_s: float
    least_s: float
    cores: int = 1
    alone: bool = False
    gpus: int = 1


def chosen(stages: Sequence[Stage], only: Collection[str], skip: Collection[str]) -> list[Stage]:
    """The stages asked for, in their order. Raises ValueError for a name that does not exist."""
    unknown = sorted({*only, *skip} - {stage.name for stage in stages})
    if unknown:
        known = ", ".join(stage.name for stage in stages)
        raise ValueError(f"no stage is called {', '.join(unknown)}; there are {known}")
    return [stage for stage in stages if (not only or stage.name in only) and stage.name not in skip]


def beyond(stages: Sequence[Stage], gpus: int) -> list[Stage]:
    """The stages that need more GPUs than there are. One is taken for granted: the stage `host` says if it is not."""
    return [stage for stage in stages if stage.gpus > max(gpus, 1)]


def lacks(stage: Stage, gpus: int) -> str:
    """Why a stage of `beyond` is not run."""
    words = {2: "two", 4: "four", 8: "eight"}
    return f"needs {words.get(stage.gpus, stage.gpus)} GPUs, and {gpus or 'none'} is visible here"


def finished(records: Mapping[str, Mapping[str, object]], sources: str, again: Collection[str]) -> set[str]:
    """The stages that an earlier run judged, with the very same sources."""
    return {
        name
        for name, record in records.items()
        if record.get("status") in DONE and record.get("sources") == sources and name not in again
    }


def startable(waiting: Sequence[Stage], running: Sequence[Stage], left_s: float, cores: int) -> list[Stage]:
    """Which waiting stages begin now, in order of value.

    A stage for which there is too little time is passed over. One that must be alone waits until nothing runs, and
    nothing behind it begins before it does. Others begin while there are cores; one that finds too few is passed over,
    except that a stage which wants more than there are begins when it is the only one.
    """
    begun: list[Stage] = []
    for stage in waiting:
        together = [*running, *begun]
        if left_s < stage.least_s:
            continue
        if any(one.alone for one in together):
            break
        if stage.alone:
            if not together:
                return [stage]
            break
        if not together or sum(one.cores for one in together) + stage.cores <= cores:
            begun.append(stage)
    return begun


def allowed_s(stage: Stage, left_s: float) -> float:
    """How long it may run."""
    return min(stage.limit_s, left_s)


def free_cores(stage: Stage, running: Sequence[Stage], cores: int) -> int:
    """How many it may use: what the others leave, and what it was planned with at least."""
    return max(cores - sum(one.cores for one in running), stage.cores)


def foresee(stages: Sequence[Stage], limit_s: float, cores: int) -> list[tuple[Stage, float | None, float | None]]:
    """When each stage would begin and end if all took what they are expected to; None where the time ends before."""
    now, waiting, running = 0.0, list(stages), []  # type: tuple[float, list[Stage], list[tuple[float, Stage]]]
    seen: dict[str, tuple[float, float]] = {}
    while waiting or running:
        for stage in startable(waiting, [one for _end, one in running], limit_s - now, cores):
            end = now + min(stage.estimate_s, allowed_s(stage, limit_s - now))
            seen[stage.name] = (now, end)
            running.append((end, stage))
            waiting.remove(stage)
        if not running:
            break
        now, ended = min(running, key=lambda item: item[0])
        running.remove((now, ended))
    return [(stage, *seen.get(stage.name, (None, None))) for stage in stages]
