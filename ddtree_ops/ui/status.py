"""The table of ``status``."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from rich.text import Text

from ddtree_ops.release import short
from ddtree_ops.status import Health, InstanceStatus
from ddtree_ops.ui.output import Output

STYLES = {
    Health.HEALTHY: "green",
    Health.UNPROVEN: "yellow",
    Health.STARTING: "yellow",
    Health.ABSENT: "dim",
}
COLUMNS = ("TARGET", "STATE", "MODE", "RELEASE", "ACCEPT", "TOK/S", "REQ", "GPU MEM", "RESTARTS")


def show_status(output: Output, found: Sequence[InstanceStatus]) -> None:
    """One row each, then what a person should know about it."""
    output.table(COLUMNS, [_row(status) for status in found])
    for status in found:
        for line in remarks(status):
            output.line(Text(f"{status.target}  ", "cyan").append(output.hint(line), "default"))


def _row(status: InstanceStatus) -> list[str | Text]:
    mode = (status.mode or "-") + (f" {status.budget}" if status.budget is not None else "")
    memory = status.gpu_memory
    requests = "-" if status.requests is None else f"{status.requests}+{status.queued or 0}"
    return [
        Text(status.target, "cyan"),
        Text(str(status.health), STYLES.get(status.health, "bold red")),
        mode,
        short(status.current),
        _number(status.accept_length, 2),
        _number(status.tokens_per_s, 1),
        requests,
        f"{memory.used / 1024:.1f}/{memory.total / 1024:.0f} GiB" if memory else "-",
        "-" if status.health is Health.UNREACHABLE else str(status.restarts),
    ]


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def remarks(status: InstanceStatus) -> list[str]:
    """What the row cannot hold."""
    lines = []
    if not status.health.good:
        lines.append(status.line)
    if status.running and status.current and status.running != status.current:
        lines.append(f"release {short(status.running)} runs, {short(status.current)} is current")
    lines += [f"differs from the inventory: {each}" for each in status.differs if status.current]
    lines += status.notes
    if status.armed_until is not None:
        until = datetime.fromtimestamp(status.armed_until, UTC).strftime("%H:%M:%S UTC")
        lines.append(f"not confirmed yet: the host takes it back by itself at {until}")
    if status.locked_by:
        lines.append(f"being changed by {status.locked_by}")
    if status.next:
        lines.append(f"next: {status.next}")
    return lines
