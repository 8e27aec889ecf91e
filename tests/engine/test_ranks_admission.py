"""Which servers with a model on two GPUs are admitted: command lines resolved by SGLang's own ServerArgs, with this
plugin's rules and records, as on a host with two H200s.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import parse_arms
import pytest
import sglang_setup
from sglang_ddtree import proofs
from sglang_ddtree.parity import models, plan, sections

ROOT = Path(__file__).parents[2]
UNSAFE = "--speculative-ddtree-allow-hybrid-unsafe"
TP1, TP2 = (
    {**proofs.shipped()[0][1], "tp": tp, "engine": proofs.engine_digest(tp=tp), "max_budget": 16} for tp in (1, 2)
)

RECORDS = {**TP2, "states": "records", "engine": proofs.engine_digest(states="records", tp=2)}


def served(target: str, tp: int, kind: str = "tree", budget: int = 16) -> list[str]:
    """A server's arguments that leave admission to the records."""
    arms = {arm.kind: arm for arm in sections.gather([f"{target}/selftest"]) if not arm.extra_buffer}
    folder = Path("models")  # replaced by the fixture
    arm = dataclasses.replace(plan.spread(arms[kind], tp), budget=budget)
    return [word for word in arm.argv(folder) if word != UNSAFE]


def unsaid(argv: list[str], dtype: str = "bfloat16") -> list[str]:
    """The same arguments without a word about states. The suite's are in float32, and windows in bfloat16."""
    at = argv.index("--speculative-ddtree-states")
    return [*argv[:at], *argv[at + 2 :], "--dtype", dtype]


# name: (arguments, the records of the host, what the refusal says, or nothing)
CASES: dict[str, tuple[list[str], list[dict[str, Any]], tuple[str, ...]]] = {
    "a record of one GPU": (served("hybrid", 2), [TP1], ("about a model on 1 GPU, not on 2", "--tp 2")),
    "no record": (served("hybrid", 2), [], ("proven.json#0 is about a model on 1 GPU, not on 2", "with 2 GPUs")),
    "a record of two": (served("hybrid", 2), [TP2], ()),
    "records by itself": (unsaid(served("hybrid", 2)), [RECORDS], ()),
    "records by itself, snapshots proven": (
        unsaid(served("hybrid", 2)),
        [TP2],
        ("states kept as 'snapshots', not 'records'", "tree states, kept as records,"),
    ),
    "snapshots by itself, in float32": (unsaid(served("hybrid", 2), "float32"), [TP2], ()),
    "snapshots by itself": (unsaid(served("hybrid", 2, budget=65)), [{**TP2, "max_budget": 65}], ()),
    "dense by itself": (unsaid(served("dense", 2)), [TP2], ()),
    "a record of two of narrower trees": (served("hybrid", 2, budget=32), [TP2], ("covers budgets up to 16",)),
    "the flag": ([*served("hybrid", 2), UNSAFE], [], ()),
    "dense, no record": (served("dense", 2), [], ("is to run on 2 GPUs", "--tensor-parallel-size 1", "--tp 2")),
    "dense, a record of two": (served("dense", 2), [TP2], ()),
    "dense, the flag": ([*served("dense", 2), UNSAFE], [], ()),
    "dense, one GPU": (served("dense", 1), [], ()),
    "linear": (served("hybrid", 2, "linear"), [], ()),
}


KEPT = {
    "records by itself": "records",
    "snapshots by itself": "snapshots",
    "snapshots by itself, in float32": "snapshots",
    "dense by itself": "snapshots",
}


@pytest.fixture(scope="module")
def settled(sglang_src: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    if absent := sglang_setup.missing():
        pytest.skip(f"tests/engine/requirements.txt is not installed: no {', '.join(absent)}")
    root = tmp_path_factory.mktemp("admission")
    models.write(root / "models", ("hybrid", "dense", "drafter"))
    asked = {}
    for number, (name, (argv, records, _says)) in enumerate(CASES.items()):
        folder = root / f"proofs-{number}"
        folder.mkdir()
        for place, record in enumerate(records):
            (folder / f"{place}.json").write_text(json.dumps(record))
        mode = ["--speculative-ddtree-proofs-dir", str(folder)]
        asked[name] = ([word.replace("models/", f"{root}/models/") for word in argv] + mode, False)
    return parse_arms.resolved(asked, sglang_src)


@pytest.mark.parametrize("name", CASES)
def test_who_is_admitted_on_two_gpus(settled: dict[str, Any], name: str) -> None:
    _argv, _records, says = CASES[name]
    error = settled[name].get("error", "")
    assert bool(error) == bool(says), error
    for part in says:
        assert part in error


@pytest.mark.parametrize("name", KEPT)
def test_how_states_are_kept_where_nobody_said_it(settled: dict[str, Any], name: str) -> None:
    assert settled[name]["states"] == KEPT[name]
