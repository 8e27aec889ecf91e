"""Tables: whole on a wide terminal, in blocks on a narrow one, tab-separated in a pipe."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from ddtree_ops.errors import DdtreeError, ExitCode
from ddtree_ops.outcome import Outcome, Status
from ddtree_ops.smoke import Case, Smoke, Verdict
from ddtree_ops.status import Health, InstanceStatus
from ddtree_ops.ui import Output
from ddtree_ops.ui.results import show_outcomes
from ddtree_ops.ui.smoke import hinted, markdown
from ddtree_ops.ui.status import show_status

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


def test_what_is_shown_beside_errors_repeats_the_inventory_too(capsys: pytest.CaptureFixture[str]) -> None:
    out = Output(inventory=Path("f.toml"))
    error = DdtreeError("it failed", next="ddtree-ops logs h1:a")
    failed = Outcome("h1", "a", Status.FAILED, error=error, notes=("see ddtree-ops status h1",))
    show_outcomes(out, [failed], "go on: ddtree-ops deploy --resume")
    show_status(out, [InstanceStatus("h1", "a", Health.ABSENT, "not deployed")])
    assert [line.strip() for line in capsys.readouterr().out.splitlines() if "ddtree-ops" in line] == [
        "note: see ddtree-ops status -i f.toml h1",
        "next: ddtree-ops logs -i f.toml h1:a",
        "go on: ddtree-ops deploy -i f.toml --resume",
        "h1:a  next: ddtree-ops deploy -i f.toml h1:a",
    ]
    case = Case("deploy", "as a whole", Verdict.FAILED, "it failed", details=("next: ddtree-ops logs h1:a",))
    seen = hinted(Smoke("h1:a", (case,), 1.0, ExitCode.ROLLED_BACK), out.hint)
    assert "next: ddtree-ops logs -i f.toml h1:a" in markdown(seen)
