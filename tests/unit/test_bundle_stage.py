"""The two halves of staging together: what the client sends is what the helper takes."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ddtree_ops.bundle import Bundle, check_engine, stage_engine
from ddtree_ops.bundle.build import _records, put
from ddtree_ops.bundle.manifest import EngineManifest
from ddtree_ops.hostside import engine
from ddtree_ops.hostside.context import Context

PLUGIN = {"sglang_ddtree/plugin.py": b"def register(): ...\n"}


def bundle(cache: Path, files: dict[str, bytes]) -> Bundle:
    made = EngineManifest(sglang="0.5.17", patches=(), base={}, patched={}, new=_records(files))
    for path, data in files.items():
        put(cache / made.new[path].sha256, data)
    return Bundle(made, cache)


class Host:
    """An agent whose helper runs in this process; it records what travelled."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.calls: list[tuple[str, int]] = []

    def call(
        self,
        op: str,
        args: dict[str, Any] | None = None,
        payload: bytes | None = None,
        *,
        deadline_s: float,
        on_event: Callable[[dict[str, Any]], None] | None = None,
    ) -> dict[str, Any]:
        assert deadline_s > 0
        del on_event
        self.calls.append((op, len(payload or b"")))
        context = Context({"root": str(self.root)}, io.BytesIO(payload or b""), io.BytesIO())
        return engine.OPS[op](context, args or {})


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    package = tmp_path / "venv/sglang"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    found = {"version": "0.5.17", "package": str(package), "tag": "cpython-311-x86_64"}
    monkeypatch.setattr(engine, "installed_sglang", lambda *_: found)
    return Host(tmp_path / "root")


def test_first_time_everything_then_nothing_then_the_difference(host: Host, tmp_path: Path) -> None:
    first = bundle(tmp_path / "blobs", PLUGIN | {"sglang_ddtree/tree.py": b"x = 1\n"})
    state = check_engine(host, first, "/venv")
    assert (state.staged, len(state.blobs), state.sglang, state.python) == (False, 2, "0.5.17", "cpython-311-x86_64")
    done = stage_engine(host, first, "/venv")
    assert (done.staged, done.linked, done.received, done.engine) == (True, 1, 2, first.digest)
    assert "1 files linked, 2 sent" in str(done)
    again = stage_engine(host, first, "/venv")
    assert again.staged is False
    assert host.calls[-1] == ("engine_missing", 0), "an engine that is there costs one question"
    second = bundle(tmp_path / "blobs", PLUGIN | {"sglang_ddtree/tree.py": b"x = 2\n"})
    done = stage_engine(host, second, "/venv")
    assert (done.received, done.reused) == (1, 1)
    assert (tmp_path / "root/engines" / second.digest / "site/sglang_ddtree/tree.py").read_bytes() == b"x = 2\n"
