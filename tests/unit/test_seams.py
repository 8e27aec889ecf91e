"""The seams of docs/architecture.md, kept by a test: who may use which library, and who may wait."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "ddtree_ops"
# Programs that run on another machine and have rules of their own.
ELSEWHERE = ("hostside/", "lab/standin/", "lab/guest/")
MAY_USE = {
    "fabric": ("remote/ssh.py",),
    "paramiko": ("remote/",),
    "httpx": ("http.py",),
    "rich": ("ui/", "cli/"),
    "typer": ("cli/",),
    "click": (),
    "torch": (),
    "sglang": (),
}


def sources() -> dict[str, ast.Module]:
    paths = {str(path.relative_to(PACKAGE)): path for path in PACKAGE.rglob("*.py")}
    return {name: ast.parse(path.read_text()) for name, path in paths.items() if not name.startswith(ELSEWHERE)}


def imports(tree: ast.Module) -> set[str]:
    """The packages a module imports when it runs; what only the type checker sees does not count."""
    hidden = {
        node
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and getattr(block.test, "id", "") == "TYPE_CHECKING"
        for node in ast.walk(block)
    }
    found = set()
    for node in set(ast.walk(tree)) - hidden:
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.add(str(node.module).partition(".")[0])
    return found


@pytest.mark.parametrize("library", MAY_USE)
def test_a_library_is_used_behind_its_seam_only(library: str) -> None:
    users = {name for name, tree in sources().items() if library in imports(tree)}
    assert {name for name in users if not name.startswith(MAY_USE[library])} == set()


def test_only_the_clock_sleeps() -> None:
    sleeping = {
        name
        for name, tree in sources().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("time.sleep", "sleep")
    }
    assert sleeping == {"clock.py"}
