"""A release: one digest over engine, settings and unit; the same bytes every time."""

from __future__ import annotations

import io
import json
import tarfile
from typing import Any

import pytest
from fakehost import ENGINE, host_of, render, settings
from hypothesis import given
from hypothesis import strategies as st

from ddtree_ops.model import Mode, Settings
from ddtree_ops.release import Release, canonical, make_release, pack, sha256

HOST = host_of(settings())


def release(wanted: Settings | None = None, engine: str = ENGINE, **changes: Any) -> Release:
    given = {"systemd_version": 252, "render": render, **changes}
    return make_release(wanted or settings(), engine, HOST, **given)


def test_the_unit_carries_the_digest_of_its_release() -> None:
    made = release()
    assert made.unit.count(made.id) == 1
    assert made.id == release().id


@pytest.mark.parametrize(
    "other",
    [
        release(settings(budget=17)),
        release(settings(mode=Mode.TREE)),
        release(settings(env={"A": "1"})),
        release(engine="d" * 64),
        release(systemd_version=254),
        release(render=lambda *args, **kwargs: "# a newer template\n" + render(*args, **kwargs)),
    ],
    ids=["budget", "mode", "env", "engine", "systemd", "template"],
)
def test_everything_that_changes_the_server_changes_the_digest(other: Release) -> None:
    assert other.id != release().id


def test_manifest_names_every_other_file() -> None:
    files = release().files()
    manifest = json.loads(files.pop("manifest.json"))
    assert set(files) == set(manifest["files"]) == {"unit", "settings.json"}
    for name, data in files.items():
        assert manifest["files"][name] == {"sha256": sha256(data), "size": len(data)}
    assert (manifest["release"], manifest["engine"], manifest["instance"]) == (release().id, ENGINE, "a")


def test_pack_is_the_same_bytes_and_holds_the_files() -> None:
    made = release()
    packed = pack(made)
    assert packed == pack(release())
    with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
        held = {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]
    assert held == made.files()


def test_settings_come_back_from_the_release() -> None:
    wanted = settings(extra_args=("--x", "ä b"), env={"K": "v"})
    assert Settings.model_validate_json(release(wanted).files()["settings.json"]) == wanted


@given(st.dictionaries(st.text(), st.integers() | st.text(), max_size=6))
def test_canonical_does_not_depend_on_order(value: dict[str, Any]) -> None:
    assert canonical(value) == canonical(dict(reversed(value.items())))
    assert json.loads(canonical(value)) == value
