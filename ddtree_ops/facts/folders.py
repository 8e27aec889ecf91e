"""Model folders and cache folders. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ddtree_ops.facts.answer import listing, mapping

NOT_LOADED = ("mtp",)
"""Parts of a checkpoint that a target does not load."""
VISION = ("visual", "model.visual", "vision_tower", "model.vision_tower")
VOLATILE = ("tmpfs", "ramfs", "overlay")


@dataclass(frozen=True)
class ModelFolder:
    """A model on a host: its configuration's text, its weights in bytes by the first parts of their names."""

    exists: bool = False
    readable: bool = False
    config: str = ""
    missing: tuple[str, ...] = ()
    damaged: tuple[str, ...] = ()
    files: int = 0
    parts: Mapping[str, int] = field(default_factory=dict)

    def weights(self, *, vision: bool) -> int:
        """Bytes that are loaded; the vision tower only by the classes that have one."""
        skipped = NOT_LOADED + (() if vision else VISION)
        return sum(
            size for part, size in self.parts.items() if not any(part == s or part.startswith(f"{s}.") for s in skipped)
        )


def parse_model_folder(raw: Any) -> ModelFolder:
    """The helper's answer about one model folder."""
    found = mapping(raw)
    files = mapping(found.get("files"))
    parts = {
        str(part): sum(size for size in mapping(dtypes).values() if isinstance(size, int))
        for part, dtypes in mapping(found.get("weights")).items()
    }
    return ModelFolder(
        exists=bool(found.get("exists")),
        readable=bool(found.get("readable")),
        config=str(found.get("config") or ""),
        missing=tuple(str(name) for name in listing(found.get("index")) if str(name) not in files),
        damaged=tuple(str(name) for name in listing(found.get("damaged"))),
        files=len(files),
        parts=parts,
    )


@dataclass(frozen=True)
class CacheFolder:
    """Where a cache lies (or will): the mount and its file system's type."""

    mount: str = ""
    type: str = ""

    @property
    def lasts(self) -> bool:
        """Whether what is compiled there survives a reboot."""
        return self.type not in VOLATILE
