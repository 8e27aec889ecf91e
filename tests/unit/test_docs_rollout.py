"""The table of faults names tests; each of them must exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs/rollout.md").read_text()
TABLE = TEXT.split("## Faults\n")[1]
NAMED = re.findall(r"\| (unit: )?(test_\w+)(?:::(test_\w+))? \|$", TABLE, re.M)


@pytest.mark.parametrize(("unit", "file", "test"), NAMED)
def test_every_test_that_the_table_names_exists(unit: str, file: str, test: str) -> None:
    path = ROOT / "tests" / ("unit" if unit else "lab") / f"{file}.py"
    assert path.is_file()
    assert not test or f"def {test}(" in path.read_text()


def test_every_row_names_a_test() -> None:
    rows = [line for line in TABLE.splitlines() if line.startswith("| ")][2:]
    bare = [row for row in rows if "test_" not in row and not row.rstrip().endswith("| same |")]
    assert rows
    assert bare == []
