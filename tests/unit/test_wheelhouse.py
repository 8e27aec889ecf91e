from __future__ import annotations

import io
import subprocess
import tarfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from ddtree_ops.bundle.wheelhouse import Platform, TarStream, resolve
from ddtree_ops.errors import RefusedError

DEBIAN_12 = Platform("3.11", (2, 36))


class Pip:
    """A pip that knows some wheels."""

    def __init__(self, **wheels: bytes) -> None:
        self.wheels = wheels
        self.calls: list[list[str]] = []

    def __call__(self, argv: Sequence[str]) -> subprocess.CompletedProcess[str]:
        self.calls.append(list(argv))
        dest = Path(next(word for word in argv if word.startswith("--dest=")).removeprefix("--dest="))
        for wanted in argv[4:]:
            if wanted.startswith("-"):
                continue
            name = wanted.split("=")[0].split(">")[0]
            if name not in self.wheels:
                return subprocess.CompletedProcess(argv, 1, "", f"ERROR: No matching distribution found for {wanted}\n")
            (dest / f"{name}-1.0-py3-none-any.whl").write_bytes(self.wheels[name])
        return subprocess.CompletedProcess(argv, 0, "", "")


def test_tags_of_a_debian_12() -> None:
    tags = DEBIAN_12.tags()
    assert tags[0] == "manylinux_2_36_x86_64"
    assert "manylinux_2_17_x86_64" in tags
    assert "manylinux_2_37_x86_64" not in tags
    assert tags[-1] == "linux_x86_64"
    assert "manylinux1_x86_64" not in Platform("3.11", (2, 36), "aarch64").tags()


def test_what_was_resolved_is_kept(tmp_path: Path) -> None:
    pip = Pip(idna=b"idna", pip=b"pip")
    first = resolve(DEBIAN_12, ["idna==1.0"], cache=tmp_path, run=pip)
    assert list(first.wheels) == ["idna-1.0-py3-none-any.whl", "pip-1.0-py3-none-any.whl"]
    assert first.size() == 7
    assert "--python-version=3.11" in pip.calls[0]
    assert "--only-binary=:all:" in pip.calls[0]
    assert resolve(DEBIAN_12, ["idna==1.0"], cache=tmp_path, run=Pip()) == first, "without network"
    assert [path.name for path in first.folder.parent.iterdir()] == [first.folder.name]


def test_damaged_wheelhouse_is_fetched_again(tmp_path: Path) -> None:
    pip = Pip(idna=b"idna", pip=b"pip")
    first = resolve(DEBIAN_12, ["idna==1.0"], cache=tmp_path, run=pip)
    (first.folder / "idna-1.0-py3-none-any.whl").write_bytes(b"rotten")
    again = resolve(DEBIAN_12, ["idna==1.0"], cache=tmp_path, run=pip)
    assert (again.folder / "idna-1.0-py3-none-any.whl").read_bytes() == b"idna"


def test_other_questions_have_other_places(tmp_path: Path) -> None:
    pip = Pip(idna=b"idna", pip=b"pip")
    places = {
        resolve(platform, ["idna==1.0"], deps=deps, cache=tmp_path, run=pip).folder
        for platform in (DEBIAN_12, Platform("3.12", (2, 36)), Platform("3.11", (2, 39)))
        for deps in (True, False)
    }
    assert len(places) == 6


def test_pip_alone(tmp_path: Path) -> None:
    pip = Pip(pip=b"pip")
    assert list(resolve(DEBIAN_12, (), cache=tmp_path, run=pip).wheels) == ["pip-1.0-py3-none-any.whl"]
    assert len(pip.calls) == 1


def test_pips_reason_is_passed_on(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match=r"No matching distribution found for sglang==9\.9"):
        resolve(DEBIAN_12, ["sglang==9.9"], cache=tmp_path, run=Pip(pip=b"pip"))
    assert list((tmp_path / "wheelhouses").iterdir()) == [], "nothing half is kept"


@pytest.mark.parametrize("sizes", [[], [0], [1], [512, 511, 513], [3_000_000, 7]])
def test_the_stream_is_a_tar(tmp_path: Path, sizes: list[int]) -> None:
    content = {f"{i}.whl": bytes([i % 251]) * size for i, size in enumerate(sizes)}
    for name, data in content.items():
        (tmp_path / name).write_bytes(data)
    stream = TarStream([(tmp_path / name, name) for name in content])
    for _ in range(2):  # a retry begins anew
        stream.seek(0)
        with tarfile.open(fileobj=io.BufferedReader(stream), mode="r|") as tar:
            read = {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]
        assert read == content
        stream = TarStream([(tmp_path / name, name) for name in content])
