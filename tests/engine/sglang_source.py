"""SGLang's pinned sources, unpacked."""

from __future__ import annotations

import os
import tempfile
import zipfile
from pathlib import Path


def pinned() -> Path:
    """A folder that holds the package ``sglang`` in the pinned version, for sys.path or to read files.

    ``DDTREE_SGLANG_SRC`` names one; else the pinned wheel is fetched and unpacked once into the cache.
    """
    if given := os.environ.get("DDTREE_SGLANG_SRC"):
        folder = Path(given)
        assert (folder / "sglang" / "srt").is_dir(), f"DDTREE_SGLANG_SRC={given} holds no sglang package"
        return folder
    from ddtree_ops.bundle.wheel import SGLANG_VERSION, fetch_wheel
    from ddtree_ops.data import cache_dir

    folder = cache_dir() / "src" / f"sglang-{SGLANG_VERSION}"
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as work:
            unpacked = Path(work) / "sglang"
            with zipfile.ZipFile(fetch_wheel()) as wheel:
                wheel.extractall(unpacked)
            try:
                unpacked.rename(folder)
            except OSError:  # another test process was first
                assert folder.is_dir()
    return folder
