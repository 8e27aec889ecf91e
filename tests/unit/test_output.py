"""Tables: whole on a wide terminal, in blocks on a narrow one, tab-separated in a pipe."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from ddtree_ops.ui import Output

COLUMNS = ("TARGET", "STATE", "RELEASE")
ROWS = [("ct200:linear", "healthy", "3fa91c0e1122"), ("ct200:[b]", "failed", "-")]


@pytest.mark.parametrize(
    ("width", "shown"),
    [
        (
            60,
            ["TARGET        STATE    RELEASE", "ct200:linear  healthy  3fa91c0e1122", "ct200:[b]     failed   -"],
        ),
        (
            30,
            [
                "ct200:linear",
                "  state  healthy",
                "  release  3fa91c0e1122",
                "ct200:[b]",
                "  state  failed",
                "  release  -",
            ],
        ),
    ],
)
def test_on_a_terminal(width: int, shown: list[str]) -> None:
    file = io.StringIO()
    Output(out=Console(file=file, force_terminal=True, no_color=True, width=width, color_system=None)).table(
        COLUMNS, ROWS
    )
    assert [line.rstrip() for line in file.getvalue().splitlines()] == shown


def test_a_cell_of_several_words_is_wrapped() -> None:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, color_system=None, width=30)
    Output(out=console).table(("TARGET", "REASON"), [("ct200:tree", "slower than linear at eight streams")])
    assert [line.rstrip() for line in file.getvalue().splitlines()] == [
        "TARGET      REASON",
        "ct200:tree  slower than linear",
        "            at eight streams",
    ]


def test_without_rows() -> None:
    file = io.StringIO()
    Output(out=Console(file=file, force_terminal=True, color_system=None, width=80)).table(COLUMNS, [])
    assert file.getvalue().split() == list(COLUMNS)


def test_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    Output().table(COLUMNS, ROWS)
    assert capsys.readouterr().out.splitlines()[1] == "ct200:linear\thealthy\t3fa91c0e1122"
