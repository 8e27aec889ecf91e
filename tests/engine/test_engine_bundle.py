"""The real engine: built from the published wheel, staged over it, imported by Python."""

from __future__ import annotations

import ast
import io
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from ddtree_ops.bundle import build_bundle, fetch_wheel
from ddtree_ops.data import data_dir
from ddtree_ops.hostside import engine
from ddtree_ops.hostside.context import Context


@pytest.mark.skipif(
    not (data_dir("patches") / "sglang-ddtree/pyproject.toml").exists(), reason="there is no plugin to bundle"
)
def test_real_engine_over_the_published_wheel(tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    site = next(venv.glob("lib/python3*/site-packages"))
    with zipfile.ZipFile(fetch_wheel()) as wheel:
        wheel.extractall(site)
    bundle = build_bundle()
    args = {"manifest": bundle.manifest.model_dump(mode="json"), "venv": str(venv)}
    root = {"root": str(tmp_path / "root")}
    asked = engine.engine_missing(Context(root, io.BytesIO(), io.BytesIO()), args)
    payload = io.BytesIO(bundle.pack(asked["blobs"]))
    done = engine.stage_engine(Context(root, payload, io.BytesIO()), args)
    overlay = tmp_path / "root/engines" / bundle.digest / "site"
    count = sum(1 for path in (site / "sglang").rglob("*") if path.is_file())
    assert done["linked"] == count - len(bundle.manifest.patched)
    for path in bundle.manifest.patched:
        ast.parse((overlay / path).read_text())
    program = (
        "import importlib.util as u; from importlib.metadata import entry_points;"
        "print(u.find_spec('sglang').origin, [e.name for e in entry_points(group='sglang.srt.plugins')])"
    )
    shown = subprocess.run(
        [venv / "bin/python", "-c", program],
        env={"PYTHONPATH": str(overlay)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert shown.stdout.split(None, 1) == [str(overlay / "sglang/__init__.py"), "['ddtree']\n"]
