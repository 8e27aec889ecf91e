"""The helper under kill -9 and under races: whatever instant it dies at, the layout's invariants hold.

Each change is started again and again and ended before its first, second, ... call that touches the disk. Every time:
``current`` is absent or a release whose every file fits its manifest; the unit is that of some complete release; the
lock file is whole or absent. Then the same change is asked for again and must succeed.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from helperhost import FAKES, HelperHost, helper_host, release_tar

from ddtree_ops.errors import LockedError
from ddtree_ops.hostside import staging


@pytest.fixture
def host(tmp_path: Path) -> Iterator[HelperHost]:
    made = helper_host(tmp_path)
    with made.agent.locked("test", lease_s=600):
        yield made


def test_death_before_any_call_that_touches_the_disk_leaves_the_invariants_whole(host: HelperHost) -> None:
    first, tar = release_tar("one\n")
    second, other = release_tar("two\n")
    host.do("facts")
    steps = [
        ("stage_release", tar, {"instance": "qwen", "release": first}),
        ("switch", b"", {"instance": "qwen", "release": first}),
        ("write_unit", b"", {"instance": "qwen"}),
        ("record", b"", {"instance": "qwen", "release": first, "outcome": "proven", "gates": {"a": 1}}),
        ("stage_release", other, {"instance": "qwen", "release": second}),
        ("arm", b"", {"instance": "qwen", "to": first, "within_s": 600}),
        ("switch", b"", {"instance": "qwen", "release": second}),
        ("write_unit", b"", {"instance": "qwen"}),
        ("take_back", b"", {"instance": "qwen", "to": first, "reason": "killed"}),
        ("confirm", b"", {"instance": "qwen"}),
        ("lock", b"", {"token": host.agent.token, "owner": "op@desk", "purpose": "again"}),
        ("unlock", b"", {"token": host.agent.token}),
        ("lock", b"", {"token": "new", "owner": "op@desk", "purpose": "again"}),
        ("prune", b"", {"keep": 0}),
        ("take_back", b"", {"instance": "qwen", "to": "none"}),
        ("unlock", b"", {"token": "new"}),
    ]
    spec = {
        "request": {
            "root": str(host.root), "unit_dir": str(host.units), "bin": host.agent._extra["bin"], "deadline_s": 300,
        },
        "releases": {first: "one\n", second: "two\n"},
        "steps": [(op, payload.hex(), args) for op, payload, args in steps],
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, str(FAKES / "crashing.py")],
        input=json.dumps(spec),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["wrong"] == []
    # it did die, in the middle of everything: a helper that no longer goes through ``os`` would pass by not dying
    least = {
        "stage_release": 30, "switch": 8, "write_unit": 8, "record": 10, "take_back": 25, "arm": 20, "confirm": 2,
        "lock": 5, "unlock": 2,
    }  # fmt: skip
    assert {op: told["deaths"][op] >= count for op, count in least.items()} == dict.fromkeys(least, True), told
    assert host.current("qwen") is None
    assert [p.name for p in host.root.rglob(".t*-*")] + [p.name for p in host.units.glob(".tmp*")] == []


@pytest.mark.parametrize("after_s", [0.05, 0.08, 0.12, 0.18])
def test_kill_9_of_the_real_process_leaves_no_lock_that_blocks_and_no_half_release(
    host: HelperHost, after_s: float
) -> None:
    digest, tar = release_tar("one\n" * 20000)
    host.do("facts")
    request = {
        "op": "stage_release", "args": {"instance": "qwen", "release": digest}, "root": str(host.root),
        "lock": host.agent.token, "deadline_s": 30, "bin": host.agent._extra["bin"],
    }  # fmt: skip
    helper = next((host.root / "helper").iterdir())
    with subprocess.Popen(
        [sys.executable, "-I", str(helper)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as child:
        assert child.stdin is not None
        child.stdin.write(json.dumps(request).encode() + b"\n" + tar)
        child.stdin.flush()
        time.sleep(after_s)
        child.kill()
    host.do("stage_release", tar, instance="qwen", release=digest)
    releases = host.root / "instances" / "qwen" / "releases"
    assert [p.name for p in releases.iterdir()] == [digest]
    assert staging.damage(str(releases / digest)) == []


def test_a_take_back_that_was_killed_goes_on_to_where_it_was_going(host: HelperHost) -> None:
    first, tar = release_tar("one\n")
    second, other = release_tar("two\n")
    for digest, data in ((first, tar), (second, other)):
        host.do("stage_release", data, instance="qwen", release=digest)
        host.do("switch", instance="qwen", release=digest)
    (host.systemd / "fail-restart").touch()
    with pytest.raises(Exception, match="told to fail"):
        host.do("take_back", instance="qwen", to=first, reason="slow")
    assert host.state("qwen")["taking_back"] == {"to": first, "left": second}
    (host.systemd / "fail-restart").unlink()
    done = host.do("take_back", instance="qwen")
    assert (done["was"], done["to"], done["restarted"]) == (second, first, True)
    assert host.state("qwen")["taken_back"].keys() == {second}


def test_of_many_at_once_one_gets_the_lock(tmp_path: Path) -> None:
    host = helper_host(tmp_path)
    host.do("facts")

    def attempt(number: int) -> bool:
        try:
            host.do("lock", token=f"t{number}", owner=f"op{number}@desk", purpose="race")
        except LockedError:
            return False
        return True

    with ThreadPoolExecutor(6) as pool:
        for _round in range(3):
            got = list(pool.map(attempt, range(6)))
            assert got.count(True) == 1
            host.do("unlock", force=True, by="test")


def test_of_many_at_once_one_takes_over_a_lock_whose_lease_ended(tmp_path: Path) -> None:
    host = helper_host(tmp_path)
    host.do("lock", token="old", owner="eve@elsewhere", purpose="gone", lease_s=-1)

    def attempt(number: int) -> bool:
        try:
            host.do("lock", token=f"t{number}", owner=f"op{number}@desk", purpose="race")
        except LockedError:
            return False
        return True

    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(attempt, range(6))).count(True) == 1
