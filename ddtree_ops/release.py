"""A release: one engine, one set of settings, one rendered unit; one digest that names it everywhere.

The digest is carried in the unit itself (``--weight-version``), so that a running server says which release it is. It
is therefore taken over the unit rendered with a placeholder, and the unit is rendered again with the digest in it.
"""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Mapping
from typing import Any, Protocol

from pydantic import Field

from ddtree_ops.model import Frozen, HostSpec, Settings
from ddtree_ops.render import RELEASE_PLACEHOLDER

FORMAT = 1
SHORT = 12


class RenderUnit(Protocol):
    """How a unit's text is made; ``render.render_target`` in earnest."""

    def __call__(
        self, host: HostSpec, settings: Settings, *, release: str, engine_dir: str, systemd_version: int
    ) -> str: ...


class FileRecord(Frozen):
    """One file of a release: what it must hash to."""

    sha256: str
    size: int


class Manifest(Frozen):
    """``manifest.json`` of a release: enough to verify every other file and to find its engine."""

    format: int = FORMAT
    release: str
    instance: str
    engine: str
    files: dict[str, FileRecord] = Field(default_factory=dict)


class Release(Frozen):
    """A release as it lies on a host, byte for byte."""

    id: str
    engine: str
    settings: Settings
    unit: str

    @property
    def instance(self) -> str:
        return self.settings.instance

    @property
    def short(self) -> str:
        return short(self.id)

    def files(self) -> dict[str, bytes]:
        """Every file of the release directory, manifest included."""
        content = {"unit": self.unit.encode(), "settings.json": canonical(self.settings.model_dump(mode="json"))}
        manifest = Manifest(
            release=self.id,
            instance=self.instance,
            engine=self.engine,
            files={name: FileRecord(sha256=sha256(data), size=len(data)) for name, data in sorted(content.items())},
        )
        return {**content, "manifest.json": canonical(manifest.model_dump(mode="json"))}


def short(digest: str | None) -> str:
    """A digest as a person reads it."""
    return digest[:SHORT] if digest else "-"


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def canonical(value: Mapping[str, Any]) -> bytes:
    """JSON that is the same bytes for the same value: sorted keys, no spaces, UTF-8, one newline at the end."""
    return (json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False) + "\n").encode()


def engine_dir(root: str, engine: str) -> str:
    return f"{root}/engines/{engine}"


def release_dir(root: str, instance: str, release: str) -> str:
    return f"{root}/instances/{instance}/releases/{release}"


def make_release(
    settings: Settings, engine: str, host: HostSpec, *, systemd_version: int, render: RenderUnit
) -> Release:
    """The release that ``settings`` and ``engine`` make on ``host``. Pure: equal arguments give equal bytes."""

    def unit(release: str) -> str:
        place = engine_dir(host.root, engine)
        return render(host, settings, release=release, engine_dir=place, systemd_version=systemd_version)

    named = {
        "format": FORMAT,
        "engine": engine,
        "settings": settings.model_dump(mode="json"),
        "unit": unit(RELEASE_PLACEHOLDER),
    }
    digest = sha256(canonical(named))
    return Release(id=digest, engine=engine, settings=settings, unit=unit(digest))


def pack(release: Release) -> bytes:
    """The release as a tar stream, the same bytes every time."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, data in sorted(release.files().items()):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            member.mode = 0o644
            tar.addfile(member, io.BytesIO(data))
    return buffer.getvalue()
