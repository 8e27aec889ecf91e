"""Mode auto's flags and environment, what they resolve to, and what is refused."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sglang_setup
import test_plugin_args as flags
import test_plugin_refusals as rules
from sglang_ddtree import config, refusals
from sglang_ddtree.auto import settings
from sglang_ddtree.auto.settings import AutoConfig, AutoResolved
from sglang_ddtree.config import DDTreeConfig

pytestmark = pytest.mark.xdist_group("sglang")
AUTO = ["--speculative-algorithm", "DDTREE", "--speculative-ddtree-mode", "auto"]


@pytest.fixture
def sglang(sglang_src: Path) -> None:
    sglang_setup.load(sglang_src)


@pytest.mark.usefixtures("sglang")
def test_to_sglang_a_server_in_mode_auto_is_a_tree_of_its_widest_width() -> None:
    args = flags.parse(*AUTO, "--speculative-ddtree-widths", "8,64,16", "--speculative-ddtree-topk-cap", "4")
    tree, auto = settings.from_environment()
    assert (tree.mode, tree.budget, tree.children) == ("tree", 64, 4)
    assert auto == AutoConfig((8, 64, 16))
    assert (args.speculative_num_draft_tokens, args.speculative_eagle_topk) == (65, 4)
    assert args.max_speculative_num_draft_tokens == 65


@pytest.mark.usefixtures("sglang")
def test_the_configuration_file_takes_widths(tmp_path: Path) -> None:
    file = tmp_path / "server.yaml"
    file.write_text("speculative-algorithm: DDTREE\nspeculative-ddtree-mode: auto\nspeculative-ddtree-widths: 16,32\n")
    flags.parse("--config", str(file))
    assert settings.from_environment()[1] == AutoConfig((16, 32))


@pytest.mark.usefixtures("sglang")
def test_flags_win_over_the_environment_and_keep_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"mode": "auto", "widths": [8, 16], "choice": "cycle", "topk_cap": 2}
    monkeypatch.setenv(config.ENV, json.dumps(given))
    flags.parse("--speculative-algorithm", "DDTREE", "--speculative-ddtree-widths", "15,24")
    tree, auto = settings.from_environment()
    assert auto == AutoConfig((15, 24), "cycle")
    assert (tree.budget, tree.topk_cap) == (24, 2)


@pytest.mark.usefixtures("sglang")
@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ([*AUTO, "--speculative-ddtree-widths", "8,0"], "each 1 to 255"),
        ([*AUTO, "--speculative-ddtree-widths", "8,300"], "each 1 to 255"),
        ([*AUTO, "--speculative-ddtree-widths", "8,8"], "names a width twice"),
        ([*AUTO, "--speculative-ddtree-budget", "8"], "--speculative-ddtree-widths"),
        ([*flags.TREE, "--speculative-ddtree-widths", "8"], "without --speculative-ddtree-mode auto"),
        (["--speculative-ddtree-widths", "8"], "without --speculative-algorithm DDTREE"),
        ([*AUTO, "--speculative-num-draft-tokens", "5"], "--speculative-num-draft-tokens does not apply"),
    ],
)
def test_contradictions_are_named(argv: list[str], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        flags.parse(*argv)


@pytest.mark.usefixtures("sglang")
def test_a_word_is_no_width(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        flags.parse(*AUTO, "--speculative-ddtree-widths", "8,wide")
    assert "'8,wide' is no list of numbers" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"mode": "auto", "widths": []}, "is empty"),
        ({"mode": "auto", "widths": "8,16"}, "not a list of whole numbers"),
        ({"mode": "auto", "widths": [8, 1.5]}, "not a list of whole numbers"),
        ({"mode": "auto", "choice": "best"}, "choice of mode auto is 'best'"),
        ({"mode": "auto", "budgets": 3}, "unknown settings: budgets"),
        ({"mode": "tree", "choice": "cycle"}, "choice set without"),
    ],
)
def test_a_broken_environment_is_named(values: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        settings.read(values)


def test_the_environment_carries_the_settings_both_ways() -> None:
    for values in ({"mode": "auto", "widths": [4, 20], "keep_spine": True}, {"mode": "tree", "budget": 7}, {}):
        found = settings.read(values)
        assert settings.read(json.loads(settings.to_json(*found))) == found


def test_shapes_resolve_to_what_servers_of_them_would() -> None:
    tree = DDTreeConfig(mode="tree", budget=32, topk_cap=4)
    resolved = AutoResolved(tree, 16, "proven by x", auto=AutoConfig((8, 32)))
    narrow, wide, chain = (resolved.of_shape(shape) for shape in resolved.shapes)
    assert (narrow.config, narrow.rows, narrow.verdict) == (DDTreeConfig("tree", 8, 4), 9, "proven by x")
    assert (wide.config, wide.rows) == (tree, resolved.rows)
    assert (chain.config.budget, chain.config.keep_spine, chain.rows, chain.width) == (15, True, 16, 16)
    assert resolved.slots == 33
    shown = resolved.public()
    assert (shown["mode"], shown["widths"], shown["verify_rows"]) == ("auto", ["8", "32", "chain"], 33)
    assert shown["choose_by"] == "measured"
    assert resolved.tree


@pytest.mark.usefixtures("sglang")
def test_resolved_settings_survive_copies_and_processes() -> None:
    args = SimpleNamespace()
    resolved = AutoResolved(DDTreeConfig(mode="tree", budget=32), 16, auto=AutoConfig((8, 32), "cycle"))
    config.attach(args, resolved)
    assert config.of(copy.deepcopy(args)) == resolved
    assert config.of(pickle.loads(pickle.dumps(args))) == resolved


@pytest.mark.usefixtures("sglang")
def test_resolution_writes_the_widest_and_leaves_the_widths(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.arg_groups import overrides, speculative_hook
    from sglang_ddtree import args

    monkeypatch.setattr(args, "gather_facts", lambda *_: refusals.Facts(architecture="X", hybrid="gdn"))
    monkeypatch.setattr(refusals, "reasons", lambda *_: [])
    monkeypatch.setattr(overrides, "resolved_view", lambda given: given)
    monkeypatch.setattr(speculative_hook, "_resolve_dflash_draft_attention_backend", lambda _args: None)
    monkeypatch.setenv(config.ENV, json.dumps({"mode": "auto", "widths": [8, 16]}))
    given = flags.stub_args(speculative_num_draft_tokens=17)
    resolved = args.resolve(given)
    assert isinstance(resolved, AutoResolved)
    assert (given.speculative_num_draft_tokens, given.speculative_eagle_topk) == (17, 8)
    assert [shape.name for shape in resolved.shapes] == ["8", "16", "chain"]
    monkeypatch.setenv(config.ENV, json.dumps({"mode": "auto", "widths": [4, 8]}))
    with pytest.raises(ValueError, match=r"widest width is 8 .* chain, .* has 9 nodes"):
        args.resolve(flags.stub_args(speculative_num_draft_tokens=9))


def reasons(facts: refusals.Facts, auto: AutoConfig, backend: str = "full", **changes: Any) -> list[str]:
    args = rules.args(**changes)
    args.cuda_graph_config = SimpleNamespace(decode=SimpleNamespace(backend=backend))
    return refusals.reasons(args, DDTreeConfig(mode="tree", budget=max(auto.widths)), facts, auto)


@pytest.mark.parametrize("facts", [rules.DENSE, rules.HYBRID])
def test_a_plain_server_is_admitted(facts: refusals.Facts) -> None:
    assert reasons(facts, AutoConfig()) == []


def test_what_trees_do_not_serve_auto_does_not_either() -> None:
    (reason,) = reasons(rules.DENSE, AutoConfig(), page_size=16)
    assert "--page-size 1" in reason


def test_what_auto_does_not_serve() -> None:
    (reason,) = reasons(rules.DENSE, AutoConfig((4, 8)))
    assert "at least 15" in reason
    several = dataclasses.replace(rules.DENSE, tp=2, proof="two.json")
    (reason,) = reasons(several, AutoConfig(), tp_size=2)
    assert "--tensor-parallel-size 1" in reason
    (reason,) = reasons(rules.DENSE, AutoConfig(), backend="disabled")
    assert "--cuda-graph-backend-decode full" in reason
    assert reasons(rules.DENSE, AutoConfig(choice="cycle"), backend="disabled") == []
    kept = refusals.Facts("Q", hybrid="gdn", drafter_block=16, proof="x", states="records", heads=(128, 128),
                          activation="silu")  # fmt: skip
    assert reasons(kept, AutoConfig()) == []
    (reason,) = reasons(kept, AutoConfig((16, 65)))
    assert "the budget is 65" in reason
    assert "no wider width in mode auto" in reason
    assert "in mode auto cannot serve" in refusals.message(DDTreeConfig(mode="tree"), [reason], AutoConfig())


def test_an_unproven_hybrid_is_refused_in_auto_as_in_tree() -> None:
    why = "proven.json#0 is about trees of one width, not about mode auto, which changes it"
    facts = dataclasses.replace(rules.HYBRID, proof=None, proof_reasons=(why,))
    (reason,) = reasons(facts, AutoConfig())
    assert "trees of one width" in reason
    assert "--speculative-ddtree-allow-hybrid-unsafe" in reason


@pytest.mark.usefixtures("sglang")
@pytest.mark.parametrize(("kept", "name"), [("snapshots", "proven.json#0"), ("records", "proven.json#1")])
def test_the_shipped_records_admit_auto_as_they_admit_trees(tmp_path: Path, kept: str, name: str) -> None:
    from sglang_ddtree import args, proofs

    tree = DDTreeConfig(mode="tree", budget=32, proofs_dir=str(tmp_path))
    engine = proofs.engine_digest(states=kept)
    asked = proofs.Combination("Qwen3_5ForCausalLM", "triton", "9.0", engine, None, 32, states=kept)
    changing = dataclasses.replace(asked, auto=proofs.auto_digest(states=kept))
    for wanted in (asked, changing):
        assert args.find_proof(tree, wanted)[0] == name
        assert args.find_proof(tree, dataclasses.replace(wanted, budget=65))[0] is None
    other = dataclasses.replace(
        changing, auto=proofs.auto_digest(states="records" if kept == "snapshots" else "snapshots")
    )
    assert args.find_proof(tree, other)[0] is None


@pytest.mark.usefixtures("sglang")
def test_a_record_of_trees_of_one_width_does_not_admit_auto(tmp_path: Path) -> None:
    """A record of this host that names auto's sources does."""
    from sglang_ddtree import args, proofs

    tree = DDTreeConfig(mode="tree", budget=32, proofs_dir=str(tmp_path))
    asked = proofs.Combination("Qwen3_5ForCausalLM", "triton", "12.0", proofs.engine_digest(), None, 32)
    changing = dataclasses.replace(asked, auto=proofs.auto_digest())
    record = {**proofs.shipped()[0][1], "compute_capability": "12.0"}
    del record["auto"]
    (tmp_path / "mine.json").write_text(json.dumps(record))
    assert args.find_proof(tree, asked)[0] == "mine.json"
    found, why = args.find_proof(tree, changing)
    assert found is None
    assert "mine.json is about trees of one width" in " ".join(why)
    (tmp_path / "mine.json").write_text(json.dumps({**record, "auto": proofs.auto_digest()}))
    assert args.find_proof(tree, changing)[0] == "mine.json"
