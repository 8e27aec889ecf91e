"""What patch 0004 adds to ServerArgs, taken from the patch itself and run in a small class of the same kind."""

from __future__ import annotations

import dataclasses
from typing import Any

from ddtree_ops.data import data_dir


def patched_class() -> Any:
    text = (data_dir("patches") / "sglang-0.5.17" / "0004-hide-keys.patch").read_text()
    hunk = text.split("+++ b/sglang/srt/server_args.py\n")[1]
    added = "\n".join(line[1:] for line in hunk.splitlines() if line.startswith("+"))
    fields = "\n".join(f"    {name}: str = None" for name in ("model_path", "api_key", "admin_api_key"))
    space: dict[str, Any] = {"dataclasses": dataclasses}
    exec(f"@dataclasses.dataclass\nclass ServerArgs:\n{fields}\n{added}\n", space)
    return space["ServerArgs"]


def test_keys_are_not_printed_and_stay_readable() -> None:
    args = patched_class()("/m", "planted-key", "planted-admin")
    assert repr(args) == "ServerArgs(model_path='/m', api_key='***', admin_api_key='***')"
    assert args.api_key == "planted-key"
    assert f"{args=}".count("planted") == 0


def test_a_key_that_is_not_set_reads_as_such() -> None:
    assert repr(patched_class()("/m")) == "ServerArgs(model_path='/m', api_key=None, admin_api_key=None)"
    assert patched_class().hide_secrets({"api_key": "x", "port": 1}) == {"api_key": "***", "port": 1}
