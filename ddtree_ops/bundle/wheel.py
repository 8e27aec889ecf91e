"""The SGLang wheel, pinned by version and sha256.

SGLang publishes one wheel for each CPython tag and architecture. They differ in three native modules and their own
metadata; every other file is equal, so any of them gives the same bundle. All are pinned.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from ddtree_ops.data import cache_dir
from ddtree_ops.errors import RefusedError, UsageError

SGLANG_VERSION = "0.5.17"
DEFAULT_TAG = "cp311-x86_64"

PINS = {
    "cp310-x86_64": "14f5aed92a0243e0bf5b1e0cc2617295bc21f56687feb2c01a7a8eb768160340",
    "cp311-x86_64": "575e38f5683624ded3b4bb267f637a098e5ed37d13a1d1ff5ea09bd781a04d16",
    "cp312-x86_64": "fb4cba478a5dca5ee146550b39f33add1c4e475d21ee11810b86ed1c58068093",
    "cp313-x86_64": "b4cec115215aaf355f1ca94122ea0d00318f19f9d9d59846fdb674203efd1f94",
    "cp310-aarch64": "576a689c90e604daf79871233f3a2c9fcbec45cffc9aa8ef6f62308bf2775065",
    "cp311-aarch64": "dc67b73978d57eac1a41a41b594c41b0426845a14636546127fa4a99d902f4a0",
    "cp312-aarch64": "49b3cfa5b998c2ce0962c3da01e8f5e147c610cf7b0d4f8c294c97346c82b202",
    "cp313-aarch64": "0239754488a8af898e68df0864ed6d10e9142fede70256d473897578b72e850e",
}
"""The sha256 of each published wheel of ``SGLANG_VERSION``, by CPython tag and architecture."""

Run = Callable[[Sequence[str]], "subprocess.CompletedProcess[str]"]


def wheel_name(tag: str) -> str:
    """The file name under which SGLang publishes its wheel for ``tag``."""
    cpython, arch = tag.split("-", 1)
    return f"sglang-{SGLANG_VERSION}-{cpython}-{cpython}-manylinux_2_34_{arch}.whl"


def fetch_wheel(
    given: Path | None = None, *, tag: str | None = None, cache: Path | None = None, run: Run | None = None
) -> Path:
    """A verified SGLang wheel: ``given``, else from the cache, else through ``pip download``.

    Without ``tag`` any pinned wheel of the cache will do, since their Python sources are equal.
    Raises RefusedError when what was found is not a pinned wheel or nothing could be fetched.
    """
    if given is not None:
        return _check_given(given, tag)
    if tag is not None and tag not in PINS:
        raise UsageError(
            f"there is no SGLang {SGLANG_VERSION} wheel for {tag}", next=f"choose one of: {', '.join(PINS)}"
        )
    folder = (cache or cache_dir()) / "wheels"
    for candidate in (tag,) if tag else (DEFAULT_TAG, *PINS):
        path = folder / wheel_name(candidate)
        if path.is_file():
            if file_sha256(path) == PINS[candidate]:
                return path
            path.unlink()  # a cache entry that rotted is no reason to stop: fetch it again
    return _download(tag or DEFAULT_TAG, folder, run or _run)


def file_sha256(path: Path) -> str:
    """The sha256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check_given(path: Path, tag: str | None) -> Path:
    if not path.is_file():
        raise UsageError(f"no such wheel: {path}", next=_by_hand(path.parent))
    digest = file_sha256(path)
    wanted = [PINS[tag]] if tag else list(PINS.values())
    if digest not in wanted:
        raise RefusedError(
            f"{path} (sha256 {digest[:16]}…) is not a published wheel of SGLang {SGLANG_VERSION}"
            + (f" for {tag}" if tag else ""),
            why="the patches and the engine's checks are made for exactly those sources",
            next=_by_hand(path.parent),
            data={"sha256": digest},
        )
    return path


def _download(tag: str, folder: Path, run: Run) -> Path:
    """Let pip fetch the wheel (its own index and proxy settings apply), checked by hash, renamed into the cache."""
    cpython, arch = tag.split("-", 1)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".fetch-") as work:
        pins = Path(work) / "pins.txt"
        pins.write_text(f"sglang=={SGLANG_VERSION} --hash=sha256:{PINS[tag]}\n")
        argv = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        argv += ["--implementation=cp", f"--python-version={cpython[2:]}", f"--abi={cpython}"]
        argv += [f"--platform=manylinux_2_34_{arch}", "--require-hashes", f"--requirement={pins}", f"--dest={work}"]
        done = run(argv)
        fetched = Path(work) / wheel_name(tag)
        if done.returncode != 0 or not fetched.is_file() or file_sha256(fetched) != PINS[tag]:
            lines = [line for line in done.stderr.splitlines() if re.match(r"ERROR|.*No module named pip", line)]
            raise RefusedError(
                f"pip could not fetch {wheel_name(tag)}: " + " ".join((lines or ["no reason given"])[-1].split())[:300],
                why="the engine bundle is built from SGLang's own sources",
                next=_by_hand(Path.cwd()),
            )
        target = folder / fetched.name
        os.replace(fetched, target)
    return target


def _by_hand(folder: Path) -> str:
    return (
        f"on a machine with a package index: pip download --no-deps sglang=={SGLANG_VERSION}; "
        f"then: ddtree-ops bundle --wheel {folder / wheel_name(DEFAULT_TAG)}"
    )


def _run(argv: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, capture_output=True, text=True, check=False, timeout=900)
