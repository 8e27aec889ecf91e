"""The self-test pair as it is sent to hosts: one tar of weights, configurations, tokenizer and prompts."""

from __future__ import annotations

import hashlib
import io
import tarfile
from dataclasses import dataclass
from pathlib import Path

from ddtree_ops.data import data_dir

PATTERNS = ("prompts.json", "target/*", "drafter/*")


@dataclass(frozen=True)
class PackedPair:
    """The tar and the name that its contents give it."""

    data: bytes
    digest: str


def packed(folder: Path | None = None) -> PackedPair:
    """The same bytes on every machine: nothing of this one's clock or users is in them."""
    root = folder or data_dir("patches") / "selftest-pair"
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for path in sorted(found for pattern in PATTERNS for found in root.glob(pattern)):
            info = tarfile.TarInfo(path.relative_to(root).as_posix())
            info.size = path.stat().st_size
            with path.open("rb") as handle:
                tar.addfile(info, handle)
    data = stream.getvalue()
    return PackedPair(data, hashlib.sha256(data).hexdigest()[:16])
