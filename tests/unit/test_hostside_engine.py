"""Staging engines, on a real folder tree and a real (bare) venv; the SGLang in it is three small files."""

from __future__ import annotations

import errno
import hashlib
import io
import os
import signal
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ddtree_ops.bundle.manifest import EngineFile, EngineManifest
from ddtree_ops.hostside import engine, files
from ddtree_ops.hostside.context import Context, Failure

BASE = b"one\ntwo\n"
PATCHED = b"one\n2\n"
PLUGIN = b"def register(): ...\n"


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def record(data: bytes) -> EngineFile:
    return EngineFile(sha256=sha(data), size=len(data))


def manifest(plugin: bytes = PLUGIN) -> EngineManifest:
    return EngineManifest(
        sglang="0.5.17",
        patches=(),
        base={"sglang/srt/count.py": sha(BASE)},
        patched={"sglang/srt/count.py": record(PATCHED)},
        new={"sglang_ddtree/plugin.py": record(plugin), "sglang_ddtree/twin.py": record(plugin)},
    )


def tar(*contents: bytes, names: dict[bytes, str] | None = None) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as out:
        for data in contents:
            member = tarfile.TarInfo((names or {}).get(data, sha(data)))
            member.size = len(data)
            out.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


@pytest.fixture(scope="module")
def bare_venv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("host") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(place)], check=True)
    return place


@pytest.fixture
def venv(bare_venv: Path) -> Iterator[Path]:
    """A venv with SGLang 0.5.17 in it, as pip leaves it."""
    site = next(bare_venv.glob("lib/python3*/site-packages"))
    package = site / "sglang"
    (package / "srt/__pycache__").mkdir(parents=True)
    (package / "__init__.py").write_bytes(b"")
    (package / "srt/count.py").write_bytes(BASE)
    (package / "srt/other.py").write_bytes(b"pass\n")
    (package / "srt/__pycache__/count.cpython-311.pyc").write_bytes(b"compiled count")
    (package / "srt/__pycache__/other.cpython-311.opt-1.pyc").write_bytes(b"compiled other")
    info = site / "sglang-0.5.17.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.17\n")
    yield bare_venv
    for place in site.glob("sglang*"):
        files.remove_entry(str(place))


def package_of(venv: Path) -> Path:
    return next(venv.glob("lib/python3*/site-packages/sglang"))


def snapshot(folder: Path) -> dict[str, Any]:
    """Everything that a write would change: names, contents, modes, times, inodes."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        stat = path.lstat()
        content = path.read_bytes() if path.is_file() and not path.is_symlink() else None
        found[str(path)] = (stat.st_ino, stat.st_mode, stat.st_mtime_ns, content)
    return found


def context(root: Path, payload: bytes = b"") -> Context:
    return Context({"root": str(root), "host": "ct200"}, io.BytesIO(payload), io.BytesIO())


def stage(root: Path, venv: Path, payload: bytes, what: EngineManifest | None = None) -> dict[str, Any]:
    given = {"manifest": (what or manifest()).model_dump(mode="json"), "venv": str(venv)}
    return engine.stage_engine(context(root, payload), given)


def ask(root: Path, venv: Path, what: EngineManifest | None = None) -> dict[str, Any]:
    given = {"manifest": (what or manifest()).model_dump(mode="json"), "venv": str(venv)}
    return engine.engine_missing(context(root), given)


def overlay(root: Path) -> Path:
    return root / "engines" / manifest().digest


def test_digest_is_the_same_on_both_sides() -> None:
    assert engine.checked_manifest(manifest().model_dump(mode="json"))[1] == manifest().digest


def test_overlay_is_links_plus_the_bundle_and_the_venv_is_untouched(venv: Path, tmp_path: Path) -> None:
    before = snapshot(venv)
    done = stage(tmp_path, venv, tar(PATCHED, PLUGIN))
    assert done == {"staged": True, "linked": 2, "copied": 0, "received": 2, "reused": 0}
    assert snapshot(venv) == before
    package, place = package_of(venv), overlay(tmp_path)
    assert (place / "site/sglang/srt/other.py").samefile(package / "srt/other.py")
    assert (place / "site/sglang/srt/count.py").read_bytes() == PATCHED
    assert not (place / "site/sglang/srt/count.py").samefile(package / "srt/count.py")
    assert (
        (place / "site/sglang_ddtree/plugin.py").read_bytes()
        == (place / "site/sglang_ddtree/twin.py").read_bytes()
        == PLUGIN
    )
    assert (place / "manifest.json").read_bytes() == manifest().canonical()
    assert not list(place.rglob("__pycache__")), "a file compiled from the base must not shadow the patched one"
    assert sorted(p.name for p in place.parent.iterdir()) == [place.name]


def test_the_overlay_is_what_python_imports(venv: Path, tmp_path: Path) -> None:
    stage(tmp_path, venv, tar(PATCHED, PLUGIN))
    program = "import sglang, importlib.metadata as m; print(sglang.__file__, m.version('sglang'))"
    done = subprocess.run(
        [venv / "bin/python", "-c", program],
        env={"PYTHONPATH": str(overlay(tmp_path) / "site"), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == [str(overlay(tmp_path) / "site/sglang/__init__.py"), "0.5.17"]


def test_second_time_nothing_travels(venv: Path, tmp_path: Path) -> None:
    assert ask(tmp_path, venv)["blobs"] == sorted([sha(PATCHED), sha(PLUGIN)])
    stage(tmp_path, venv, tar(PATCHED, PLUGIN))
    inode = overlay(tmp_path).stat().st_ino
    assert ask(tmp_path, venv)["staged"] is True
    assert stage(tmp_path, venv, tar())["staged"] is False
    assert overlay(tmp_path).stat().st_ino == inode


def test_next_engine_takes_what_the_last_one_has(venv: Path, tmp_path: Path) -> None:
    stage(tmp_path, venv, tar(PATCHED, PLUGIN))
    newer = manifest(b"def register(): pass\n")
    assert ask(tmp_path, venv, newer)["blobs"] == [sha(b"def register(): pass\n")]
    done = stage(tmp_path, venv, tar(b"def register(): pass\n"), newer)
    assert (done["received"], done["reused"]) == (1, 1)
    assert (tmp_path / "engines" / newer.digest / "site/sglang/srt/count.py").read_bytes() == PATCHED


def test_damaged_engine_is_made_anew(venv: Path, tmp_path: Path) -> None:
    stage(tmp_path, venv, tar(PATCHED, PLUGIN))
    (overlay(tmp_path) / "site/sglang/srt/count.py").write_bytes(b"edited in place\n")
    asked = ask(tmp_path, venv)
    assert (asked["staged"], asked["blobs"]) == (False, [sha(PATCHED)])
    assert stage(tmp_path, venv, tar(PATCHED))["staged"] is True
    assert (overlay(tmp_path) / "site/sglang/srt/count.py").read_bytes() == PATCHED
    assert sorted(p.name for p in (tmp_path / "engines").iterdir()) == [manifest().digest]


# -- hosts that are refused -------------------------------------------------------------------------------------------


def refused(root: Path, venv: Path) -> Failure:
    with pytest.raises(Failure) as caught:
        ask(root, venv)
    with pytest.raises(Failure) as again:
        stage(root, venv, tar(PATCHED, PLUGIN))
    assert str(again.value) == str(caught.value), "the question and the act refuse alike"
    assert caught.value.kind == "RefusedError"
    assert not list((root / "engines").iterdir() if (root / "engines").exists() else [])
    return caught.value


def test_other_version(venv: Path, tmp_path: Path) -> None:
    info = package_of(venv).parent / "sglang-0.5.17.dist-info/METADATA"
    info.write_text(info.read_text().replace("0.5.17", "0.5.16"))
    assert "SGLang 0.5.16 is installed, this engine is made for 0.5.17" in str(refused(tmp_path, venv))


@pytest.mark.parametrize("change", ["edited", "gone"])
def test_touched_files_that_differ_are_listed(venv: Path, tmp_path: Path, change: str) -> None:
    file = package_of(venv) / "srt/count.py"
    file.write_bytes(BASE + b"# mine\n") if change == "edited" else file.unlink()
    failure = refused(tmp_path, venv)
    assert failure.data["files"] == ["sglang/srt/count.py"]
    assert "sglang/srt/count.py" in str(failure)


def test_other_files_may_differ(venv: Path, tmp_path: Path) -> None:
    (package_of(venv) / "srt/other.py").write_text("mine = True\n")
    assert stage(tmp_path, venv, tar(PATCHED, PLUGIN))["staged"]


def test_no_venv_and_no_sglang(venv: Path, tmp_path: Path) -> None:
    assert "there is no venv" in str(refused(tmp_path, tmp_path / "nowhere"))
    for place in package_of(venv).parent.glob("sglang*"):
        files.remove_entry(str(place))
    assert "SGLang is not installed" in str(refused(tmp_path, venv))


def test_broken_python(tmp_path: Path) -> None:
    python = tmp_path / "venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\necho 'libpython is missing' >&2; exit 127\n")
    python.chmod(0o755)
    assert "libpython is missing" in str(refused(tmp_path, tmp_path / "venv"))


def test_same_engine_for_another_python(venv: Path, tmp_path: Path) -> None:
    stage(tmp_path, venv, tar(PATCHED, PLUGIN))
    origin = overlay(tmp_path) / "origin.json"
    origin.write_text(origin.read_text().replace("cpython-3", "cpython-2"))
    with pytest.raises(Failure, match="was staged here for cpython-2"):
        ask(tmp_path, venv)


# -- uploads that are not what they should be -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (tar(PATCHED), "lacks sglang_ddtree/plugin.py"),
        (tar(PATCHED, PLUGIN)[:700], "broke off"),
        (b"", "broke off|lacks"),
        (tar(PATCHED, PLUGIN, b"surprise"), "nobody asked for"),
        (tar(PATCHED, PLUGIN, names={PLUGIN: "../../../etc/cron.d/x"}), "nobody asked for"),
        (tar(PATCHED + b"!", PLUGIN, names={PATCHED + b"!": sha(PATCHED)}), "damaged content"),
    ],
)
def test_bad_upload_leaves_nothing(venv: Path, tmp_path: Path, payload: bytes, reason: str) -> None:
    before = snapshot(venv)
    with pytest.raises(Failure, match=reason):
        stage(tmp_path, venv, payload)
    assert list((tmp_path / "engines").iterdir()) == []
    assert snapshot(venv) == before


@pytest.mark.parametrize("path", ["../x", "/etc/x", "a/../../x", "sglang/../../x"])
def test_manifest_paths_stay_inside(venv: Path, tmp_path: Path, path: str) -> None:
    bad = manifest().model_dump(mode="json")
    bad["new"][path] = bad["new"].pop("sglang_ddtree/plugin.py")
    with pytest.raises(Failure, match="not a plain relative path"):
        engine.stage_engine(context(tmp_path, tar(PATCHED, PLUGIN)), {"manifest": bad, "venv": str(venv)})


# -- hosts that are odd but fine --------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [errno.EXDEV, errno.EPERM])
def test_where_links_cannot_be_made_files_are_copied(
    venv: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def no_link(source: str, goal: str) -> None:
        raise OSError(code, os.strerror(code), source, None, goal)

    monkeypatch.setattr(os, "link", no_link)
    done = stage(tmp_path, venv, tar(PATCHED, PLUGIN))
    assert (done["linked"], done["copied"]) == (0, 2)
    copied = overlay(tmp_path) / "site/sglang/srt/other.py"
    original = package_of(venv) / "srt/other.py"
    assert not copied.samefile(original)
    assert copied.stat().st_mtime_ns == original.stat().st_mtime_ns


def test_a_linked_file_is_copied_and_the_rest_is_linked(venv: Path, tmp_path: Path) -> None:
    other = package_of(venv) / "__init__.py"
    other.rename(tmp_path / "shared.py")
    other.symlink_to(tmp_path / "shared.py")
    done = stage(tmp_path / "root", venv, tar(PATCHED, PLUGIN))
    assert (done["linked"], done["copied"]) == (1, 1)
    assert not (overlay(tmp_path / "root") / "site/sglang/__init__.py").is_symlink()


# -- kill -9 ----------------------------------------------------------------------------------------------------------

CALLS = ("mkdir", "link", "open", "fsync", "rename", "rmdir", "unlink")


def killed_at(root: Path, venv: Path, payload: bytes, at: int) -> bool:
    """Stage in a child that is killed before its ``at``-th change to the disk; whether it was."""
    child = os.fork()
    if child == 0:
        count = 0

        def wrap(call: Any) -> Any:
            def counted(*args: Any, **kwargs: Any) -> Any:
                nonlocal count
                if count == at:
                    os.kill(os.getpid(), signal.SIGKILL)
                count += 1
                return call(*args, **kwargs)

            return counted

        for name in CALLS:
            setattr(os, name, wrap(getattr(os, name)))
        try:
            stage(root, venv, payload)
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


@pytest.mark.parametrize("was_damaged", [False, True])
def test_killed_at_any_step_leaves_a_whole_engine_or_none(
    venv: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, was_damaged: bool
) -> None:
    found = engine.installed_sglang(context(tmp_path), str(venv))
    monkeypatch.setattr(engine, "installed_sglang", lambda *_: found)  # asking Python a hundred times takes long
    before = snapshot(venv)
    plain = manifest().model_dump(mode="json")
    at = 0
    while True:
        root = tmp_path / str(at)
        if was_damaged:
            stage(root, venv, tar(PATCHED, PLUGIN))
            (overlay(root) / "site/sglang_ddtree/plugin.py").unlink()
        killed = killed_at(root, venv, tar(PATCHED, PLUGIN), at)
        left = [p.name for p in (root / "engines").iterdir()] if (root / "engines").exists() else []
        named = [name for name in left if not name.startswith(".")]
        assert named in ([], [manifest().digest])
        if named and not was_damaged:
            assert engine.is_whole(str(overlay(root)), plain), f"half an engine after step {at}"
        assert snapshot(venv) == before
        stage(root, venv, tar(PATCHED, PLUGIN))
        assert engine.is_whole(str(overlay(root)), plain)
        assert [p.name for p in (root / "engines").iterdir()] == [manifest().digest], "leftovers are swept"
        if not killed:
            break
        at += 1
    assert at > 20
