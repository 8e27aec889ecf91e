"""Writes that are whole or did not happen, whatever the disk, the umask or another helper does meanwhile."""

from __future__ import annotations

import errno
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helperhost import HelperHost, deployed, helper_host, release_tar
from waiting import LIMIT_S, NOBODY, until

from ddtree_ops.hostside import __main__ as entry
from ddtree_ops.hostside import files, staging
from ddtree_ops.hostside.context import HANGING, Context


@pytest.fixture
def host(tmp_path: Path) -> Iterator[HelperHost]:
    made = helper_host(tmp_path)
    with made.agent.locked("test"):
        yield made


def context(root: Path, **more: Any) -> Context:
    return Context({"root": str(root), **more}, io.BytesIO(), io.BytesIO())


def test_a_line_is_appended_whole_by_a_disk_that_takes_a_part_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, bytes(data)[:3]))
    files.append_line(str(tmp_path / "log"), {"what": "a long line"})
    assert files.read_lines(str(tmp_path / "log")) == [{"what": "a long line"}]


def test_a_line_that_a_full_disk_tore_is_an_error_and_spoils_only_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, log = os.write, str(tmp_path / "log")

    def full(fd: int, data: bytes) -> int:
        monkeypatch.setattr(os, "write", no_space)
        return write(fd, bytes(data)[:5])

    def no_space(_fd: int, _data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space"):
        files.append_line(log, {"what": "torn"})
    monkeypatch.setattr(os, "write", write)
    files.append_line(log, {"what": "after"})
    assert files.read_lines(log) == [{"what": "after"}]


def test_what_another_living_helper_writes_is_left_to_it(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "600"]) as other:
        try:
            living = f".tmp-state.json.{other.pid}-{files.begun(other.pid)}-{'0' * 12}"
            reused = f".tmp-state.json.{other.pid}-1-{'0' * 12}"
            dead = f".tmp-state.json.{NOBODY}-1-{'0' * 12}"
            for name in (living, reused, dead, ".tmp-other"):
                (tmp_path / name).touch()
            files.write_json(str(tmp_path / "state.json"), {})
            assert {p.name for p in tmp_path.iterdir()} == {living, ".tmp-other", "state.json"}
            assert files.sweep(str(tmp_path)) == [".tmp-other"]
        finally:
            other.kill()
    assert files.sweep(str(tmp_path)) == [living]


def test_the_helper_of_a_link_that_broke_takes_nothing_from_the_one_that_was_asked_again(host: HelperHost) -> None:
    """Both receive the same release when the first one learns that its client is gone, and tidies up."""
    digest, tar = release_tar("one\n" * 40000)
    request = {
        "op": "stage_release", "args": {"instance": "qwen", "release": digest}, "root": str(host.root),
        "lock": host.agent.token, "deadline_s": 600, "bin": host.agent._extra["bin"],
    }  # fmt: skip
    host.do("facts")
    helper = next((host.root / "helper").iterdir())
    releases = host.root / "instances" / "qwen" / "releases"
    begun: list[subprocess.Popen[bytes]] = []
    try:
        for count in (1, 2):
            child = subprocess.Popen([sys.executable, "-I", str(helper)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            begun.append(child)
            assert child.stdin is not None
            child.stdin.write(json.dumps(request).encode() + b"\n" + tar[: len(tar) // 2])
            child.stdin.flush()
            until(lambda count=count: len(list(releases.glob(".tmp-*"))) == count, f"{count} receive")  # type: ignore[misc]
        first, second = begun
        assert first.communicate(timeout=LIMIT_S)[0].count(b"broke off") == 1
        answer = second.communicate(tar[len(tar) // 2 :], timeout=LIMIT_S)[0]
    finally:
        for child in begun:
            child.kill()
            child.wait()
    assert json.loads(answer.splitlines()[-1])["value"] == {"staged": True, "mended": []}
    assert [p.name for p in releases.iterdir()] == [digest]
    assert staging.damage(str(releases / digest)) == []


def test_the_servers_user_gets_past_every_folder_whatever_the_umask(tmp_path: Path) -> None:
    old = os.umask(0o077)
    try:
        made = helper_host(tmp_path)
        with made.agent.locked("test"):
            made.do("put_secrets", b'{"api_key": "secret"}', instance="qwen")
            deployed(made, "one\n")
    finally:
        os.umask(old)
    modes = {p.relative_to(made.root): p.stat().st_mode & 0o777 for p in [made.root, *made.root.rglob("*")]}
    closed = {path for path, mode in modes.items() if not mode & 0o004}
    assert closed == {Path(name) for name in ("instances/qwen/secrets", "instances/qwen/secrets/api_key", "reserve")}
    assert (made.units / "sglang-ddtree-qwen.service").stat().st_mode & 0o777 == 0o644


def test_a_program_that_does_not_even_end_when_it_is_killed_is_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As nvidia-smi does when it hangs in its driver."""
    monkeypatch.setattr(subprocess.Popen, "kill", lambda _self: None)
    ctx = context(tmp_path, bin={"nvidia-smi": ["sleep", "600.0789"]})
    try:
        ran = ctx.run("nvidia-smi", timeout_s=0.2)
        assert (ran.rc, ran.err) == (124, "sleep: no answer within 0 s")
    finally:
        monkeypatch.undo()
        for child in HANGING:
            child.kill()
            child.wait()
        HANGING.clear()


def test_a_program_that_may_not_run_is_an_answer(tmp_path: Path) -> None:
    (tmp_path / "smi").write_text("not a program")
    (tmp_path / "smi").chmod(0o755)
    ran = context(tmp_path, bin={"nvidia-smi": [str(tmp_path / "smi")]}).run("nvidia-smi")
    assert (ran.rc, "Exec format error" in ran.err) == (126, True)


def test_on_a_full_disk_what_makes_room_is_tried_again_with_the_space_that_was_kept(
    host: HelperHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    reserve = host.root / "reserve"
    assert reserve.stat().st_blocks * 512 >= files.RESERVE_BYTES
    asked: list[bool] = []

    def dispatch(*_args: object) -> dict[str, Any]:
        asked.append(reserve.exists())
        if reserve.exists():
            raise OSError(errno.ENOSPC, "No space left on device")
        return {"done": True}

    monkeypatch.setattr(entry, "dispatch", dispatch)
    ctx = context(host.root)
    with pytest.raises(OSError, match="No space"):
        entry.on_full_disk(ctx, {"op": "stage_release"}, 30.0)
    assert entry.on_full_disk(ctx, {"op": "prune"}, 30.0) == {"done": True}
    assert asked == [True, True, False]


def test_a_name_that_is_not_utf_8_arrives_as_something_that_can_be_shown(tmp_path: Path) -> None:
    answers = io.BytesIO()
    ctx = Context({"root": str(tmp_path)}, io.BytesIO(), answers)
    ctx.emit({"name": os.fsdecode(b"caf\xe9"), "other": "caf\u00e9"})
    assert json.loads(answers.getvalue()) == {"name": "caf?", "other": "caf\u00e9"}
