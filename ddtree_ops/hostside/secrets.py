"""The secrets of an instance: files that only root (or the scope's user) reads, which systemd hands to the server."""

from __future__ import annotations

import json
import os
import re
from typing import Any

from . import files, lock
from .context import Context, Failure, Op

NAME = re.compile(r"^[A-Za-z][A-Za-z0-9_.]{0,63}$")
MAX_BYTES = 1 << 20


def put_secrets(ctx: Context, args: dict[str, Any]) -> dict[str, Any]:
    """{instance}, with the files as a JSON object in the payload -> {changed: names}.

    Files that are not given stay: the release before may need them when it is taken back.
    """
    given = json.loads(ctx.payload.read(MAX_BYTES).decode("utf-8"))
    folder = os.path.join(ctx.instance_dir(args["instance"]), "secrets")
    files.make_dirs(folder)
    os.chmod(folder, 0o700)  # the folders above it stay open: the server's user must get past them
    changed = []
    with lock.alone(ctx):
        for name, value in sorted(given.items()):
            if not NAME.match(name):
                raise Failure("HelperError", f"{name!r} is not the name of a secret")
            path = os.path.join(folder, name)
            if read(path) != value:
                files.write_file(path, value.encode("utf-8"), 0o600)
                changed.append(name)
    return {"changed": changed}


def read(path: str) -> str | None:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except (FileNotFoundError, UnicodeDecodeError):
        return None


OPS: dict[str, Op] = {"put_secrets": put_secrets}
