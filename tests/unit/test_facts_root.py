"""A root that others may write in: as the helper finds it on a disk, and as it is judged."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from ddtree_ops.facts.root import REPAIR, open_folders
from ddtree_ops.hostside.facts import root_state


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A layout that nobody else may write in, below a folder of which the same is true."""
    made = tmp_path / "above" / "root"
    for folder in (made / "helper", made / "engines"):
        folder.mkdir(parents=True)
    for folder in (made.parent, made, made / "helper", made / "engines"):
        folder.chmod(0o755)
    return made


def found(root: Path) -> list[str]:
    return [str(each) for each in open_folders(root_state(str(root)))]


def test_a_root_of_ones_own_is_open_to_nobody(root: Path) -> None:
    assert found(root) == []
    assert found(root / "not" / "yet") == []


@pytest.mark.parametrize(
    ("name", "mode", "who"),
    [
        (".", 0o757, "every user"),
        (".", 0o1757, "every user"),  # others could put something there first
        ("helper", 0o757, "every user"),
        ("..", 0o757, "every user"),
        ("..", 0o1777, None),  # as /tmp is: nobody renames what is not theirs
        ("..", 0o700, None),
    ],
)
def test_modes_that_let_others_write(root: Path, name: str, mode: int, who: str | None) -> None:
    folder = Path(os.path.normpath(root / name))
    folder.chmod(mode)
    assert found(root) == ([f"{folder} may be written by {who}"] if who else [])


def test_a_link_is_followed_and_every_folder_on_the_way_counts(root: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(root)
    assert found(tmp_path / "link") == []
    root.parent.chmod(0o777)
    assert found(tmp_path / "link") == [f"{root.parent} may be written by every user"]
    root.parent.chmod(0o755)
    root.chmod(0o1757)
    assert found(tmp_path / "link") == [f"{root} may be written by every user"]
    (tmp_path / "ring").symlink_to(tmp_path / "ring")
    assert found(tmp_path / "ring" / "root") == []


def test_the_repair_closes_it(root: Path) -> None:
    root.chmod(0o777)
    [each] = open_folders(root_state(str(root)))
    subprocess.run(["sh", "-c", REPAIR.format_map(each.words)], check=True)
    assert found(root) == []


# -- judged, whoever runs the tests


def state(**folder: Any) -> dict[str, Any]:
    about = {"path": "/r", "uid": 0, "owner": "root", "mode": 0o755, "group": "g", "members": None, "inside": True}
    return {"ours": {"0": "root", "7": "deploy"}, "user": "root", "folders": [about | folder]}


@pytest.mark.parametrize(
    ("folder", "who"),
    [
        ({}, None),
        ({"uid": 7, "owner": "deploy"}, None),
        ({"uid": 9, "owner": "eve"}, "its owner eve"),
        ({"uid": 9, "owner": "eve", "mode": 0o1777, "inside": False}, "its owner eve"),
        ({"mode": 0o775, "members": ["root", "deploy"]}, None),
        ({"mode": 0o775, "members": []}, None),
        ({"mode": 0o775}, "the group g"),  # one that the host has no name for: anybody could be in it
        ({"mode": 0o775, "members": ["deploy", "eve", "mallory"]}, "the group g (eve, mallory)"),
        ({"mode": 0o1775, "members": ["eve"], "inside": False}, None),
        ({"mode": 0o775, "members": list("abcdefg")}, "the group g (a, b, c, d, e and 2 more)"),
        ({"mode": 0o777, "members": ["eve"]}, "the group g (eve) and every user"),
    ],
)
def test_who_may_write(folder: dict[str, Any], who: str | None) -> None:
    said = [str(each) for each in open_folders(state(**folder))]
    assert said == ([f"/r may be written by {who}"] if who else [])


def test_an_owner_that_is_one_of_us_stays_the_owner() -> None:
    [kept] = open_folders(state(uid=7, owner="deploy", mode=0o777, path="/a b"))
    assert REPAIR.format_map(kept.words) == "chown -h deploy '/a b' && chmod go-w '/a b'"
    [other] = open_folders(state(uid=9, owner="eve"))
    assert other.owner == "root"


def test_an_answer_without_folders_says_nothing() -> None:
    assert open_folders({"writable": True}) == ()
