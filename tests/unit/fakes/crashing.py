"""Die at every step: run an operation of the helper again and again, ended before the k-th call that touches the disk.

``crashing.py < JSON {request, payload (hex), steps: [[op, payload, args]], releases: {digest: unit text}}``. For each
step and each k a forked child runs the operation and leaves by ``os._exit`` just before the k-th such call, as a
kill -9 would have it; then the invariants are checked. After the last k the operation runs to its end. Prints
``{"deaths": {op: n}, "wrong": [text]}``.
"""

from __future__ import annotations

import importlib
import io
import json
import os
import sys
from pathlib import Path
from typing import Any

from ddtree_ops.hostside import staging
from ddtree_ops.hostside.__main__ import OPERATIONS
from ddtree_ops.hostside.context import Context

DISK = ("rename", "link", "symlink", "unlink", "mkdir", "rmdir", "fsync", "fchmod", "open", "write")
DIED = 9


def die_before(count: int) -> None:
    left = [count]

    def guard(real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if left[0] == 0:
                os._exit(DIED)
            left[0] -= 1
            return real(*args, **kwargs)

        return call

    for name in DISK:
        setattr(os, name, guard(getattr(os, name)))


def run(request: dict[str, Any], op: str, payload: bytes, args: dict[str, Any]) -> None:
    module, _ = OPERATIONS[op]
    operation = importlib.import_module(f"ddtree_ops.hostside.{module}").OPS[op]
    with open(os.devnull, "wb") as nowhere:
        operation(Context(request, io.BytesIO(payload), nowhere), args)


def survives(request: dict[str, Any], op: str, payload: bytes, args: dict[str, Any], count: int) -> bool:
    """Whether the operation came to its end before the ``count``-th call."""
    child = os.fork()
    if child == 0:
        die_before(count)
        try:
            run(request, op, payload, args)
        except BaseException as error:  # noqa: BLE001
            sys.__stderr__.write(f"{op} at {count}: {error!r}\n")
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    if code not in (0, DIED):
        raise SystemExit(f"{op} at {count} ended with {code}")
    return code == 0


def broken(root: Path, unit: Path, releases: dict[str, str]) -> list[str]:
    wrong = []
    for instance in (root / "instances").glob("*"):
        link = instance / "current"
        if link.is_symlink() and not link.exists():
            wrong.append("current points nowhere")
        for folder in (instance / "releases").glob("[!.]*"):
            wrong += [f"{folder.name[:8]}: {line}" for line in staging.damage(str(folder))]
        for record in instance.glob("*.json"):
            json.loads(record.read_text())
    if unit.exists() and unit.read_text() not in releases.values():
        wrong.append("the unit is that of no release")
    lock = root / "lock.json"
    if lock.exists() and not json.loads(lock.read_text()).get("owner"):
        wrong.append("the lock names nobody")
    return wrong


def main() -> None:
    spec = json.load(sys.stdin)
    request, releases = spec["request"], spec["releases"]
    unit = Path(request["unit_dir"]) / "sglang-ddtree-qwen.service"
    root = Path(request["root"])
    deaths: dict[str, int] = {}
    wrong: list[str] = []
    for op, payload, args in spec["steps"]:
        count = 0
        while not survives(request, op, bytes.fromhex(payload), args, count):
            wrong += [f"{op} died before call {count}: {text}" for text in broken(root, unit, releases)]
            count += 1
        deaths[op] = deaths.get(op, 0) + count
        wrong += [f"after {op}: {text}" for text in broken(root, unit, releases)]
    print(json.dumps({"deaths": deaths, "wrong": wrong}))


main()
