"""Wheels for a host without an index: resolved and fetched on the operator's machine for that host's Python and glibc.

pip does the resolving (its own index and proxy settings apply). What it fetched is written down by sha256, so that the
same question is answered from the cache, without network.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ddtree_ops.bundle.wheel import SGLANG_VERSION, file_sha256
from ddtree_ops.data import cache_dir
from ddtree_ops.errors import RefusedError
from ddtree_ops.model import Frozen

DEFAULT_REQUIREMENTS = (f"sglang=={SGLANG_VERSION}",)
INSTALLER = "pip>=24"
RECORD = "wheelhouse.json"
OLDEST_GLIBC = (2, 17)
CHUNK = 1 << 20

Run = Callable[[Sequence[str]], "subprocess.CompletedProcess[str]"]


@dataclass(frozen=True)
class Platform:
    """What wheels must fit: CPython ``3.11``, glibc ``(2, 36)``, ``x86_64``."""

    python: str
    glibc: tuple[int, int]
    machine: str = "x86_64"

    def tags(self) -> tuple[str, ...]:
        """Every platform tag that runs there, newest first; pip takes each literally."""
        major, newest = self.glibc
        made = [f"manylinux_{major}_{minor}_{self.machine}" for minor in range(newest, OLDEST_GLIBC[1] - 1, -1)]
        if self.machine == "x86_64":
            made += [f"manylinux2014_{self.machine}", "manylinux2010_x86_64", "manylinux1_x86_64"]
        else:
            made.append(f"manylinux2014_{self.machine}")
        return (*made, f"linux_{self.machine}")


class Wheel(Frozen):
    """One wheel of a wheelhouse."""

    name: str
    sha256: str
    size: int


class Record(Frozen):
    """``wheelhouse.json``: what was asked and what came of it."""

    requirements: tuple[str, ...]
    python: str
    glibc: tuple[int, int]
    machine: str
    deps: bool
    wheels: tuple[Wheel, ...]


@dataclass(frozen=True)
class Wheelhouse:
    """A folder of wheels and the record of them."""

    folder: Path
    record: Record

    @property
    def wheels(self) -> dict[str, str]:
        """sha256 by file name."""
        return {wheel.name: wheel.sha256 for wheel in self.record.wheels}

    def size(self, names: Sequence[str] | None = None) -> int:
        """Bytes of these wheels, or of all."""
        return sum(w.size for w in self.record.wheels if names is None or w.name in names)

    def stream(self, names: Sequence[str]) -> TarStream:
        """A tar of these wheels that is read as it is sent."""
        return TarStream([(self.folder / name, name) for name in sorted(names)])


def resolve(
    platform: Platform,
    requirements: Sequence[str] = DEFAULT_REQUIREMENTS,
    *,
    deps: bool = True,
    cache: Path | None = None,
    run: Run | None = None,
) -> Wheelhouse:
    """The wheels that ``requirements`` need on ``platform``, with pip's own; from the cache if it has them."""
    asked: dict[str, Any] = {
        "requirements": sorted(requirements),
        "python": platform.python,
        "glibc": list(platform.glibc),
    }
    asked |= {"machine": platform.machine, "deps": deps}
    key = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:16]
    folder = (cache or cache_dir()) / "wheelhouses" / key
    known = load(folder)
    if known is not None:
        return known
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{key}-") as work:
        place = Path(work) / "wheels"
        place.mkdir()
        _download(platform, requirements, deps, place, run or _run)
        wheels = tuple(
            Wheel(name=path.name, sha256=file_sha256(path), size=path.stat().st_size)
            for path in sorted(place.glob("*.whl"))
        )
        record = Record(
            requirements=tuple(sorted(requirements)),
            python=platform.python,
            glibc=platform.glibc,
            machine=platform.machine,
            deps=deps,
            wheels=wheels,
        )
        (place / RECORD).write_text(record.model_dump_json(indent=1) + "\n", "utf-8")
        if folder.exists():  # what was there is damaged, or load() had known it
            os.replace(folder, Path(work) / "damaged")
        os.replace(place, folder)
    return Wheelhouse(folder, record)


def load(folder: Path) -> Wheelhouse | None:
    """A wheelhouse whose every wheel is as recorded; None if there is none, or it is damaged."""
    try:
        record = Record.model_validate_json((folder / RECORD).read_text("utf-8"))
        whole = all(file_sha256(folder / wheel.name) == wheel.sha256 for wheel in record.wheels)
    except (OSError, ValidationError):
        return None
    return Wheelhouse(folder, record) if whole and record.wheels else None


def _download(platform: Platform, requirements: Sequence[str], deps: bool, place: Path, run: Run) -> None:
    base = [sys.executable, "-m", "pip", "download", "--quiet", "--only-binary=:all:", f"--dest={place}"]
    base += ["--implementation=cp", f"--python-version={platform.python}"]
    base += [f"--platform={tag}" for tag in platform.tags()]
    # pip's own wheel never has dependencies, and must not decide about those of the others
    wanted = [[*([] if deps else ["--no-deps"]), *requirements]] if requirements else []
    for more in (*wanted, ["--no-deps", INSTALLER]):
        done = run([*base, *more])
        if done.returncode != 0:
            lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
            raise RefusedError(
                f"pip could not fetch the wheels: {' '.join(' '.join(lines[-2:]).split())[:400] or 'no reason given'}",
                why=f"they must fit CPython {platform.python}, glibc {platform.glibc[0]}.{platform.glibc[1]}, "
                f"{platform.machine}",
                next="run the same command where a package index can be reached",
            )


def _run(argv: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, capture_output=True, text=True, check=False)


class TarStream(io.RawIOBase):
    """A tar of files, made as it is read: gigabytes of wheels are never held in memory. ``seek(0)`` begins anew."""

    def __init__(self, files: Sequence[tuple[Path, str]]) -> None:
        super().__init__()
        self._files = files
        self._parts = self._generate()
        self._rest = b""

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        if (offset, whence) != (0, 0):
            raise io.UnsupportedOperation("only to the start")
        self._parts, self._rest = self._generate(), b""
        return 0

    def readinto(self, buffer: Any) -> int:
        while not self._rest:
            part = next(self._parts, None)
            if part is None:
                return 0
            self._rest = part
        block, self._rest = self._rest[: len(buffer)], self._rest[len(buffer) :]
        buffer[: len(block)] = block
        return len(block)

    def _generate(self) -> Iterator[bytes]:
        for path, name in self._files:
            member = tarfile.TarInfo(name)
            member.size = path.stat().st_size
            member.mode = 0o644
            yield member.tobuf(tarfile.PAX_FORMAT)
            with path.open("rb") as file:
                yield from iter(lambda: file.read(CHUNK), b"")
            yield bytes(-member.size % tarfile.BLOCKSIZE)
        yield bytes(2 * tarfile.BLOCKSIZE)
