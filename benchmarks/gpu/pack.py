"""A run's many files as few: logs and answers in two archives beside the report, compiled kernels in a third.

The archive of answers is unpacked where a run goes on in a new place, so that arms that have answered are kept. It must
be easy to move: with an archive that does not come back, a run is lost.
"""

from __future__ import annotations

import re
import tarfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

SCAFFOLD = ("site", "models")  # made anew by every run
# A self-test's answers: laws over a whole vocabulary, tens of megabytes. Its record has what they showed; a run in the
# same place goes on from them, one elsewhere asks again.
ANSWERS = "arms"
CACHES = {  # what is compiled on first use, by Triton, FlashInfer and SGLang's own kernels
    "triton": Path.home() / ".triton" / "cache",
    "flashinfer": Path.home() / ".cache" / "flashinfer",
    "tvm-ffi": Path.home() / ".cache" / "tvm-ffi",
}
MOST = 16 << 20  # bytes of an archive that is still easy to move
LARGE = 4 << 20  # bytes of a file that stays behind where an archive would be larger


def is_log(path: Path) -> bool:
    """A stage's, or one of an arm's processes': NAME.log, and NAME.log.1 of its second rank."""
    return path.name == "log" or ".log" in path.suffixes


def files(work: Path) -> list[Path]:
    """What the stages wrote, without what every run makes anew."""
    found = []
    for path in sorted(work.rglob("*")):
        inner = path.relative_to(work)
        unwanted = set(inner.parts) & set(SCAFFOLD) or (ANSWERS in inner.parts and not is_log(path))
        if path.is_file() and not unwanted and not re.search(r"\.lock(\.|$)", path.name):
            found.append(path)
    return found


def write(archive: Path, base: Path, members: Iterable[Path], preset: int = 2) -> int:
    """The archive's size. It replaces an earlier one whole."""
    partial = archive.with_name(f".{archive.name}")
    with tarfile.open(partial, "w:xz", preset=preset) as tar:
        for path in members:
            tar.add(path, arcname=str(path.relative_to(base)), recursive=False)
    partial.replace(archive)
    return archive.stat().st_size


def pack(work: Path, out: Path, say: Callable[[str], None]) -> None:
    """out/logs.tar.xz and out/results.tar.xz; without their largest files where they would be too large to move."""
    all_files = files(work)
    for name, members in (
        ("logs.tar.xz", [path for path in all_files if is_log(path)]),
        ("results.tar.xz", [path for path in all_files if not is_log(path)]),
    ):
        size = write(out / name, work, members)
        if size > MOST:
            behind = [path for path in members if path.stat().st_size > LARGE]
            named = ", ".join(str(path.relative_to(work)) for path in behind) or "nothing"
            say(f"{name} would have {size / 1e6:.1f} MB: left behind is {named}")
            members = [path for path in members if path not in behind]
            size = write(out / name, work, members)
        say(f"{name}: {len(members)} files, {size / 1e6:.1f} MB")


def pack_caches(out: Path, say: Callable[[str], None], caches: Mapping[str, Path] = CACHES) -> None:
    """out/caches.tar.xz, for the next run on such a host; left out where it grows too large to be worth its way."""
    partial = out / ".caches"
    with tarfile.open(partial, "w:xz", preset=1) as tar:
        for name, place in caches.items():
            if place.is_dir():
                tar.add(place, arcname=name)
    size = partial.stat().st_size
    if size > MOST:
        partial.unlink()
        say(f"caches.tar.xz would have {size / 1e6:.0f} MB: left out")
        return
    partial.replace(out / "caches.tar.xz")
    say(f"caches.tar.xz: {size / 1e6:.1f} MB")


def unpack(work: Path, out: Path, caches: Mapping[str, Path] = CACHES) -> list[str]:
    """Take up what an earlier run left in ``out`` where this host does not have it; returns what was taken up."""
    taken = []
    results = out / "results.tar.xz"
    if results.exists() and not work.exists():
        with tarfile.open(results, "r:xz") as tar:
            tar.extractall(work, filter="data")
        taken.append(results.name)
    packed = out / "caches.tar.xz"
    if packed.exists():
        with tarfile.open(packed, "r:xz") as tar:
            members = tar.getmembers()
            for name, place in caches.items():
                if not place.exists() and any(member.name.startswith(f"{name}/") for member in members):
                    inner = [member for member in members if member.name.startswith(f"{name}/")]
                    for member in inner:
                        member.name = member.name.removeprefix(f"{name}/")
                    tar.extractall(place, members=inner, filter="data")
                    taken.append(f"{packed.name}: {name}")
    return taken
