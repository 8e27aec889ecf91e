"""What a bundle says about itself. The same bytes on every machine; its digest names the engine everywhere."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from ddtree_ops.model import Frozen

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


def _inside(path: str) -> str:
    """A path that stays inside the overlay, spelt in its one canonical way."""
    if not re.fullmatch(r"[\w.+-]+(/[\w.+-]+)*", path, re.ASCII) or {".", ".."} & set(path.split("/")):
        raise ValueError(f"{path!r} is not a plain relative path")
    return path


RelativePath = Annotated[str, AfterValidator(_inside)]


class PatchRecord(Frozen):
    """One patch that was applied."""

    name: str
    subject: str
    sha256: Sha256


class EngineFile(Frozen):
    """A file of the overlay that does not come from the host's SGLang."""

    sha256: Sha256
    size: Annotated[int, Field(ge=0)]


class EngineManifest(Frozen):
    """``manifest.json`` of an engine. Paths are relative to its ``site/``, which is laid out like site-packages.

    base: the files of SGLang that the series touches, as they must be on a host before.
    patched: the same files after the series.  new: the plugin and its metadata.
    """

    format: Literal[1] = 1
    sglang: str
    patches: tuple[PatchRecord, ...]
    base: dict[RelativePath, Sha256]
    patched: dict[RelativePath, EngineFile]
    new: dict[RelativePath, EngineFile]

    def canonical(self) -> bytes:
        """The bytes that are hashed, stored and sent: sorted keys, no spaces, one newline."""
        value = self.model_dump(mode="json")
        return (json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False) + "\n").encode()

    @property
    def digest(self) -> str:
        """The engine's name."""
        return hashlib.sha256(self.canonical()).hexdigest()

    @property
    def files(self) -> dict[str, EngineFile]:
        """Everything that travels, by path."""
        return {**self.patched, **self.new}
