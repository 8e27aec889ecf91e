"""What /proc says: who holds a port, what a unit runs. The test's own process is what is looked at."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from waiting import NOBODY, until

from ddtree_ops.hostside import procs


def test_a_listening_port_with_its_process() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        (found,) = ours(procs.listeners({port}))
        assert (found["address"], found["port"]) == ("127.0.0.1", port)
        assert [p["pid"] for p in found["processes"]] == [os.getpid()]
        assert ours(procs.listeners({port}, [os.getpid()])) == [found]
        assert ours(procs.listeners({port}, [1, NOBODY])) == [found]
    assert ours(procs.listeners({port})) == []


def ours(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without what another process of this machine has on the same port: at another address, or right after us."""
    return [each for each in found if os.getpid() in [process["pid"] for process in each["processes"]]]


@pytest.mark.parametrize(
    ("hexed", "family", "address"),
    [
        ("0100007F", socket.AF_INET, "127.0.0.1"),
        ("00000000000000000000000001000000", socket.AF_INET6, "::1"),
        ("0000000000000000FFFF00000100007F", socket.AF_INET6, "::ffff:127.0.0.1"),
    ],
)
@pytest.mark.skipif(sys.byteorder != "little", reason="the kernel prints words in its own byte order")
def test_the_kernels_addresses(hexed: str, family: socket.AddressFamily, address: str) -> None:
    assert procs.ip(hexed, family) == address


def test_a_process_with_its_words_and_age() -> None:
    child = subprocess.Popen(["sleep", "600"])  # not this process: a test runner may give itself another title
    try:
        until(lambda: procs.text(f"/proc/{child.pid}/cmdline").startswith("sleep"), "the child is `sleep`")
        about = procs.about(child.pid)
        assert about["argv"] == ["sleep", "600"]
        assert (about["ppid"], about["uid"]) == (os.getpid(), os.getuid())
        assert about["started"] < time.time()
    finally:
        child.kill()
        child.wait()
    assert procs.about(NOBODY)["argv"] == []


def test_the_words_of_a_process_amid_exec_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel closes files at exec before it lays out the new command line: in between there is none to read."""
    looks = iter(["", "", "python3\0-m\0server\0"])
    files = {"stat": "7 (python3 x) S 1 7 7 0 -1 4194304 0\n", "cgroup": ""}
    monkeypatch.setattr(
        procs, "text", lambda path: next(looks) if path.endswith("cmdline") else files.get(Path(path).name, "")
    )
    assert procs.about(7)["argv"] == ["python3", "-m", "server"]
    assert list(looks) == []


@pytest.mark.parametrize(
    "stat",
    ["", "7 (x) Z 1 7 7 0 -1 4228100 0\n", "7 (x) S 1 7 7 0 -1 4194308 0\n", "7 (kworker) I 2 0 0 0 -1 69238880 0\n"],
    ids=["gone", "zombie", "ending", "thread of the kernel"],
)
def test_a_process_without_words_is_not_waited_for(stat: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(procs, "text", lambda path: stat if path.endswith("stat") else "")
    monkeypatch.setattr(procs, "time", SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: pytest.fail("waited")))
    assert procs.words(7) == []


def test_a_process_that_never_gets_words_is_waited_for_only_so_long(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: now.__setitem__(0, now[0] + seconds))
    monkeypatch.setattr(procs, "time", clock)
    monkeypatch.setattr(procs, "text", lambda path: "7 (x) D 1 7 7 0 -1 4194304 0\n" if path.endswith("stat") else "")
    assert procs.words(7) == []
    assert now[0] == pytest.approx(procs.EXEC_S, abs=0.1)


def test_the_unit_is_the_innermost_of_the_control_group(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = {
        7: "0::/system.slice/sglang-ddtree-a.service\n",
        8: "0::/user.slice/user-1000.slice/user@1000.service/app.slice/sglang-ddtree-b.service/child\n",
        9: "0::/\n",
    }
    monkeypatch.setattr(procs, "text", lambda path: groups[int(path.split("/")[2])])
    assert [procs.unit_of(pid) for pid in groups] == ["sglang-ddtree-a.service", "sglang-ddtree-b.service", None]


def test_a_units_processes_are_the_kernels_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group = "/system.slice/a.service"
    for folder, pids in (("", f"{os.getpid()}\n"), ("/child", f"{os.getppid()}\n")):
        (tmp_path / f"sys{group}{folder}").mkdir(parents=True)
        (tmp_path / f"sys{group}{folder}" / "cgroup.procs").write_text(pids)
    monkeypatch.setattr(procs, "CGROUPS", str(tmp_path / "sys"))
    assert [p["pid"] for p in procs.of_unit("a.service", group)] == sorted([os.getpid(), os.getppid()])
    assert procs.of_unit("no-such-unit.service", "/gone") == []
