"""Read and apply the patch series. Strict on purpose: every line of context must match at the very line it names.

``patch`` and the libraries that imitate it search for a place that fits and apply there with fuzz. The sources here are
pinned by hash, so a hunk that does not fit exactly where it says is a mistake, never something to search around.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ddtree_ops.errors import RefusedError

HUNK = re.compile(r"^@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")


@dataclass(frozen=True)
class Hunk:
    """Lines that replace other lines: ``old`` must be found at line ``start`` (from 1) of the file before."""

    start: int
    old: tuple[str, ...]
    new: tuple[str, ...]


@dataclass(frozen=True)
class FilePatch:
    """The hunks of one file; ``path`` is relative to site-packages."""

    path: str
    hunks: tuple[Hunk, ...]


@dataclass(frozen=True)
class Patch:
    """One patch of the series: its subject, what upstream defect it mends, and the files it changes."""

    name: str
    subject: str
    header: str
    files: tuple[FilePatch, ...]
    sha256: str


def read_series(folder: Path) -> tuple[Patch, ...]:
    """The patches named in ``series``, in that order."""
    names = (folder / "series").read_text("utf-8").split()
    return tuple(parse_patch(name, (folder / name).read_text("utf-8")) for name in names)


def read_base(folder: Path) -> dict[str, str]:
    """``base.sha256`` (as sha256sum writes it): the hash of each file before the series, by path."""
    lines = (folder / "base.sha256").read_text("utf-8").splitlines()
    return {path: digest for digest, _, path in (line.partition("  ") for line in lines if line)}


def parse_patch(name: str, text: str) -> Patch:
    """A patch from its text: a header of prose that starts with ``Subject:``, ``---``, then unified diffs."""
    header, cut, body = text.partition("\n---\n")
    subject = header.partition("\n")[0]
    if not cut or not subject.startswith("Subject: "):
        raise _bad(name, "it has no header that says what it mends")
    files = tuple(_files(name, body.splitlines(keepends=True)))
    if not files:
        raise _bad(name, "it changes no file")
    digest = hashlib.sha256(text.encode()).hexdigest()
    return Patch(name, subject.removeprefix("Subject: ").strip(), header, files, digest)


def apply_series(series: tuple[Patch, ...], base: Mapping[str, str], read: Callable[[str], bytes]) -> dict[str, bytes]:
    """The patched files by path. ``read`` gives a file of the pinned SGLang; it must hash to ``base``."""
    touched = {file.path for patch in series for file in patch.files}
    if touched != set(base):
        odd = ", ".join(sorted(touched ^ set(base)))
        raise _bad("base.sha256", f"it and the series disagree about {odd}")
    now: dict[str, str] = {}
    for path in sorted(touched):
        data = read(path)
        if hashlib.sha256(data).hexdigest() != base[path]:
            raise _bad("base.sha256", f"{path} of this SGLang is not the file the series was made for")
        now[path] = data.decode("utf-8")
    for patch in series:
        for file in patch.files:
            now[file.path] = apply_file(patch.name, file, now[file.path])
    return {path: text.encode() for path, text in now.items()}


def apply_file(name: str, patch: FilePatch, text: str) -> str:
    """``text`` with the hunks applied, each exactly at its line."""
    before = text.splitlines(keepends=True)
    after: list[str] = []
    at = 0
    for hunk in patch.hunks:
        start = hunk.start - 1
        if start < at or tuple(before[start : start + len(hunk.old)]) != hunk.old:
            raise _bad(name, f"the hunk at line {hunk.start} of {patch.path} does not match")
        after += before[at:start]
        after += hunk.new
        at = start + len(hunk.old)
    return "".join(after + before[at:])


def _files(name: str, lines: list[str]) -> Iterator[FilePatch]:
    at = 0
    while at < len(lines):
        if not lines[at].startswith("--- a/") or at + 1 == len(lines) or not lines[at + 1].startswith("+++ b/"):
            raise _bad(name, f"line {lines[at].rstrip()!r} is not the start of a diff between a/ and b/")
        path = lines[at][6:].rstrip("\n")
        if lines[at + 1][6:].rstrip("\n") != path:
            raise _bad(name, f"it renames {path}")
        at += 2
        hunks: list[Hunk] = []
        while at < len(lines) and lines[at].startswith("@@"):
            hunk, at = _hunk(name, lines, at)
            hunks.append(hunk)
        if not hunks:
            raise _bad(name, f"it has no hunk for {path}")
        yield FilePatch(path, tuple(hunks))


def _hunk(name: str, lines: list[str], at: int) -> tuple[Hunk, int]:
    """The hunk that starts at ``lines[at]``, checked against the counts it announces, and the line after it."""
    header = HUNK.match(lines[at])
    if header is None:
        raise _bad(name, f"{lines[at].rstrip()!r} is not a hunk header")
    start = int(header[1])
    left_old, left_new = (1 if count is None else int(count) for count in (header[2], header[4]))
    if left_old == 0:
        raise _bad(name, f"the hunk at line {start} has no context to find its place by")
    old: list[str] = []
    new: list[str] = []
    at += 1
    while left_old or left_new:
        kind, text = (lines[at][:1], lines[at][1:]) if at < len(lines) else ("", "")
        if kind not in (" ", "-", "+"):
            raise _bad(name, f"the hunk at line {start} is cut short")
        if kind != "+":
            old.append(text)
            left_old -= 1
        if kind != "-":
            new.append(text)
            left_new -= 1
        at += 1
        if left_old < 0 or left_new < 0:
            raise _bad(name, f"the hunk at line {start} is longer than it says")
    return Hunk(start, tuple(old), tuple(new)), at


def _bad(name: str, what: str) -> RefusedError:
    return RefusedError(
        f"{name}: {what}",
        why="a patch is applied exactly or not at all",
        next="reinstall ddtree-ops, or mend the series under patches/",
    )
