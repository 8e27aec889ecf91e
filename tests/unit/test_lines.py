"""Output as it comes, cut into lines wherever its blocks end."""

from __future__ import annotations

import pytest

from ddtree_ops.remote.lines import KEPT_LINES, Lines


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_lines_are_whole_however_the_blocks_come(size: int) -> None:
    data, seen = b"one\n\ntwo\xff\nlast", list[str]()
    lines = Lines(seen.append)
    for at in range(0, len(data), size):
        lines.add(data[at : at + size])
    assert lines.all() == data
    assert seen == ["one", "", "two\ufffd", "last"]


def test_what_is_followed_for_long_is_not_kept() -> None:
    lines = Lines(lambda _line: None)
    for number in range(10 * KEPT_LINES):
        lines.add(b"%d\n" % number)
    assert lines.all() == b"".join(b"%d\n" % number for number in range(9 * KEPT_LINES, 10 * KEPT_LINES))


def test_without_a_listener_everything_is_kept() -> None:
    lines = Lines(None)
    for number in range(10 * KEPT_LINES):
        lines.add(b"%d\n" % number)
    assert lines.all().count(b"\n") == 10 * KEPT_LINES
