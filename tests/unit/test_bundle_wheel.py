from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from ddtree_ops.bundle import wheel as wheel_module
from ddtree_ops.bundle.wheel import DEFAULT_TAG, PINS, fetch_wheel, file_sha256, wheel_name
from ddtree_ops.errors import ExitCode, RefusedError, UsageError


def pip(content: bytes | None, stderr: str = "", rc: int = 0, log: list[list[str]] | None = None):
    """A pip that writes ``content`` as the wheel it was asked for."""

    def run(argv: Sequence[str]) -> subprocess.CompletedProcess[str]:
        if log is not None:
            log.append(list(argv))
        if content is not None:
            dest = next(a.split("=", 1)[1] for a in argv if a.startswith("--dest="))
            tag = next(a for a in argv if a.startswith("--abi=")).removeprefix("--abi=")
            (Path(dest) / wheel_name(f"{tag}-x86_64")).write_bytes(content)
        return subprocess.CompletedProcess(list(argv), rc, "", stderr)

    return run


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> bytes:
    content = b"a wheel"
    probe = tmp_path / "probe"
    probe.write_bytes(content)
    monkeypatch.setitem(PINS, DEFAULT_TAG, file_sha256(probe))
    return content


def test_download_is_pinned_by_hash_and_kept(tmp_path: Path, pinned: bytes) -> None:
    calls: list[list[str]] = []
    path = fetch_wheel(cache=tmp_path, run=pip(pinned, log=calls))
    assert path == tmp_path / "wheels" / wheel_name(DEFAULT_TAG)
    assert "--require-hashes" in calls[0]
    assert "--no-deps" in calls[0]
    assert fetch_wheel(cache=tmp_path, run=pip(None, rc=1)) == path, "the second time nothing is fetched"
    assert [p.name for p in path.parent.iterdir()] == [path.name], "no temporary file is left"


def test_rotten_cache_entry_is_fetched_again(tmp_path: Path, pinned: bytes) -> None:
    path = fetch_wheel(cache=tmp_path, run=pip(pinned))
    path.write_bytes(b"half a whe")
    assert fetch_wheel(cache=tmp_path, run=pip(pinned)).read_bytes() == pinned


def test_wrong_content_is_refused(tmp_path: Path, pinned: bytes) -> None:
    with pytest.raises(RefusedError) as caught:
        fetch_wheel(cache=tmp_path, run=pip(pinned + b"!"))
    assert caught.value.exit_code is ExitCode.REFUSED
    assert not (tmp_path / "wheels" / wheel_name(DEFAULT_TAG)).exists()


def test_failing_pip_gives_its_reason(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="No matching distribution") as caught:
        fetch_wheel(cache=tmp_path, run=pip(None, "WARNING: x\nERROR: No matching distribution found\n", 1))
    assert "ddtree-ops bundle --wheel" in caught.value.next


def test_no_pip_in_this_python(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="No module named pip"):
        fetch_wheel(cache=tmp_path, run=pip(None, "/usr/bin/python3: No module named pip\n", 1))


def test_given_wheel_must_be_a_pinned_one(tmp_path: Path, pinned: bytes) -> None:
    given = tmp_path / "renamed.whl"
    given.write_bytes(pinned)
    assert fetch_wheel(given) == given
    given.write_bytes(b"sglang 0.5.16")
    with pytest.raises(RefusedError, match=r"not a published wheel of SGLang 0\.5\.17"):
        fetch_wheel(given)
    with pytest.raises(UsageError, match="no such wheel"):
        fetch_wheel(tmp_path / "absent.whl")
    with pytest.raises(UsageError, match="cp39-x86_64"):
        fetch_wheel(tag="cp39-x86_64", cache=tmp_path)


def test_every_pin_has_a_file_name() -> None:
    assert all(wheel_name(tag).startswith(f"sglang-{wheel_module.SGLANG_VERSION}-cp3") for tag in PINS)
    assert len(set(PINS.values())) == len(PINS)
