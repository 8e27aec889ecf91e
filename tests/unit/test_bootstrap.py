"""Bootstrap on this machine itself: a real helper, a real venv, real pip out of its wheel; the wheels are tiny."""

from __future__ import annotations

import ensurepip
import hashlib
import json
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ddtree_ops.agent import Agent
from ddtree_ops.bootstrap import Wish, carry_out, look, send
from ddtree_ops.bundle.wheelhouse import Platform, Record, Wheel, Wheelhouse
from ddtree_ops.clock import SystemClock
from ddtree_ops.connection import Connection
from ddtree_ops.errors import RefusedError, UnreachableError
from ddtree_ops.model import Address, HostSpec
from ddtree_ops.remote.local import LocalRemote

PIP = next(Path(ensurepip.__file__).parent.glob("_bundled/pip-*.whl"), None)
pytestmark = pytest.mark.skipif(
    PIP is None or sys.version_info[:2] > (3, 13), reason="needs a Python that SGLang has wheels for, with pip's wheel"
)


def wheel(folder: Path, name: str, version: str, requires: str = "") -> None:
    """A wheel as pip wants it, of one module."""
    info = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    metadata += f"Requires-Dist: {requires}\n" if requires else ""
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as made:
        made.writestr(f"{name}.py", f"VERSION = {version!r}\n")
        made.writestr(f"{info}/METADATA", metadata)
        made.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        made.writestr(f"{info}/RECORD", "")


@pytest.fixture
def house(tmp_path: Path) -> Wheelhouse:
    """SGLang, as far as pip can tell, what it depends on, and pip."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    wheel(folder, "sglang", "0.5.17", "dependency>=1")
    wheel(folder, "dependency", "1.2")
    assert PIP is not None
    shutil.copy(PIP, folder)
    wheels = tuple(
        Wheel(name=path.name, sha256=hashlib.sha256(path.read_bytes()).hexdigest(), size=path.stat().st_size)
        for path in sorted(folder.iterdir())
    )
    record = Record(
        requirements=("sglang==0.5.17",), python="3.11", glibc=(2, 36), machine="x86_64", deps=True, wheels=wheels
    )
    return Wheelhouse(folder, record)


@pytest.fixture
def agent(tmp_path: Path) -> Agent:
    host = HostSpec(
        name="here",
        address=Address(host="localhost"),
        transport="local",
        scope="user",
        sudo=False,
        root=str(tmp_path / "opt"),
    )
    return Agent(LocalRemote("here", SystemClock()), host)


@pytest.fixture
def connection(agent: Agent) -> Connection:
    return Connection(agent.host, agent, SystemClock())


def find(house: Wheelhouse) -> Callable[..., Wheelhouse]:
    def found(platform: Platform, requirements: Any, *, deps: bool) -> Wheelhouse:
        assert platform.python == f"{sys.version_info[0]}.{sys.version_info[1]}"
        assert deps is bool(requirements)
        return house

    return found


def wish(tmp_path: Path, **change: Any) -> Wish:
    return Wish(**({"venv": str(tmp_path / "venv"), "offline": True, "python": sys.executable} | change))


def run(connection: Connection, the_wish: Wish, house: Wheelhouse) -> list[str]:
    prospect = look(connection, the_wish, find=find(house))
    with connection.locked("test", 0.0, lambda _line: None, lambda: None):
        return carry_out(connection, prospect, lambda _line: None)


def versions(venv: Path) -> dict[str, str]:
    program = "import importlib.metadata as m, json; print(json.dumps({d.name: d.version for d in m.distributions()}))"
    done = subprocess.run([venv / "bin/python", "-I", "-c", program], capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout))


def test_a_bare_host_without_an_index(connection: Connection, house: Wheelhouse, tmp_path: Path) -> None:
    prospect = look(connection, wish(tmp_path), find=find(house))
    assert not prospect.complete
    assert prospect.send_bytes == house.size()
    assert [line.split()[0] for line in prospect.lines()] == ["make", "send", "install"]
    did = run(connection, wish(tmp_path), house)
    assert did[-1] == "installed sglang==0.5.17"
    found = versions(tmp_path / "venv")
    assert (found["sglang"], found["dependency"]) == ("0.5.17", "1.2")
    assert list((tmp_path / "opt/wheels").iterdir()) == [], "what is installed need not lie there twice"

    before = (tmp_path / "venv/ddtree-bootstrap.json").stat().st_mtime_ns
    again = look(connection, wish(tmp_path), find=find(house))
    assert again.complete
    assert again.lines() == ()
    assert run(connection, wish(tmp_path), house) == [], "the second time nothing is done"
    assert (tmp_path / "venv/ddtree-bootstrap.json").stat().st_mtime_ns == before


def test_what_broke_off_goes_on(connection: Connection, house: Wheelhouse, tmp_path: Path) -> None:
    """A wheel that is not in the house stops pip half way; with it, the same command ends well."""
    (house.folder / "dependency-1.2-py3-none-any.whl").rename(tmp_path / "kept.whl")
    partial = Wheelhouse(
        house.folder,
        house.record.model_copy(
            update={"wheels": tuple(w for w in house.record.wheels if not w.name.startswith("dependency"))}
        ),
    )
    with pytest.raises(RefusedError, match=r"pip could not install SGLang: .*dependency"):
        run(connection, wish(tmp_path), partial)
    assert json.loads((tmp_path / "venv/ddtree-bootstrap.json").read_text())["complete"] is False
    (tmp_path / "kept.whl").rename(house.folder / "dependency-1.2-py3-none-any.whl")
    (tmp_path / "opt/wheels/sglang-0.5.17-py3-none-any.whl").write_bytes(b"rotten")
    prospect = look(connection, wish(tmp_path), find=find(house))
    rest = ("dependency-1.2-py3-none-any.whl", "sglang-0.5.17-py3-none-any.whl")
    assert prospect.missing == rest, "only what is missing or damaged travels"
    assert run(connection, wish(tmp_path), house) == ["installed sglang==0.5.17"]
    assert versions(tmp_path / "venv")["dependency"] == "1.2"


def test_what_was_killed_before_the_venv_had_a_python_goes_on(
    connection: Connection, house: Wheelhouse, tmp_path: Path
) -> None:
    (tmp_path / "venv/lib").mkdir(parents=True)
    (tmp_path / "venv/ddtree-bootstrap.json").write_text('{"complete": false}\n')
    did = run(connection, wish(tmp_path), house)
    assert did[-1] == "installed sglang==0.5.17"
    assert versions(tmp_path / "venv")["dependency"] == "1.2"


def test_somebody_elses_venv_is_left_alone(connection: Connection, house: Wheelhouse, tmp_path: Path) -> None:
    (tmp_path / "venv/bin").mkdir(parents=True)
    (tmp_path / "venv/pyvenv.cfg").write_text("home = /usr/bin\n")
    with pytest.raises(RefusedError, match="was not made by ddtree-ops"):
        look(connection, wish(tmp_path), find=find(house))
    assert sorted(p.name for p in (tmp_path / "venv").iterdir()) == ["bin", "pyvenv.cfg"]


def test_no_python_that_sglang_has_wheels_for(connection: Connection, house: Wheelhouse, tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match=r"there is no python2\.7 with its venv module") as caught:
        look(connection, wish(tmp_path, python="python2.7"), find=find(house))
    assert caught.value.next == "apt-get install python3 python3-venv"


def test_a_link_that_breaks_costs_one_part(
    agent: Agent, connection: Connection, house: Wheelhouse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prospect = look(connection, wish(tmp_path), find=find(house))
    call, broken = connection.call, []

    def breaking(op: str, args: Any = None, payload: Any = None, **more: Any) -> dict[str, Any]:
        if op == "stage_wheels" and not broken:
            broken.append(payload)
            return agent.call(op, args, payload.read(4096), **more)  # the first wheel, and a piece of the second
        return call(op, args, payload, **more)

    monkeypatch.setattr(connection, "call", breaking)
    said: list[str] = []
    with connection.locked("test", 0.0, lambda _line: None, lambda: None):
        send(connection, prospect, said.append)
    assert any("going on with what is missing" in line for line in said)
    assert look(connection, wish(tmp_path), find=find(house)).missing == ()


def test_a_link_that_stays_broken_is_an_error(
    connection: Connection, house: Wheelhouse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prospect = look(connection, wish(tmp_path), find=find(house))
    call = connection.call

    def broken(op: str, *args: Any, **more: Any) -> dict[str, Any]:
        if op == "stage_wheels":
            raise UnreachableError("the link broke", "here")
        return call(op, *args, **more)

    monkeypatch.setattr(connection, "call", broken)
    with pytest.raises(UnreachableError):
        send(connection, prospect, lambda _line: None)
