"""LocalRemote: this machine through the same seam as any other."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest
from waiting import running, until

from ddtree_ops.errors import DeadlineError, RefusedError
from ddtree_ops.model import Address, HostSpec
from ddtree_ops.remote import open_remote
from ddtree_ops.remote.local import LocalRemote


@pytest.fixture
def here() -> LocalRemote:
    return LocalRemote("here")


def test_status_and_both_outputs_and_the_folder_it_begins_in(here: LocalRemote) -> None:
    done = here.run(["sh", "-c", "pwd -P; echo err >&2; exit 3"], deadline_s=60)
    assert (done.rc, done.text, done.err_text) == (3, f"{Path.home().resolve()}\n", "err\n")


def test_one_who_has_no_home_begins_at_the_root(here: LocalRemote, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/nonexistent")
    assert here.run(["pwd"], deadline_s=60).text == "/\n"


def test_large_input_and_output_at_once(here: LocalRemote) -> None:
    data = os.urandom(3_000_000)
    assert here.run(["cat"], deadline_s=60, stdin=data).out == data
    assert here.run(["cat"], deadline_s=60, stdin=io.BytesIO(data)).out == data
    assert here.run(["true"], deadline_s=60, stdin=data).rc == 0


def test_lines_come_as_they_are_written(here: LocalRemote, tmp_path: Path) -> None:
    seen: list[str] = []
    go = tmp_path / "go"

    def on_line(line: str) -> None:
        seen.append(line)
        go.touch()  # the command waits for it: a line that comes only at the end never comes

    here.run(
        ["sh", "-c", f"echo one; until [ -e '{go}' ]; do sleep 0.05; done; printf two"], deadline_s=60, on_line=on_line
    )
    assert seen == ["one", "two"]


def test_a_command_and_its_children_end_at_the_deadline(here: LocalRemote) -> None:
    with pytest.raises(DeadlineError, match="took longer than 1 s"):
        here.run(["sh", "-c", "sleep 600.0456; true"], deadline_s=1)
    until(lambda: not running("600.0456"), "the child is gone")


def test_a_program_that_is_not_there_is_an_answer(here: LocalRemote) -> None:
    assert here.run(["no-such-program-here"], deadline_s=60).rc == 127


def test_put_and_get(here: LocalRemote, tmp_path: Path) -> None:
    path = tmp_path / "a b" / "file"
    here.put(b"one", str(path), deadline_s=60)
    stale = path.parent / ".tmp-put-dead"
    stale.touch()
    os.utime(stale, (0, 0))
    here.put(b"two", str(path), mode=0o640, deadline_s=60)
    assert here.get(str(path), deadline_s=60) == b"two"
    assert path.stat().st_mode & 0o777 == 0o640
    assert list(path.parent.iterdir()) == [path]
    with pytest.raises(RefusedError, match="could not be read"):
        here.get(str(tmp_path / "none"), deadline_s=60)
    (tmp_path / "file").touch()
    with pytest.raises(RefusedError, match="could not be written"):
        here.put(b"x", str(tmp_path / "file" / "below"), deadline_s=60)


def test_the_transport_of_the_inventory_decides() -> None:
    spec = HostSpec(name="here", address=Address(host="localhost"), transport="local")
    assert isinstance(open_remote(spec), LocalRemote)
