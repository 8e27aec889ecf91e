"""Journal entries as journalctl prints them, also odd ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helperhost import helper_host

from ddtree_ops.hostside.journal import MOST, parse


@pytest.mark.parametrize(
    ("message", "read"),
    [
        ("plain", "plain"),
        (None, ""),
        ([99, 97, 102, 233], "caf\ufffd"),
        (["said", "twice"], "said\ntwice"),
        ([[99, 233], "twice"], "c\ufffd\ntwice"),
        ("x" * 2 * MOST, "x" * MOST),
    ],
    ids=["plain", "none", "not UTF-8", "twice", "twice, not UTF-8", "long"],
)
def test_a_message(message: Any, read: str) -> None:
    entry = parse(json.dumps({"MESSAGE": message, "PRIORITY": ["3", "4"], "_PID": "7", "__CURSOR": "c"}))
    assert entry is not None
    assert (entry["message"], entry["priority"], entry["pid"], entry["cursor"]) == (read, 3, 7, "c")


def test_what_a_program_made_up_and_what_is_no_entry() -> None:
    entry = parse('{"MESSAGE": "x", "PRIORITY": "loud"}')
    assert entry is not None
    assert entry["priority"] == 6
    assert [parse(line) for line in ("", '{"MESSAGE": "ha', "[1]", "-- No entries --")] == [None] * 4


def test_long_lines_are_asked_for_and_a_torn_one_is_left_out(tmp_path: Path) -> None:
    host = helper_host(tmp_path)
    (host.systemd / "journal.jsonl").write_text('{"MESSAGE": "one\u2028two", "__CURSOR": "c"}\n{"MESSAGE": "ha')
    answer = host.do("logs", instance="qwen")
    assert [line["message"] for line in answer["lines"]] == ["one\u2028two"]
    assert [word for word in host.calls()[-1] if word == "--all"] == ["--all"]
