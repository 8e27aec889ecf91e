"""What happens while it happens: a live region on a terminal, plain lines in a pipe, JSON lines under ``--json``.

All of it goes to standard error: standard output holds the result. Events come from several threads at once.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from ddtree_ops.events import Event, Kind, Report
from ddtree_ops.ui.output import Output

MARKS = {
    Kind.OK: ("✓", "green"),
    Kind.SKIP: ("-", "dim"),
    Kind.FAIL: ("✗", "bold red"),
    Kind.UNDO: ("↩", "yellow"),
    Kind.NOTE: ("!", "yellow"),
}


@contextmanager
def showing(output: Output) -> Iterator[Report]:
    """Show the events that are reported while this lasts."""
    if output.json:
        yield Lines(output.err, as_json=True).report
    elif output.live:
        table = LiveTable(output.err)
        with table.live:
            yield table.report
    else:
        yield Lines(output.err).report


class Lines:
    """One line an event; a line that says the same as the one before it for its target is left out."""

    def __init__(self, console: Console, *, as_json: bool = False) -> None:
        self._file = console.file
        self._as_json = as_json
        self._lock = threading.Lock()
        self._last: dict[str, tuple[str, str]] = {}

    def report(self, event: Event) -> None:
        target = target_of(event)
        with self._lock:
            said = (event.step, event.line)
            if event.kind is Kind.PROGRESS and self._last.get(target) == said:
                return
            self._last[target] = said
            text = json.dumps(event.as_json(), ensure_ascii=False) if self._as_json else plain_line(event)
            if text:
                self._file.write(text + "\n")
                self._file.flush()


def target_of(event: Event) -> str:
    return f"{event.host}:{event.instance}" if event.instance else event.host


def plain_line(event: Event) -> str:
    """An event as one line of text; empty for one that says nothing new."""
    if event.kind is Kind.END or (event.kind in (Kind.OK, Kind.SKIP) and not event.line):
        return ""
    left = f" ({event.left_s:.0f} s left)" if event.left_s is not None else ""
    mark = {Kind.FAIL: "failed: ", Kind.UNDO: "", Kind.OK: "ok: ", Kind.SKIP: "skipped: "}.get(event.kind, "")
    return f"{target_of(event)}  {event.step}: {mark}{event.line}{left}"


class LiveTable:
    """What is done scrolls by; what is going on stays at the bottom, one row a target, with the time left."""

    def __init__(self, console: Console) -> None:
        self._lock = threading.Lock()
        self._now: dict[str, Event] = {}
        self._spinner = Spinner("dots")
        self.live = Live(
            console=console, get_renderable=self._render, refresh_per_second=8, transient=True, redirect_stderr=False
        )

    def report(self, event: Event) -> None:
        with self._lock:
            target = target_of(event)
            if event.kind is Kind.END:
                self._now.pop(target, None)
            elif event.kind in (Kind.START, Kind.PROGRESS):
                self._now[target] = event
            else:
                line = self._done(event)
                self.live.console.print(line, soft_wrap=True)

    def _done(self, event: Event) -> Text:
        mark, style = MARKS[event.kind]
        started = self._now.get(target_of(event))
        told = event.line
        if event.kind is Kind.OK and started is not None and started.step == event.step and started.kind is Kind.START:
            told = started.line + (f" ({event.line})" if event.line else "")
        line = Text(f"{mark} ", style=style)
        return (
            line.append(f"{target_of(event)}  ", style="cyan")
            .append(f"{event.step:<14}", "bold")
            .append(f" {told}", "default")
        )

    def _render(self) -> RenderableType:
        grid = Table.grid(padding=(0, 1))
        for target, event in list(self._now.items()):
            left = f"{event.left_s:.0f} s left" if event.left_s is not None else ""
            grid.add_row(
                self._spinner,
                Text(target, "cyan"),
                Text(event.step, "bold"),
                Text(event.line, no_wrap=True, overflow="ellipsis"),
                Text(left, "dim"),
            )
        return Group(grid)
