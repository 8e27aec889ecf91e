"""Which hybrid servers are admitted with the prefix cache: command lines resolved by SGLang's own ServerArgs, with this
plugin's rules and records, as on a host with an H200; and that planning says the same of them.
"""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import parse_arms
import pytest
import sglang_setup
from sglang_ddtree import proofs
from sglang_ddtree.parity import models, sections

from ddtree_ops.backends import KEEPS_STATES, Case, parse_flags, refusals
from ddtree_ops.model import Mode
from ddtree_ops.proofs import proven_by
from ddtree_ops.shapes import parse_model

ROOT = Path(__file__).parents[2]
UNSAFE = "--speculative-ddtree-allow-hybrid-unsafe"
WINDOWS = {"SGLANG_MAMBA_CONV_DTYPE": "float32"}  # the arms compute in float32, and records need windows of that type
TEXT, VISION = "Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"


def record(states: str, **changes: Any) -> dict[str, Any]:
    """What a self-test on this host would leave."""
    made = next(found for _name, found in proofs.shipped() if found["states"] == states)
    return {**made, "prefix_cache": {"extra_buffer": 64}, **changes}


def without(made: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in made.items() if key != name}


def served(kind: str = "tree", states: str = "snapshots", budget: int = 16, *more: str) -> list[str]:
    """A server's arguments that leave admission to the records, with the prefix cache as SGLang has it by itself."""
    section = "hybrid/auto" if kind == "auto" else "hybrid/selftest"
    arm = next(arm for arm in sections.parse(section) if arm.kind == kind and not arm.extra_buffer)
    argv = [word for word in arm.argv(Path("models")) if word not in (UNSAFE, "--disable-radix-cache")]
    for flag, value in (("--speculative-ddtree-states", states), ("--speculative-ddtree-budget", str(budget))):
        if flag in argv:
            argv[argv.index(flag) + 1] = value
    return [*argv, *more]


NONE = "nobody has proven states along tree paths in the prefix cache"
OFF = "--disable-radix-cache"
STRATEGY = ("--mamba-radix-cache-strategy",)
# name: (arguments, the records of the host, what the refusal says, or nothing). On the host is nothing but what ships,
# unless a record is named; every record here is about the H200.
CASES: dict[str, tuple[list[str], list[dict[str, Any]], tuple[str, ...]]] = {
    "as it ships": (served(), [], ()),
    "as it ships, records": (served("tree", "records"), [], ()),
    "wider than it ships": (served("tree", "snapshots", 32), [], (NONE, "of up to 16 nodes, not 32", "self-test", OFF)),
    "wider, off": (served("tree", "snapshots", 32, OFF), [], ()),
    "wider, the flag": (served("tree", "snapshots", 32, UNSAFE), [], ()),
    "wider, a record": (served("tree", "records", 32), [record("records")], ()),
    "a record of the other way": (served("tree", "records", 32), [record("snapshots")], (NONE, "self-test")),
    "a record without it": (
        served("tree", "snapshots", 32), [without(record("snapshots"), "prefix_cache")],
        (NONE, "0.json is about trees without the prefix cache"),
    ),
    "auto": (served("auto"), [record("snapshots")], (NONE, "runs together", "--speculative-ddtree-mode tree", OFF)),
    "auto, off": (served("auto", "snapshots", 16, OFF), [], ()),
    "auto, the flag": (served("auto", "snapshots", 16, UNSAFE), [], ()),
    "no_buffer": (
        served("tree", "snapshots", 16, UNSAFE, *STRATEGY, "no_buffer", "--disable-overlap-schedule"),
        [record("snapshots")], ("no_buffer", "extra_buffer"),
    ),
    "no_buffer for want of overlap": (
        served("tree", "snapshots", 16, "--disable-overlap-schedule"), [record("snapshots")], ("no_buffer",),
    ),
    "lazy": (
        served("tree", "snapshots", 16, UNSAFE, *STRATEGY, "extra_buffer_lazy"),
        [record("snapshots")], ("lazily",),
    ),
    "int8": (
        served("tree", "snapshots", 16, "--enable-int8-mamba-checkpoint"), [record("snapshots")],
        ("--enable-int8-mamba-checkpoint",),
    ),
    "linear": (served("linear"), [], ()),
}  # fmt: skip
# SGLang keeps no states for the text model by itself.
TEXT_CASES: dict[str, tuple[list[str], list[dict[str, Any]], tuple[str, ...]]] = {
    "text": (served(), [record("snapshots")], ("keeps no recurrent states", OFF)),
    "text, the flag": (served("tree", "snapshots", 16, UNSAFE), [], ("keeps no recurrent states", OFF)),
    "text, off": (served("tree", "snapshots", 16, OFF), [], ()),
}


@pytest.fixture(scope="module")
def settled(sglang_src: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    if absent := sglang_setup.missing():
        pytest.skip(f"tests/engine/requirements.txt is not installed: no {', '.join(absent)}")
    root = tmp_path_factory.mktemp("admission")
    models.write(root / "models", ("hybrid", "drafter"))
    asked = {}
    # the architecture stays listed, once the first of CASES has asked for it
    for number, (name, (argv, records, _says)) in enumerate({**TEXT_CASES, **CASES}.items()):
        folder = root / f"proofs-{number}"
        folder.mkdir()
        for place, kept in enumerate(records):
            (folder / f"{place}.json").write_text(json.dumps(kept))
        where = ["--speculative-ddtree-proofs-dir", str(folder)]
        asked[name] = ([word.replace("models/", f"{root}/models/") for word in argv] + where, name in CASES, WINDOWS)
    return parse_arms.resolved(asked, sglang_src)


@pytest.mark.parametrize("name", [*CASES, *TEXT_CASES])
def test_who_is_admitted_with_the_prefix_cache(settled: dict[str, Any], name: str) -> None:
    _argv, _records, says = {**CASES, **TEXT_CASES}[name]
    error = settled[name].get("error", "")
    assert bool(error) == bool(says), error
    for part in says:
        assert part in error


@pytest.mark.parametrize("name", [*CASES, *TEXT_CASES])
def test_planning_says_the_same(name: str) -> None:
    argv, records, says = {**CASES, **TEXT_CASES}[name]
    flags = parse_flags(argv)
    mode = Mode(flags["--speculative-ddtree-mode"])
    config = {**models.hybrid(), "architectures": [VISION if name in CASES else TEXT]}
    case = Case(mode, flags, parse_model(json.dumps(config), "/m"), (9, 0), env=WINDOWS)
    budget = int(flags.get("--speculative-ddtree-budget") or 64)
    known = budget, None, [(f"{place}.json", kept) for place, kept in enumerate(records)]
    admitted = not mode.verifies_trees or UNSAFE in flags or proven_by(case, *known, cached=True) is not None
    assert (not refusals(case) and admitted) is not bool(says)


def test_planning_knows_whose_states_sglang_keeps(sglang_src: Path) -> None:
    tree = ast.parse((sglang_src / "sglang/srt/arg_groups/overrides.py").read_text())
    found = {
        node.targets[0].id: ast.literal_eval(node.value.args[0])
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and isinstance(node.value, ast.Call)
        and node.targets[0].id.startswith("_MAMBA_")
    }  # fmt: skip
    assert found["_MAMBA_EXTRA_BUFFER_ARCHS"] == KEEPS_STATES
