"""What /proc says: who holds a port, what a unit runs. The test's own process is what is looked at."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ddtree_ops.hostside import procs


def test_a_listening_port_with_its_process() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        (found,) = procs.listeners({port})
        assert (found["address"], found["port"]) == ("127.0.0.1", port)
        assert [p["pid"] for p in found["processes"]] == [os.getpid()]
        assert procs.listeners({port}, [os.getpid()]) == [found]
        assert procs.listeners({port}, [1, 2**22 - 1]) == [found]
    assert procs.listeners({port}) == []


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
    child = subprocess.Popen(["sleep", "60"])  # not this process: a test runner may give itself another title
    try:
        about = procs.about(child.pid)
        assert about["argv"] == ["sleep", "60"]
        assert (about["ppid"], about["uid"]) == (os.getpid(), os.getuid())
        assert about["started"] < time.time()
    finally:
        child.kill()
        child.wait()
    assert procs.about(2**22 - 1)["argv"] == []


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
