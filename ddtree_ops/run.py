"""Carrying a plan out on one instance: the steps in order, and back again when one of them fails.

A failure before ``switch`` leaves the host as it was and is raised as it is. A failure after it is undone in reverse
order; what comes out then is RolledBackError, Interrupted, or NotRolledBackError if undoing failed too. Whatever
happens, the evidence of the failure is fetched before the failed server is gone.
"""

from __future__ import annotations

import base64
from dataclasses import replace
from pathlib import Path
from typing import Any

from ddtree_ops.connection import QUICK_S
from ddtree_ops.errors import DdtreeError, NotRolledBackError, RefusedError, RolledBackError, UnreachableError
from ddtree_ops.events import Kind
from ddtree_ops.interrupt import Interrupted
from ddtree_ops.plan import StepName
from ddtree_ops.release import short
from ddtree_ops.steps import Step, Work, build


def carry_out(work: Work, evidence_dir: Path) -> None:
    """Take every step of the plan; returns if the release is healthy and recorded, raises otherwise."""
    begun: list[Step] = []
    try:
        for step in build(work):
            work.alive()
            begun.append(step)
            work.tell(Kind.START, step.name, step.line)
            work.tell(Kind.OK, step.name, step.do())
    except (DdtreeError, Interrupted) as failure:
        raise unwind(work, begun, failure, evidence_dir) from failure
    except BaseException as bug:
        unwind(work, begun, DdtreeError(f"a bug: {bug!r}", host=work.target), evidence_dir)
        raise


def unwind(work: Work, begun: list[Step], failure: DdtreeError | Interrupted, evidence_dir: Path) -> Exception:
    """Undo what was begun, in reverse; returns what to raise."""
    where = begun[-1].name if begun else StepName.CHECK
    if isinstance(failure, RolledBackError):
        return _by_host(work, where, failure)
    found = failure.found if isinstance(failure, DdtreeError) else "interrupted"
    work.undoing = True
    work.tell(Kind.FAIL, where, found)
    undos = [step for step in reversed(begun) if step.undo is not None]
    if not any(step.name in (StepName.SWITCH, StepName.DRAIN) for step in undos):
        _undo(work, undos)
        return _untouched(work, failure)
    if undos[0].name is StepName.DRAIN and isinstance(failure, RefusedError):
        _undo(work, undos)  # the router would not let it go: nothing was stopped
        return _untouched(work, failure)
    kept = "" if isinstance(failure, Interrupted | UnreachableError) else gather(work, evidence_dir)
    work.why_back = f"{where}: {found}"
    try:
        back = "; ".join(note for note in _undo(work, undos) if note)
    except RolledBackError as done:
        return _by_host(work, where, done)
    except DdtreeError as stuck:
        return _stuck(work, failure, stuck, kept)
    if isinstance(failure, Interrupted):
        return failure
    return RolledBackError(
        found,
        host=work.target,
        why=f"release {work.release.short} failed at {where}; {back}",
        next=f"tar xzOf {kept} --wildcards '*/journal.txt' | tail -n 40" if kept else f"ddtree-ops logs {work.target}",
        data={
            **_gate(failure),
            **_engine_back(work),
            "step": str(where),
            "back": back,
            "evidence": kept,
            "failed": work.release.id,
        },
    )


def _by_host(work: Work, where: StepName, done: RolledBackError) -> RolledBackError:
    """The host heard nothing from us for too long and took back by itself; there is nothing left to undo."""
    work.tell(Kind.FAIL, where, done.found)
    return RolledBackError(
        done.found,
        host=work.target,
        why=f"the link was away at {where} for longer than {work.dead_man_s:.0f} s",
        next=f"ddtree-ops status {work.target}",
        data={"step": str(where), "back": short(work.plan.back), "failed": work.release.id},
    )


def _gate(failure: DdtreeError | Interrupted) -> dict[str, Any]:
    """Which gate did not hold, and what every gate said."""
    data = failure.data if isinstance(failure, DdtreeError) else {}
    return {key: data[key] for key in ("gate", "gates", "problems") if key in data}


def _engine_back(work: Work) -> dict[str, Any]:
    """The engine of the release that is back: the one that failed, or another."""
    there = work.there.releases.get(work.plan.back or "")
    return {"back_engine": there.engine if there else None}


def _undo(work: Work, undos: list[Step]) -> list[str]:
    notes = []
    for step in undos:
        assert step.undo is not None
        work.tell(Kind.UNDO, step.name, f"undoing {step.name}")
        notes.append(step.undo())
        work.tell(Kind.UNDO, step.name, notes[-1] or "undone")
    return notes


def _untouched(work: Work, failure: DdtreeError | Interrupted) -> Exception:
    """A failure before anything changed: as it is, with the host named."""
    if isinstance(failure, DdtreeError) and not failure.host:
        return replace(failure, host=work.target)
    return failure


def _stuck(work: Work, failure: DdtreeError | Interrupted, stuck: DdtreeError, evidence: str) -> NotRolledBackError:
    """Undoing failed: say what is there now as far as we know, and what to do."""
    first = failure.found if isinstance(failure, DdtreeError) else "interrupted"
    before = work.plan.back
    if work.armed:
        why = "the host was told to take the release back by itself when nobody confirms it, and will"
    elif isinstance(stuck, UnreachableError):
        why = f"the host may run {work.release.short} or {short(before)}; nobody watches it"
    else:
        why = f"the host is neither proven on {work.release.short} nor back on {short(before)}"
    again = f"ddtree-ops rollback {work.target} --to {short(before)}" if before else f"ddtree-ops deploy {work.target}"
    look = isinstance(stuck, UnreachableError) or work.armed
    return NotRolledBackError(
        f"{first}; and taking it back failed: {stuck.found}",
        host=work.target,
        why=why,
        next=f"ddtree-ops status {work.target}" if look else again,
        data={"evidence": evidence, "failed": work.release.id, "before": before},
    )


def gather(work: Work, folder: Path) -> str:
    """Fetch the evidence into one local file and return its path; empty if that fails (it must not stop the undo)."""
    settings = work.release.settings
    try:
        answer = work.helper.call(
            "evidence",
            {
                "instance": work.instance,
                "port": settings.port,
                "bind": settings.bind,
                "headers": work.secrets.headers,
            },
            deadline_s=2 * QUICK_S,
        )
        path = write_evidence(answer, folder)
    except Exception as error:  # noqa: BLE001  nothing that goes wrong here may keep the release before from coming back
        work.tell(Kind.NOTE, "evidence", f"no evidence could be kept: {error}")
        return ""
    work.tell(Kind.NOTE, "evidence", f"kept in {path}")
    return str(path)


def write_evidence(answer: dict[str, Any], folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = folder / Path(answer["name"]).name
    path.touch(mode=0o600)
    path.write_bytes(base64.b64decode(answer["archive_b64"]))
    return path
