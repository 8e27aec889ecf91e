"""Which record proves which combination."""

from __future__ import annotations

import ast
import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from sglang_ddtree import proofs
from sglang_ddtree.parity import suite
from sglang_ddtree.proofs import Combination

ROOT = Path(__file__).parents[2]

WANTED = Combination("Qwen3_5ForCausalLM", "triton", "12.0", "e" * 64, "580.1", 32)
RECORD = {"schema": 1, "engine": "e" * 64, "architecture": "Qwen3_5ForCausalLM", "backend": "triton",
          "compute_capability": "12.0", "driver": "580.1", "max_budget": 64, "passed": True}  # fmt: skip


def test_a_record_of_this_very_combination_proves_it() -> None:
    assert proofs.reject(RECORD, WANTED) is None


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"schema": 2}, "schema"),
        ({"passed": False}, "did not pass"),
        ({"passed": "yes"}, "did not pass"),
        ({"engine": "f" * 64}, "engine"),
        ({"architecture": "Qwen3NextForCausalLM"}, "architecture"),
        ({"backend": "fa3"}, "backend"),
        ({"compute_capability": "9.0"}, "compute_capability"),
        ({"driver": "570.0"}, "driver"),
        ({"max_budget": 16}, "budgets up to 16"),
        ({"max_budget": None}, "budgets"),
    ],
)
def test_any_other_record_does_not(change: dict[str, Any], says: str) -> None:
    reason = proofs.reject({**RECORD, **change}, WANTED)
    assert reason is not None
    assert says in reason


def test_a_record_without_a_driver_holds_under_any() -> None:
    assert proofs.reject({k: v for k, v in RECORD.items() if k != "driver"}, WANTED) is None
    assert proofs.reject(RECORD, dataclasses.replace(WANTED, driver=None)) is None


def test_the_first_record_that_holds_is_named_and_the_others_explained(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("{broken")
    (tmp_path / "b.json").write_text(json.dumps({**RECORD, "passed": False}))
    (tmp_path / "c.json").write_text(json.dumps(RECORD))
    (tmp_path / "notes.txt").write_text("no record")
    name, reasons = proofs.judge(WANTED, proofs.read_records(tmp_path))
    assert name == "c.json"
    assert [r.split()[0] for r in reasons] == ["a.json", "b.json"]


def test_no_folder_is_no_record(tmp_path: Path) -> None:
    assert proofs.read_records(tmp_path / "absent") == []


def test_the_vision_wrapper_is_proven_by_the_layers_it_wraps() -> None:
    wrapper = dataclasses.replace(WANTED, architecture="Qwen3_5ForConditionalGeneration")
    assert proofs.reject(RECORD, wrapper) is None
    assert proofs.reject({**RECORD, "architecture": wrapper.architecture}, WANTED) is not None


def test_an_edit_of_what_a_round_computes_withdraws_a_proof(tmp_path: Path) -> None:
    package = tmp_path / "p"
    shutil.copytree(Path(proofs.__file__).parent, package)
    first = proofs.engine_digest(package)
    assert first == proofs.engine_digest()
    (package / "refusals.py").write_text("changed")
    assert proofs.engine_digest(package) == first
    (package / "kernels" / "accept.py").write_text("changed")
    assert proofs.engine_digest(package) != first


BYSTANDERS = {
    "__init__.py",
    "auto/__init__.py",
    "args.py",
    "keeping.py",
    "metrics.py",
    "proofs.py",
    "refusals.py",
    "kernels/__init__.py",
    "kernels/shadow.py",
}

# args.py reads there which widths there are; a tree of one width needs nothing of them.
WIDTHS = {"auto/settings.py", "auto/shapes.py"}
# Which width runs, and what is counted for that: not what a round of it computes.
CHOICE = {"auto/chooser.py", "auto/costs.py", "auto/policy.py", "auto/report.py", "kernels/nested.py"}


def imported(*first: str) -> set[str]:
    """The package's files that these ones import, themselves included and bystanders left out."""
    root = Path(proofs.__file__).parent
    seen: set[str] = set()
    waiting = list(first)
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        for node in ast.walk(ast.parse((root / name).read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sglang_ddtree"):
                base = (node.module or "").split(".")[1:]
                for path in ["/".join(base) + ".py", *("/".join([*base, alias.name]) + ".py" for alias in node.names)]:
                    if (root / path).is_file():
                        waiting.append(path)
    return seen - BYSTANDERS


def test_the_proof_covers_all_that_the_worker_imports() -> None:
    """What is left out decides whether a server starts, or counts, but not what a tree round computes."""
    chosen = {"states.py"}  # args.py reads there how states are kept; snapshots need nothing else of it
    assert imported("worker.py", "algo.py", "hooks.py") - chosen - WIDTHS == set(proofs.STATE_SOURCES)


def test_the_proof_of_records_covers_what_they_import_as_well() -> None:
    assert imported("records_worker.py", "records.py") - WIDTHS == {*proofs.STATE_SOURCES, *proofs.RECORD_SOURCES}


def test_the_proof_of_changing_widths_covers_what_they_import_as_well() -> None:
    found = imported("auto/worker.py", "worker.py", "algo.py", "hooks.py")
    assert found - CHOICE == {*proofs.STATE_SOURCES, *proofs.AUTO_SOURCES}
    found = imported("auto/records.py", "auto/worker.py", "worker.py", "algo.py", "hooks.py")
    kept = {*proofs.RECORD_SOURCES, *proofs.AUTO_RECORD_SOURCES}
    assert found - CHOICE == {*proofs.STATE_SOURCES, *proofs.AUTO_SOURCES, *kept}


def test_mode_auto_needs_a_record_of_changing_widths() -> None:
    wanted = dataclasses.replace(WANTED, auto="a" * 64)
    reason = proofs.reject(RECORD, wanted)
    assert reason is not None
    assert "trees of one width" in reason
    assert proofs.reject({**RECORD, "auto": "a" * 64}, wanted) is None
    other = proofs.reject({**RECORD, "auto": "b" * 64}, wanted)
    assert other is not None
    assert "auto 'b" in other
    assert "budgets up to 64" in str(
        proofs.reject({**RECORD, "auto": "a" * 64}, dataclasses.replace(wanted, budget=65))
    )
    assert proofs.reject({**RECORD, "auto": "a" * 64}, WANTED) is None  # it proves the trees of one width as well


def test_an_edit_of_how_widths_change_withdraws_proofs_of_auto_alone(tmp_path: Path) -> None:
    package = tmp_path / "p"
    shutil.copytree(Path(proofs.__file__).parent, package)
    tree, auto = proofs.engine_digest(package), proofs.auto_digest(package)
    (package / "auto" / "policy.py").write_text("changed")
    assert proofs.auto_digest(package) == auto
    kept = proofs.auto_digest(package, "records")
    (package / "auto" / "records.py").write_text("changed")
    assert proofs.auto_digest(package) == auto != kept
    assert proofs.auto_digest(package, "records") != kept
    (package / "auto" / "captures.py").write_text("changed")
    assert proofs.auto_digest(package) != auto
    assert proofs.engine_digest(package) == tree


def test_an_edit_of_the_record_kernels_withdraws_proofs_of_records_alone(tmp_path: Path) -> None:
    package = tmp_path / "p"
    shutil.copytree(Path(proofs.__file__).parent, package)
    snapshots, records = proofs.engine_digest(package), proofs.engine_digest(package, "records")
    assert snapshots != records
    (package / "kernels" / "gdn_commit.py").write_text("changed")
    assert proofs.engine_digest(package) == snapshots
    assert proofs.engine_digest(package, "records") != records


def test_the_ranks_of_a_model_are_kept_together_by_sources_that_its_proof_covers(tmp_path: Path) -> None:
    assert imported("ranks.py") == set(proofs.RANK_SOURCES)
    package = tmp_path / "p"
    shutil.copytree(Path(proofs.__file__).parent, package)
    one, two = proofs.engine_digest(package), proofs.engine_digest(package, tp=2)
    both = proofs.engine_digest(package, "records", tp=2)
    assert len({one, two, both, proofs.engine_digest(package, "records")}) == 4
    (package / "ranks.py").write_text("changed")
    assert proofs.engine_digest(package) == one
    assert proofs.engine_digest(package, tp=2) != two
    assert proofs.engine_digest(package, "records", tp=2) != both


def test_a_proof_holds_for_its_number_of_gpus_alone() -> None:
    two = dataclasses.replace(WANTED, tp=2)
    assert proofs.reject({**RECORD, "tp": 2}, two) is None
    assert proofs.reject({**RECORD, "tp": 1}, WANTED) is None
    assert proofs.reject(RECORD, two) == "is about a model on 1 GPU, not on 2"
    assert proofs.reject({**RECORD, "tp": 2}, WANTED) == "is about a model on 2 GPUs, not on 1"
    assert proofs.reject({**RECORD, "tp": 4}, two) == "is about a model on 4 GPUs, not on 2"


def test_a_dense_target_on_several_gpus_is_proven_by_the_ranks_of_any_architecture() -> None:
    dense = dataclasses.replace(WANTED, architecture="LlamaForCausalLM", tp=2, dense=True)
    assert proofs.reject({**RECORD, "tp": 2}, dense) is None
    assert "architecture" in (proofs.reject({**RECORD, "tp": 2}, dataclasses.replace(dense, dense=False)) or "")
    assert "on 1 GPU" in (proofs.reject(RECORD, dense) or "")


def test_what_needs_a_proof() -> None:
    assert [proofs.needs_proof(hybrid, tp) for hybrid in (False, True) for tp in (1, 2)] == [False, True, True, True]


def test_a_proof_holds_for_the_way_states_are_kept_alone() -> None:
    kept = dataclasses.replace(WANTED, states="records")
    assert proofs.reject({**RECORD, "states": "records"}, kept) is None
    assert proofs.reject({**RECORD, "states": "snapshots"}, WANTED) is None
    for record, wanted in ((RECORD, kept), ({**RECORD, "states": "records"}, WANTED)):
        assert "states kept as" in (proofs.reject(record, wanted) or "")


CACHED = {**RECORD, "prefix_cache": {"extra_buffer": 32}}


def test_a_proof_holds_for_the_prefix_cache_only_where_it_says_so() -> None:
    wanted = dataclasses.replace(WANTED, prefix_cache="extra_buffer")
    assert proofs.reject(RECORD, wanted) == "is about trees without the prefix cache"
    assert proofs.reject(CACHED, wanted) is None
    assert proofs.reject(CACHED, WANTED) is None  # it proves trees without it as well
    other = proofs.reject(CACHED, dataclasses.replace(wanted, prefix_cache="no_buffer"))
    assert other == "is about the prefix cache with {'extra_buffer': 32}, not with 'no_buffer'"
    wide = dataclasses.replace(wanted, budget=33)
    assert proofs.reject(CACHED, wide) == "covers the prefix cache under trees of up to 32 nodes, not 33"
    assert proofs.reject(CACHED, dataclasses.replace(wide, prefix_cache=None)) is None
    vision = dataclasses.replace(wanted, architecture="Qwen3_5ForConditionalGeneration")
    assert proofs.reject(CACHED, vision) is None


@pytest.mark.parametrize("said", [{}, [], "extra_buffer", ["extra_buffer"], {"extra_buffer": None}])
def test_a_record_that_says_it_in_another_form_proves_nothing_of_the_prefix_cache(said: Any) -> None:
    wanted = dataclasses.replace(WANTED, prefix_cache="extra_buffer")
    assert "is about the prefix cache with" in (proofs.reject({**RECORD, "prefix_cache": said}, wanted) or "")


def test_no_record_is_about_mode_auto_with_the_prefix_cache() -> None:
    both = {**CACHED, "auto": "a" * 64}
    wanted = dataclasses.replace(WANTED, auto="a" * 64)
    assert proofs.reject(both, wanted) is None
    assert "runs together" in (proofs.reject(both, dataclasses.replace(wanted, prefix_cache="extra_buffer")) or "")


def test_a_shipped_record_vouches_for_the_sources_it_ships_with() -> None:
    """A stale one would admit nothing here and yet look like a promise to whoever plans a deploy."""
    for _name, record in proofs.shipped():
        assert record["passed"] is True
        assert record["engine"] == proofs.engine_digest(
            states=record.get("states", "snapshots"), tp=record.get("tp", 1)
        )
        kept = json.loads((ROOT / record["suite"]["results"]).read_text())
        said = {name: value for name, value in record.items() if name not in ("suite", "prefix_cache")}
        assert {name: kept.get(name) for name in said} == said
        assert record["suite"]["driver"] == kept["driver"]


def test_a_shipped_record_says_of_the_prefix_cache_what_arms_showed() -> None:
    """Its own, or others of the suite with the same sources, GPU and driver, whose rows are kept."""
    results = json.loads((ROOT / "benchmarks/results/gpu.json").read_text())
    for _name, record in proofs.shipped():
        own = json.loads((ROOT / record["suite"]["results"]).read_text())
        if own.get("prefix_cache") == record["prefix_cache"]:
            continue
        shown = record["suite"]["prefix_cache"]
        stage = results["stages"][shown["stage"]]
        assert stage["commit"] == shown["commit"]
        rows = [row for row in stage["result"] if row["arm"] in shown["arms"]]
        assert [row["kind"] for row in rows] == ["ar", "tree"]
        assert all(suite.about_prefix_cache(row) for row in rows)
        assert rows[1]["states"] == record["states"]
        served = [{**row, "prefix_cache": "extra_buffer"} for row in rows]  # these arms' only strategy
        assert suite.prefix_cache_key(served) == {"prefix_cache": record["prefix_cache"]}
