"""Drift: each kind of it made on a host in a folder, found by the helper, judged with its repair."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helperhost import HelperHost, helper_host, release_tar

from ddtree_ops.drift import Difference, changes, judge
from ddtree_ops.hostside.engine import canonical

UNIT = "sglang-ddtree-qwen.service"
BASE = {"sglang/a.py": b"a = 1\n", "sglang/b.py": b"b = 1\n"}
PATCHED = b"a = 2\n"


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def host(tmp_path: Path) -> Iterator[HelperHost]:
    """A deployed release whose engine patches one file of the SGLang in a venv and links the other."""
    made = helper_host(tmp_path)
    site = tmp_path / "venv" / "lib" / "python3.11" / "site-packages"
    info = site / "sglang-0.5.17.dist-info"
    info.mkdir(parents=True)
    rows = []
    for name, data in BASE.items():
        (site / name).parent.mkdir(exist_ok=True)
        (site / name).write_bytes(data)
        rows.append(f"{name},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip('=')},6")
    (info / "RECORD").write_text("\n".join([*rows, "sglang-0.5.17.dist-info/RECORD,,"]) + "\n")
    manifest: dict[str, Any] = {
        "format": 1, "sglang": "0.5.17", "patches": [], "base": {"sglang/a.py": sha(BASE["sglang/a.py"])},
        "patched": {"sglang/a.py": {"sha256": sha(PATCHED), "size": 6}}, "new": {},
    }  # fmt: skip
    engine = sha(canonical(manifest))
    overlay = made.root / "engines" / engine / "site" / "sglang"
    overlay.mkdir(parents=True)
    (overlay / "a.py").write_bytes(PATCHED)
    (overlay / "b.py").hardlink_to(site / "sglang/b.py")
    (overlay.parent.parent / "manifest.json").write_bytes(canonical(manifest))
    with made.agent.locked("test"):
        settings = json.dumps({"venv": str(tmp_path / "venv")}).encode()
        digest, tar = release_tar("[Service]\nExecStart=/bin/a\n", engine=engine, settings=settings)
        made.do("stage_release", tar, instance="qwen", release=digest)
        made.do("switch", instance="qwen", release=digest)
        made.do("write_unit", instance="qwen")
        made.do("systemctl", verb="restart", instance="qwen")
        yield made


def look(host: HelperHost) -> list[Difference]:
    return judge("here", host.do("drift", instances=["qwen"]))


def one(host: HelperHost) -> tuple[str, str, str]:
    found = look(host)
    assert len(found) == 1, found
    return found[0].kind, found[0].found, found[0].repair


def base(host: HelperHost) -> Path:
    return host.root / "instances" / "qwen"


def set_show(host: HelperHost, **values: str) -> None:
    path = host.systemd / "units.json"
    units = json.loads(path.read_text())
    units[UNIT].update(values)
    path.write_text(json.dumps(units))


def test_a_host_as_it_was_left_has_none(host: HelperHost) -> None:
    assert look(host) == []


def test_an_instance_that_was_never_deployed_has_none(host: HelperHost) -> None:
    assert judge("here", host.do("drift", instances=["other"])) == []


def test_a_unit_that_was_edited_or_removed(host: HelperHost) -> None:
    unit = host.units / UNIT
    unit.write_text("[Service]\nExecStart=/bin/b\n")
    kind, found, repair = one(host)
    assert kind == "unit"
    assert repair.startswith("ddtree-ops rollback here:qwen --to ")
    assert "ExecStart=/bin/a became ExecStart=/bin/b" in found
    unit.unlink()
    assert one(host)[1] == "is missing"


def test_a_unit_that_systemd_has_not_read_and_a_disabled_one(host: HelperHost) -> None:
    set_show(host, NeedDaemonReload="yes")
    assert one(host)[0::2] == ("unit loaded", "on here: systemctl daemon-reload")
    set_show(host, NeedDaemonReload="no", UnitFileState="disabled")
    assert one(host)[1:] == ("does not start at boot", f"on here: systemctl enable {UNIT}")


def test_a_drop_in(host: HelperHost, tmp_path: Path) -> None:
    extra = tmp_path / "override.conf"
    extra.write_text("[Service]\nEnvironment=X=1\n")
    set_show(host, DropInPaths=str(extra))
    kind, found, repair = one(host)
    assert (kind, repair) == ("drop-in", f"on here: systemctl revert {UNIT}")
    assert found == "changes the unit: [Service] Environment=X=1"


def test_a_release_file_that_was_edited_is_mended_by_the_repair(host: HelperHost) -> None:
    (base(host) / "current" / "settings.json").write_text("{}")
    kinds = {each.kind: each.repair for each in look(host)}
    assert kinds["release file"] == "ddtree-ops deploy here:qwen --restart"


def test_current_that_was_moved_by_hand(host: HelperHost) -> None:
    second, tar = release_tar("two\n")
    host.do("stage_release", tar, instance="qwen", release=second)
    (base(host) / "current").unlink()
    (base(host) / "current").symlink_to(f"releases/{second}")
    assert [each.kind for each in look(host)] == ["record", "unit"]
    host.do("switch", instance="qwen", release=second)
    assert [each.kind for each in look(host)] == ["unit"]


def test_an_engine_file_that_was_edited_counts_as_no_engine(host: HelperHost) -> None:
    engine = next((host.root / "engines").iterdir())
    (engine / "site/sglang/a.py").write_text("edited\n")
    kind, found, repair = one(host)
    assert (kind, found, repair) == ("engine file", "sglang/a.py was changed", "ddtree-ops deploy here:qwen --restart")
    assert host.do("facts")["engines"] == []


def test_a_venv_edited_in_place_is_said_once_and_its_engines_copy_after_it(host: HelperHost, tmp_path: Path) -> None:
    site = tmp_path / "venv/lib/python3.11/site-packages"
    with (site / "sglang/b.py").open("a") as file:
        file.write("# by hand\n")
    kind, found, repair = one(host)
    assert (kind, found) == ("venv file", "sglang/b.py was changed")
    assert repair.endswith("pip install --force-reinstall --no-deps sglang==0.5.17")
    (site / "sglang/b.py").unlink()  # as pip does: the engine's link keeps the edited file
    (site / "sglang/b.py").write_bytes(BASE["sglang/b.py"])
    kind, found, repair = one(host)
    assert kind == "engine file"
    assert repair.startswith(f"on here: cp --remove-destination {site}/sglang/b.py {host.root}/engines/")


def test_another_sglang_in_the_venv(host: HelperHost, tmp_path: Path) -> None:
    site = tmp_path / "venv/lib/python3.11/site-packages"
    (site / "sglang-0.5.17.dist-info").rename(site / "sglang-0.5.23.dist-info")
    assert one(host)[:2] == ("venv", "has SGLang 0.5.23, the engine is made for 0.5.17")


def test_a_process_of_another_release_an_older_one_and_none(host: HelperHost) -> None:
    raw = host.do("drift", instances=["qwen"])
    there = raw["instances"]["qwen"]
    process = {
        "pid": 7, "argv": ["python", "--weight-version", there["current"]], "started": there["switched"] + 5,
        "python_path": f"/x/engines/{there['engine']}/site", "program": "/usr/bin/python3.11",
    }  # fmt: skip

    def judged(**change: Any) -> list[str]:
        there["main"] = {**process, **change}
        return [each.found for each in judge("here", raw)]

    assert judged() == []
    other = judged(argv=["python", "--weight-version=feed"])
    assert other == [f"runs release feed, current is {there['current'][:12]}"]
    assert judged(argv=["python"], started=there["switched"] - 60) == ["began before its release became current"]
    assert judged(argv=["python"]) == []
    assert judged(started=there["switched"] - 60) == [], "it says itself that it runs the release"
    assert judged(python_path="/elsewhere") == [f"does not use engine {there['engine'][:12]}"]
    assert judged(program="/usr/bin/python3.11 (deleted)") == ["its Python was replaced since it began"]
    host.do("systemctl", verb="stop", instance="qwen")
    assert one(host)[1] == "does not run"


def test_changes_are_told_shortly() -> None:
    assert changes("a\nb\n", "a\nc\n") == "b became c"
    assert changes("a\n", "a\nb\n") == "nothing became b"
    assert changes("a\nb\nc\n", "x\ny\n") == "+2 -3 lines"
