"""The demonstration: its screen shows what a terminal would, and its story uses commands that exist."""

from __future__ import annotations

import importlib.util
import io
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest
from rich.console import Console

from ddtree_ops.cli.app import COMMANDS
from ddtree_ops.errors import ExitCode

SCRIPT = Path(__file__).parents[2] / "scripts/demo.py"


@pytest.fixture(scope="module")
def demo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["demo"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_the_story_breaks_a_deploy_and_comes_back(demo: ModuleType) -> None:
    assert {step.words[0] for step in demo.STORY} <= set(COMMANDS)
    assert [step.words[0] for step in demo.STORY if step.expect == ExitCode.ROLLED_BACK] == ["deploy"]
    assert demo.STORY[0].words[:2] == ("lab", "up")


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("one\r\ntwo\r\n", "one\ntwo"),
        ("a 10%\r\n\x1b[1A\x1b[2Ka 100%\r\n", "a 100%"),
        ("\x1b[?25lx\r\ny\r\n\r\x1b[2K\x1b[1A\x1b[2K\x1b[1A\x1b[2Kdone\r\n\x1b[?25h", "done"),
        ("\x1b[32mgreen\x1b[0m plain\n", "green plain"),
    ],
)
def test_a_screen_shows_what_is_left_after_redraws(demo: ModuleType, written: str, shown: str) -> None:
    screen = demo.Screen()
    screen.feed(written)
    assert screen.text.plain.rstrip("\n") == shown


def test_a_command_runs_in_a_terminal_of_its_own(demo: ModuleType) -> None:
    program = "import sys; print(sys.stdout.isatty(), sys.stdin.isatty()); sys.exit(5)"
    code, screen = demo.run_in_terminal([sys.executable, "-c", program], dict(os.environ), mirror=False)
    assert (code, screen.text.plain) == (5, "True False")


def test_a_command_that_hangs_is_ended(demo: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "STEP_S", 0.3)
    with pytest.raises(TimeoutError, match="did not end"):
        demo.run_in_terminal([sys.executable, "-c", "import time; time.sleep(60)"], dict(os.environ), mirror=False)


def test_the_picture_loads_nothing(demo: ModuleType) -> None:
    console = Console(record=True, file=io.StringIO(), width=40)
    console.print("two  blanks")
    svg = demo.self_contained(console.export_svg(title="t"))
    assert "@font-face" not in svg
    assert "url(http" not in svg
    assert 'xml:space="preserve"' in svg
