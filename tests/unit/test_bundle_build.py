from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from typer.testing import CliRunner

from ddtree_ops.bundle import build as build_module
from ddtree_ops.bundle.build import Bundle, build_bundle, read_archive, write_archive
from ddtree_ops.bundle.manifest import EngineManifest
from ddtree_ops.cli.app import build_app
from ddtree_ops.errors import RefusedError, UsageError

BASE = b"one\ntwo\nthree\n"
PATCHED = b"one\n2\nthree\n"
PATCH = """Subject: Count in digits

Defect: words.
---
--- a/sglang/srt/count.py
+++ b/sglang/srt/count.py
@@ -1,3 +1,3 @@
 one
-two
+2
 three
"""


@pytest.fixture
def patches(tmp_path: Path) -> Path:
    """A patches folder as in the repository, small."""
    series = tmp_path / "patches/sglang-0.5.17"
    plugin = tmp_path / "patches/sglang-ddtree"
    (plugin / "src/sglang_ddtree/__pycache__").mkdir(parents=True)
    (plugin / "src/sglang_ddtree/__init__.py").write_text("VERSION = 1\n")
    (plugin / "src/sglang_ddtree/plugin.py").write_text("def register(): ...\n")
    (plugin / "src/sglang_ddtree/__pycache__/plugin.cpython-311.pyc").write_bytes(b"machine code")
    (plugin / "pyproject.toml").write_text(
        '[project]\nname = "sglang-ddtree"\nversion = "0.1.0"\n'
        '[project.entry-points."sglang.srt.plugins"]\nddtree = "sglang_ddtree.plugin:register"\n'
    )
    series.mkdir(parents=True)
    (series / "series").write_text("0001-count.patch\n")
    (series / "0001-count.patch").write_text(PATCH)
    (series / "base.sha256").write_text(f"{hashlib.sha256(BASE).hexdigest()}  sglang/srt/count.py\n")
    return tmp_path / "patches"


@pytest.fixture(autouse=True)
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "sglang.whl"
    with zipfile.ZipFile(path, "w") as made:
        made.writestr("sglang/srt/count.py", BASE)
        made.writestr("sglang/srt/other.py", b"pass\n")
    monkeypatch.setattr(build_module, "fetch_wheel", lambda given, **_: given or path)
    return path


def test_bundle_has_patched_and_new_files_only(patches: Path, tmp_path: Path) -> None:
    bundle = build_bundle(patches=patches, cache=tmp_path / "cache")
    manifest = bundle.manifest
    assert list(manifest.patched) == ["sglang/srt/count.py"]
    assert bundle.blob(manifest.patched["sglang/srt/count.py"].sha256) == PATCHED
    assert manifest.base == {"sglang/srt/count.py": hashlib.sha256(BASE).hexdigest()}
    assert list(manifest.new) == [
        "sglang_ddtree-0.1.0.dist-info/METADATA",
        "sglang_ddtree-0.1.0.dist-info/entry_points.txt",
        "sglang_ddtree/__init__.py",
        "sglang_ddtree/plugin.py",
    ]
    assert manifest.patches[0].subject == "Count in digits"
    assert (tmp_path / "cache/bundles" / f"{bundle.digest}.json").read_bytes() == manifest.canonical()


def test_same_inputs_same_digest_and_bytes(patches: Path, tmp_path: Path) -> None:
    first = build_bundle(patches=patches, cache=tmp_path / "one")
    second = build_bundle(patches=patches, cache=tmp_path / "two")
    assert first.digest == second.digest
    assert first.pack() == second.pack()
    write_archive(first, tmp_path / "a.tar")
    write_archive(second, tmp_path / "b.tar")
    assert (tmp_path / "a.tar").read_bytes() == (tmp_path / "b.tar").read_bytes()


@pytest.mark.parametrize("what", ["sglang-ddtree/src/sglang_ddtree/plugin.py", "sglang-0.5.17/0001-count.patch"])
def test_any_change_is_another_engine(patches: Path, tmp_path: Path, what: str) -> None:
    before = build_bundle(patches=patches, cache=tmp_path / "cache").digest
    file = patches / what
    file.write_text(file.read_text().replace("+2\n", "+II\n").replace("...", "pass"))
    assert build_bundle(patches=patches, cache=tmp_path / "cache").digest != before


def test_manifest_round_trip(patches: Path, tmp_path: Path) -> None:
    manifest = build_bundle(patches=patches, cache=tmp_path / "cache").manifest
    assert EngineManifest.model_validate_json(manifest.canonical()) == manifest


def test_entry_point_is_found_on_pythonpath(patches: Path, tmp_path: Path) -> None:
    bundle = build_bundle(patches=patches, cache=tmp_path / "cache")
    for path, file in bundle.manifest.new.items():
        (tmp_path / "overlay" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "overlay" / path).write_bytes(bundle.blob(file.sha256))
    program = (
        "from importlib.metadata import entry_points, version\n"
        "print([(e.name, e.value) for e in entry_points(group='sglang.srt.plugins')], version('sglang-ddtree'))"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", program],
        env={"PYTHONPATH": str(tmp_path / "overlay")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "[('ddtree', 'sglang_ddtree.plugin:register')] 0.1.0"


def test_archive_round_trip_and_damage(patches: Path, tmp_path: Path) -> None:
    bundle = build_bundle(patches=patches, cache=tmp_path / "cache")
    archive = tmp_path / "engine.tar"
    write_archive(bundle, archive)
    again = read_archive(archive, cache=tmp_path / "elsewhere")
    assert again.digest == bundle.digest
    assert again.pack() == bundle.pack()
    data = archive.read_bytes()
    archive.write_bytes(data.replace(b"one\n2\n", b"one\n3\n"))
    with pytest.raises(RefusedError, match="damaged or incomplete"):
        read_archive(archive, cache=tmp_path / "third")
    archive.write_bytes(data[:700])
    with pytest.raises(UsageError, match="is not an engine bundle"):
        read_archive(archive)
    with pytest.raises(UsageError, match="no such bundle"):
        read_archive(tmp_path / "absent.tar")


def test_pack_takes_only_what_is_wanted(patches: Path, tmp_path: Path) -> None:
    bundle = build_bundle(patches=patches, cache=tmp_path / "cache")
    wanted = bundle.manifest.patched["sglang/srt/count.py"].sha256
    (tmp_path / "t.tar").write_bytes(bundle.pack([wanted, wanted]))
    with tarfile.open(tmp_path / "t.tar") as tar:
        assert tar.getnames() == [wanted]


def test_a_rotten_blob_is_never_sent(patches: Path, tmp_path: Path) -> None:
    bundle: Bundle = build_bundle(patches=patches, cache=tmp_path / "cache")
    sha256 = bundle.manifest.patched["sglang/srt/count.py"].sha256
    (bundle.blobs / sha256).write_bytes(b"one\n2")
    with pytest.raises(RefusedError, match="is damaged"):
        bundle.pack()
    assert build_bundle(patches=patches, cache=tmp_path / "cache").pack(), "building again mends the cache"


def test_plugin_without_entry_point_is_refused(patches: Path, tmp_path: Path) -> None:
    (patches / "sglang-ddtree/pyproject.toml").write_text('[project]\nname = "x"\nversion = "1"\n')
    with pytest.raises(RefusedError, match="no entry point"):
        build_bundle(patches=patches, cache=tmp_path / "cache")
    (patches / "sglang-ddtree/pyproject.toml").unlink()
    with pytest.raises(RefusedError, match="no entry point"):
        build_bundle(patches=patches, cache=tmp_path / "cache")


@pytest.mark.parametrize("path", ["/etc/passwd", "../x", "a/../b", "a/..", "./a", "a\\b", "", "a\nb"])
def test_manifest_takes_no_path_that_leaves_the_overlay(patches: Path, tmp_path: Path, path: str) -> None:
    value = json.loads(build_bundle(patches=patches, cache=tmp_path / "cache").manifest.canonical())
    value["new"][path] = {"sha256": "0" * 64, "size": 1}
    with pytest.raises(ValidationError):
        EngineManifest.model_validate_json(json.dumps(value))


# -- the command ------------------------------------------------------------------------------------------------------


def bundle_command(*args: str) -> Any:
    return CliRunner().invoke(build_app(), ["bundle", *args], prog_name="ddtree-ops")


@pytest.fixture
def shipped(patches: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The small patches in place of the shipped ones, and a cache of its own."""
    monkeypatch.setattr(build_module, "data_dir", lambda _: patches)
    monkeypatch.setenv("DDTREE_OPS_CACHE", str(tmp_path / "cache"))


@pytest.mark.usefixtures("shipped")
def test_command_builds_writes_and_shows_the_same_engine(patches: Path, tmp_path: Path) -> None:
    digest = build_bundle(patches=patches, cache=tmp_path / "cache").digest
    archive = str(tmp_path / "engine.tar")
    built = bundle_command("--output", archive)
    assert built.exit_code == 0, built.output
    assert f"engine {digest}" in built.output
    assert "0001-count.patch: Count in digits" in built.output
    shown = json.loads(bundle_command("--inspect", archive, "--json").stdout)
    assert shown["digest"] == digest
    assert list(shown["patched"]) == ["sglang/srt/count.py"]


@pytest.mark.usefixtures("shipped")
def test_command_says_what_to_do_about_a_bad_file(tmp_path: Path) -> None:
    (tmp_path / "x.tar").write_bytes(b"not a tar")
    shown = bundle_command("--inspect", str(tmp_path / "x.tar"))
    assert shown.exit_code == 2
    assert "is not an engine bundle" in shown.output
    assert "ddtree-ops bundle --output FILE" in shown.output
