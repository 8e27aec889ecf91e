"""What a pipe, a program and a terminal see of a run."""

from __future__ import annotations

import io
import json
import re

import pytest
from rich.console import Console

from ddtree_ops.events import Event, Kind
from ddtree_ops.ui import Output
from ddtree_ops.ui.progress import showing

RUN = [
    Event(Kind.START, "h1", "a", "switch", "point current at 3fa9"),
    Event(Kind.OK, "h1", "a", "switch", ""),
    Event(Kind.PROGRESS, "h1", "a", "health", "loading weights", 58.2),
    Event(Kind.PROGRESS, "h1", "a", "health", "loading weights", 57.1),
    Event(Kind.PROGRESS, "h1", "a", "health", "capturing graphs (bs=2)", 50.0),
    Event(Kind.OK, "h1", "a", "health", "8 tokens in 0.10 s"),
    Event(Kind.FAIL, "h2", "b", "health", "the unit failed"),
    Event(Kind.UNDO, "h2", "b", "switch", "release 9c1d runs again"),
    Event(Kind.END, "h1", "a", "deployed", "deployed 3fa9"),
]


def shown(*, as_json: bool = False, terminal: bool = False) -> str:
    text = io.StringIO()
    console = Console(file=text, force_terminal=terminal, width=200, no_color=True, legacy_windows=False)
    with showing(Output(json=as_json, err=console)) as report:
        for event in RUN:
            report(event)
    return re.sub(r"\x1b\[[?\d;]*[A-Za-z]", "", text.getvalue())


def test_plain_lines_say_each_thing_once() -> None:
    assert shown().splitlines() == [
        "h1:a  switch: point current at 3fa9",
        "h1:a  health: loading weights (58 s left)",
        "h1:a  health: capturing graphs (bs=2) (50 s left)",
        "h1:a  health: ok: 8 tokens in 0.10 s",
        "h2:b  health: failed: the unit failed",
        "h2:b  switch: release 9c1d runs again",
    ]


def test_a_program_gets_every_change_as_a_json_line() -> None:
    lines = [json.loads(line) for line in shown(as_json=True).splitlines()]
    assert [line["kind"] for line in lines] == [
        "start", "ok", "progress", "progress", "ok", "fail", "undo", "end",
    ]  # fmt: skip
    assert lines[2] == {
        "kind": "progress",
        "host": "h1",
        "instance": "a",
        "step": "health",
        "line": "loading weights",
        "left_s": 58.2,
    }


def test_a_terminal_keeps_what_is_done() -> None:
    text = shown(terminal=True)
    assert "✓ h1:a  switch         point current at 3fa9" in text
    assert "✓ h1:a  health         8 tokens in 0.10 s" in text
    assert "✗ h2:b  health         the unit failed" in text
    assert "↩ h2:b  switch         release 9c1d runs again" in text


def test_forced_colours_make_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """As CI services do: lines that are drawn again would fill their logs."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr("sys.stderr", io.StringIO())
    out = Output()
    assert (out.live, out.err.width, out.err.color_system) == (False, 4096, "standard")
    monkeypatch.delenv("FORCE_COLOR")
    assert Output().err.color_system is None
