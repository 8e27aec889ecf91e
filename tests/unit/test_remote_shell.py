"""A command line for any login shell, read by the real ones that are installed here."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddtree_ops.remote.files import PUT
from ddtree_ops.remote.shell import for_any_shell

SHELLS = ("sh", "bash", "dash", "zsh", "tcsh", "fish")
NASTY = [
    "", " ", "a b", "a\nb", "\n", "end\n", "\t", "\r", "'", '"', "\\", "\\\\", "\\'", "'\\''", "!", "!!", "a!b", "\\!",
    "$HOME", "$0", "${x}", "$(true)", "`true`", "*", "?", "[a]", "{a,b}", "~", "=ls", "^a^b", "#", "%1", "%b", "%",
    "\\0041", "\\n", "-", "--", ";", "&", "|", "<", ">", "(", ")", "é", "漢字", "\x7f", "\x1b[0m", "x" * 5000, PUT,
]  # fmt: skip
DUMP = "import json, os, sys; print(json.dumps([os.fsencode(w).hex() for w in sys.argv[1:]]), sys.stdin.read(), sep='')"


def installed(shell: str) -> str:
    found = shutil.which(shell)
    if found is None:
        pytest.skip(f"{shell} is not installed here")
    return found


def read(shell: str, words: list[str], home: Path) -> tuple[list[str], str]:
    """What a command gets as arguments and as input when ``shell`` is the login shell."""
    line = for_any_shell([sys.executable, "-I", "-c", DUMP, *words])
    done = subprocess.run(
        [installed(shell), "-c", line], input=b"input", capture_output=True, check=True, env={"HOME": str(home)},
        cwd=home,
    )  # fmt: skip
    assert done.stderr == b""
    hexed, _, rest = done.stdout.decode().partition("]")
    return [bytes.fromhex(word).decode() for word in json.loads(hexed + "]")], rest.strip()


@pytest.mark.parametrize("shell", SHELLS)
def test_every_shell_hands_on_exactly_these_words(shell: str, tmp_path: Path) -> None:
    assert read(shell, NASTY, tmp_path) == (NASTY, "input")


@pytest.mark.parametrize("shell", SHELLS)
def test_the_exit_status_is_the_commands(shell: str) -> None:
    for argv, status in ((["sh", "-c", "exit 7"], 7), (["/nowhere/x"], 127)):
        assert subprocess.run([installed(shell), "-c", for_any_shell(argv)], capture_output=True).returncode == status


@given(st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))))
def test_no_character_is_left_that_shells_read_in_different_ways(words: list[str]) -> None:
    line = for_any_shell(["x", *words])
    quoted = line.removeprefix("exec /bin/sh -c ").split("'")
    assert len(quoted) == 5  # two words in single quotes, and nothing in them ends them
    assert all(" " <= char <= "~" and char != "!" for char in line)
    assert "\\\\" not in line  # fish makes one of them
    assert not line.rstrip("'").endswith("\\")


def test_bytes_that_are_no_utf_8_arrive_as_they_are() -> None:
    line = for_any_shell(["printf", "%s", "\udcff"])
    assert subprocess.run(["sh", "-c", line], capture_output=True, check=True).stdout == b"\xff"
