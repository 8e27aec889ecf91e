"""The engine as hosts run it, for this Python: SGLang 0.5.17 with the patch series, and the plugin's entry point.

A folder that stands first on PYTHONPATH. The installed SGLang is only read: unpatched files are linked, or copied where
that is not possible. Standard library only.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import tomllib
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]
SERIES = "sglang-0.5.17"
GROUP = "sglang.srt.plugins"


class OverlayError(Exception):
    """There is no SGLang to build on, or another one; the message says what to do."""


def patches() -> ModuleType:
    """ddtree_ops' own way to apply a series, without the rest of the package, whose libraries a GPU host may lack."""
    path = ROOT / "ddtree_ops" / "bundle" / "patches.py"
    spec = importlib.util.spec_from_file_location("ddtree_series", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def installed() -> Path:
    """The folder of the package ``sglang`` of this Python, found without importing it."""
    spec = importlib.util.find_spec("sglang")
    places = list(spec.submodule_search_locations or []) if spec else []
    if not places:
        raise OverlayError("this Python has no sglang: run with the interpreter that SGLang 0.5.17 is installed for")
    return Path(places[0])


def build(site: Path, package: Path | None = None) -> list[str]:
    """Make ``site`` anew; returns the patches applied. Raises OverlayError where SGLang is not as it was published."""
    module = patches()
    source = package or installed()
    folder = ROOT / "patches" / SERIES
    series, base = module.read_series(folder), module.read_base(folder)

    def content(path: str) -> bytes:
        return (source.parent / path).read_bytes()

    try:
        patched = module.apply_series(series, base, content)
    except (OSError, module.RefusedError) as error:
        raise OverlayError(f"{error}; {source} must be SGLang 0.5.17 as published, unpatched") from error
    shutil.rmtree(site, ignore_errors=True)
    mine = {str((source.parent / path).resolve()) for path in patched}

    def leave_out(where: str, names: list[str]) -> list[str]:
        return [name for name in names if str((Path(where) / name).resolve()) in mine]

    shutil.copytree(source, site / "sglang", ignore=leave_out, copy_function=link)
    for path, data in patched.items():
        (site / path).write_bytes(data)
    register(site)
    return [patch.name for patch in series]


def link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def register(site: Path) -> None:
    """The metadata by which SGLang finds the plugin."""
    project = tomllib.loads((ROOT / "patches/sglang-ddtree/pyproject.toml").read_text())["project"]
    info = site / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    points = "".join(f"{name} = {target}\n" for name, target in project["entry-points"][GROUP].items())
    (info / "entry_points.txt").write_text(f"[{GROUP}]\n{points}")
