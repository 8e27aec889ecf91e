"""Build the engine bundle: pinned wheel, patch series and plugin in; files named by hash and a manifest out."""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ddtree_ops.bundle.manifest import EngineFile, EngineManifest, PatchRecord
from ddtree_ops.bundle.patches import apply_series, read_base, read_series
from ddtree_ops.bundle.wheel import SGLANG_VERSION, fetch_wheel
from ddtree_ops.data import cache_dir, data_dir
from ddtree_ops.errors import RefusedError, UsageError

ENTRY_POINT_GROUP = "sglang.srt.plugins"


@dataclass(frozen=True)
class Bundle:
    """A built engine: its manifest and the folder that holds its files by sha256."""

    manifest: EngineManifest
    blobs: Path

    @property
    def digest(self) -> str:
        return self.manifest.digest

    def blob(self, sha256: str) -> bytes:
        """The content named ``sha256``, checked."""
        try:
            data = (self.blobs / sha256).read_bytes()
        except FileNotFoundError:
            data = b""
        if hashlib.sha256(data).hexdigest() != sha256:
            raise RefusedError(
                f"{sha256[:12]} in {self.blobs} is damaged",
                why="an engine is sent whole or not at all",
                next="ddtree-ops bundle",
            )
        return data

    def pack(self, wanted: Iterable[str] | None = None) -> bytes:
        """A tar of the wanted contents, named by hash: the same bytes every time."""
        names = sorted({file.sha256 for file in self.manifest.files.values()} if wanted is None else set(wanted))
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
            for name in names:
                _add(tar, name, self.blob(name))
        return buffer.getvalue()


def build_bundle(wheel: Path | None = None, *, patches: Path | None = None, cache: Path | None = None) -> Bundle:
    """The engine of this ddtree-ops, built into the cache; nothing is fetched when the cache has the wheel."""
    folder = patches or data_dir("patches")
    store = cache or cache_dir()
    series_dir = folder / f"sglang-{SGLANG_VERSION}"
    series = read_series(series_dir)
    base = read_base(series_dir)
    with zipfile.ZipFile(fetch_wheel(wheel, cache=store)) as source:
        patched = apply_series(series, base, source.read)
    new = plugin_files(folder / "sglang-ddtree")
    manifest = EngineManifest(
        sglang=SGLANG_VERSION,
        patches=tuple(PatchRecord(name=p.name, subject=p.subject, sha256=p.sha256) for p in series),
        base=base,
        patched=_records(patched),
        new=_records(new),
    )
    blobs = store / "blobs"
    for data in (*patched.values(), *new.values()):
        put(blobs / hashlib.sha256(data).hexdigest(), data)
    put(store / "bundles" / f"{manifest.digest}.json", manifest.canonical())
    return Bundle(manifest, blobs)


def plugin_files(plugin: Path) -> dict[str, bytes]:
    """The plugin's modules and the dist-info that lets SGLang find its entry point on PYTHONPATH."""
    described = plugin / "pyproject.toml"
    project = tomllib.loads(described.read_text("utf-8"))["project"] if described.is_file() else {}
    source = plugin / "src"
    found = {
        path.relative_to(source).as_posix(): path.read_bytes()
        for path in sorted(source.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts and not path.name.endswith((".pyc", ".orig"))
    }
    points = project.get("entry-points", {}).get(ENTRY_POINT_GROUP, {})
    if not found or not points:
        raise RefusedError(
            f"{plugin} has no modules or no entry point in {ENTRY_POINT_GROUP}",
            why="SGLang would start without it and know no tree mode",
            next="reinstall ddtree-ops",
        )
    info = f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    lines = [f"[{ENTRY_POINT_GROUP}]", *(f"{name} = {target}" for name, target in sorted(points.items()))]
    found[f"{info}/METADATA"] = metadata.encode()
    found[f"{info}/entry_points.txt"] = ("\n".join(lines) + "\n").encode()
    return found


def write_archive(bundle: Bundle, path: Path) -> None:
    """The bundle as one tar: ``manifest.json`` and ``blobs/<sha256>``; equal bundles give equal bytes."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        _add(tar, "manifest.json", bundle.manifest.canonical())
        for name in sorted({file.sha256 for file in bundle.manifest.files.values()}):
            _add(tar, f"blobs/{name}", bundle.blob(name))
    put(path, buffer.getvalue(), replace=True)


def read_archive(path: Path, *, cache: Path | None = None) -> Bundle:
    """A bundle that ``write_archive`` wrote, every content checked, taken into the cache."""
    try:
        with tarfile.open(path, mode="r:") as tar:
            content = {member.name: _read(tar, member) for member in tar.getmembers()}
        manifest = EngineManifest.model_validate_json(content.pop("manifest.json"))
    except FileNotFoundError:
        raise UsageError(f"no such bundle: {path}", next="ddtree-ops bundle --output FILE") from None
    except (tarfile.TarError, KeyError, ValueError) as bad:
        raise UsageError(f"{path} is not an engine bundle: {bad}", next="ddtree-ops bundle --output FILE") from bad
    wanted = {file.sha256 for file in manifest.files.values()}
    sound = {name for name, data in content.items() if name == f"blobs/{hashlib.sha256(data).hexdigest()}"}
    if {f"blobs/{name}" for name in wanted} != set(content) or sound != set(content):
        raise RefusedError(
            f"{path} is damaged or incomplete",
            why="an engine is used whole or not at all",
            next="ddtree-ops bundle --output FILE",
        )
    blobs = (cache or cache_dir()) / "blobs"
    for name, data in content.items():
        put(blobs / name.removeprefix("blobs/"), data)
    return Bundle(manifest, blobs)


def put(path: Path, data: bytes, *, replace: bool = False) -> None:
    """Write a file whole: beside its place, then renamed. One that is named by its content is left when it is there."""
    if not replace and path.is_file() and path.stat().st_size == len(data) and path.read_bytes() == data:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        Path(temporary).chmod(0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _records(files: Mapping[str, bytes]) -> dict[str, EngineFile]:
    return {
        path: EngineFile(sha256=hashlib.sha256(data).hexdigest(), size=len(data))
        for path, data in sorted(files.items())
    }


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    member.mode = 0o644
    tar.addfile(member, io.BytesIO(data))


def _read(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = tar.extractfile(member)
    if file is None:
        raise ValueError(f"{member.name} is not a file")
    return file.read()
