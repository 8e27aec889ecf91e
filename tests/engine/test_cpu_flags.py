"""The CPU engine's flags are SGLang's: `flags.json` is what the pinned sources give.

After a change of the pinned version: DDTREE_REWRITE=1 python -m pytest tests/engine/test_cpu_flags.py
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import pytest
from cpu_pair import FOLDER
from sglang_ddtree.cpu import args

from ddtree_ops.lab.standin import flags as standin_flags

KINDS = {None: "str", int: "int", float: "float", str: "str", standin_flags.human_readable_int: "size"}


def described(action: argparse.Action) -> dict[str, Any]:
    """One flag as JSON."""
    entry: dict[str, Any] = {"names": list(action.option_strings), "dest": action.dest}
    if isinstance(action, argparse.BooleanOptionalAction):
        entry["kind"] = "switch-or-not"
        entry["names"] = [name for name in entry["names"] if not name.startswith("--no-")]
    elif action.nargs == 0:
        entry["kind"] = "switch"
    else:
        entry["kind"] = KINDS[action.type]
        entry |= {key: getattr(action, key) for key in ("nargs", "const") if getattr(action, key) is not None}
        entry |= {"choices": list(action.choices)} if action.choices else {}
    entry |= {"required": True} if action.required else {}
    default = action.default
    if default not in (None, argparse.SUPPRESS):
        entry["default"] = default
    return entry


def test_the_flags_are_those_of_the_pinned_sglang(sglang_src: Path) -> None:
    parser = standin_flags.build_parser(str(sglang_src / "sglang"), None)
    found = [described(action) for action in parser._actions if action.dest != "help"]
    text = "[\n" + ",\n".join(json.dumps(entry) for entry in found) + "\n]\n"
    if os.environ.get("DDTREE_REWRITE"):
        args.FLAGS.write_text(text)
    assert args.FLAGS.read_text() == text
    assert len(found) > 400


MODEL = ["--model-path", str(FOLDER / "target")]
SPEC = ["--speculative-draft-model-path", str(FOLDER / "drafter"), "--speculative-algorithm"]


def test_modes_and_numbers_resolve_as_the_plugin_resolves_them() -> None:
    plain = args.resolve([*MODEL, "--port", "31000"])
    assert (plain.mode.name, plain.ddtree, plain.rows) == ("ar", None, 0)
    assert (plain.args["context_length"], plain.context) == (None, 4096)
    linear = args.resolve([*MODEL, *SPEC, "DFLASH"])
    assert (linear.mode.name, linear.rows, linear.args["speculative_num_draft_tokens"]) == ("linear", 16, 16)
    tree = args.resolve(
        [*MODEL, *SPEC, "DDTREE", "--speculative-ddtree-mode", "tree", "--speculative-ddtree-budget", "4"]
    )
    assert tree.ddtree == {
        "mode": "tree", "budget": 4, "topk_cap": 4, "keep_spine": False, "allow_hybrid_unsafe": False,
        "block_size": 16, "verify_rows": 5, "hybrid_verdict": "the reference itself", "states": "records",
    }  # fmt: skip
    kept = [
        resolved.ddtree["states"]
        for mode, more in (("tree", ["--speculative-ddtree-states", "snapshots"]), ("shadow-linear", []),
                           ("tree", ["--speculative-ddtree-budget", "65"]))
        if (resolved := args.resolve([*MODEL, *SPEC, "DDTREE", "--speculative-ddtree-mode", mode, *more])).ddtree
    ]  # fmt: skip
    assert kept == ["snapshots"] * 3
    assert tree.args["speculative_eagle_topk"] == 4


def test_flags_without_effect_are_named() -> None:
    launch = args.resolve([*MODEL, "--mem-fraction-static", "0.8", "--disable-radix-cache"])
    assert launch.unused == ("disable_radix_cache", "mem_fraction_static")


@pytest.mark.parametrize(
    "argv",
    [
        [*MODEL, "--speculative-ddtree-mode", "tree"],
        [*MODEL, "--speculative-algorithm", "EAGLE"],
        [*MODEL, *SPEC, "DDTREE", "--speculative-ddtree-budget", "0"],
        [*MODEL, *SPEC, "DDTREE", "--speculative-ddtree-topk-cap", "17"],
        ["--model-path", "/nowhere"],
    ],
)
def test_what_sglang_refuses_is_refused(argv: list[str]) -> None:
    with pytest.raises(args.Refusal):
        args.resolve(argv)


def test_mode_auto_is_refused_with_the_reason() -> None:
    with pytest.raises(args.Refusal, match="speed means nothing; use mode tree"):
        args.resolve([*MODEL, *SPEC, "DDTREE", "--speculative-ddtree-mode", "auto", "--speculative-ddtree-widths", "8"])


def test_an_unknown_flag_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        args.resolve([*MODEL, "--speculative-ddtre-budget", "4"])
    assert "unrecognized arguments: --speculative-ddtre-budget" in capsys.readouterr().err
