"""How states are kept where nobody says it: the engine's rule on SGLang's own reading of a model, and what planning
makes of the same configuration file.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sglang_setup
import test_plugin_args as flags
from sglang_ddtree import config, keeping, refusals, states
from sglang_ddtree.parity import models

from ddtree_ops import keeping as planned
from ddtree_ops.model import Mode
from ddtree_ops.shapes import parse_model

pytestmark = pytest.mark.xdist_group("sglang")
TARGET = keeping.Target("Qwen3_5ForCausalLM", True, (128, 128), "silu", ("bfloat16", "bfloat16"))
SMALL = {"linear_key_head_dim": 16, "linear_value_head_dim": 16}


@pytest.fixture
def _sglang(sglang_src: Path) -> None:
    sglang_setup.load(sglang_src)


def wrapped(**more: Any) -> dict[str, Any]:
    """The vision wrapper's configuration, whose text model lies within."""
    text = models.hybrid()
    del text["architectures"]
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "text_config": {**text, **more.pop("text", {})},
        **more,
    }


def without(made: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in made.items() if key not in keys}


CONFIGS: dict[str, dict[str, Any]] = {
    "hybrid": models.hybrid(),
    "small heads": models.hybrid(**SMALL),
    "odd key heads": models.hybrid(linear_key_head_dim=96),
    "odd value heads": models.hybrid(linear_value_head_dim=24),
    "tiny heads": models.hybrid(linear_key_head_dim=8),
    "gelu": models.hybrid(hidden_act="gelu"),
    "no activation named": without(models.hybrid(), "hidden_act"),
    "float16": models.hybrid(dtype="float16"),
    "float32": models.hybrid(dtype="float32"),
    "no type named": without(models.hybrid(), "dtype"),
    "the older name of the type": {**without(models.hybrid(), "dtype"), "torch_dtype": "bfloat16"},
    "wrapped": wrapped(dtype="bfloat16"),
    "wrapped, type above only": wrapped(dtype="bfloat16", text={"dtype": None}),
    "wrapped, float16 within": wrapped(text={"dtype": "float16"}),
    "dense": models.dense(),
    "dense in float16": {**models.dense(), "dtype": "float16"},
}
SETTINGS: tuple[tuple[str, dict[str, str]], ...] = (
    ("auto", {}),
    ("bfloat16", {}),
    ("half", {}),
    ("float32", {}),
    ("auto", {"SGLANG_MAMBA_CONV_DTYPE": "float16"}),
    ("float", {"SGLANG_MAMBA_CONV_DTYPE": "float32"}),
    ("auto", {"SGLANG_MAMBA_CONV_DTYPE": "float8"}),
)


def facts_of(
    folder: Path, chosen: dict[str, Any], dtype: str, monkeypatch: pytest.MonkeyPatch, **resolved: Any
) -> refusals.Facts:
    """What a server of these settings on the target in `folder` finds."""
    from sglang.srt.configs.model_config import ModelConfig
    from sglang_ddtree import args

    monkeypatch.setattr(args, "drafter_block", lambda _args: 16)
    model = ModelConfig(str(folder), dtype=dtype)
    view = SimpleNamespace(
        tp_size=1, base_gpu_id=0, gpu_id_step=1, decode_attention_backend=None, attention_backend="triton",
        **{"disable_radix_cache": True, **resolved},
    )  # fmt: skip
    monkeypatch.setenv(config.ENV, json.dumps(chosen))
    given, auto = args.choices.from_environment()
    return args.gather_facts(SimpleNamespace(get_model_config=lambda: model), view, given, auto)


@pytest.fixture
def folder(tmp_path: Path) -> Any:
    def make(made: dict[str, Any]) -> Path:
        (tmp_path / "config.json").write_text(json.dumps(made))
        return tmp_path

    return make


@pytest.mark.usefixtures("_sglang")
@pytest.mark.parametrize("name", CONFIGS)
def test_planning_expects_what_the_engine_decides(name: str, folder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = set()
    at = folder(CONFIGS[name])
    target = parse_model((at / "config.json").read_text(), "config.json")
    for dtype, environ in SETTINGS:
        with monkeypatch.context() as patched:
            for key, value in environ.items():
                patched.setenv(key, value)
            for budget in (1, 16, 64, 65, 255):
                facts = facts_of(at, {"mode": "tree", "budget": budget}, dtype, patched)
                types = planned.dtypes(target, {"--dtype": dtype}, environ)
                expected = planned.kept(None, Mode.TREE, target, budget, types)
                assert (expected.states, expected.why) == (facts.states, facts.states_why), (dtype, environ, budget)
                seen.add(facts.states)
    usable = not name.startswith(("odd", "tiny", "gelu", "dense"))
    assert seen == ({"records", "snapshots"} if usable else {"snapshots"})


@pytest.mark.usefixtures("_sglang")
@pytest.mark.parametrize(
    ("name", "chosen", "word"),
    [
        ("hybrid", {"mode": "tree", "budget": 1}, "records"),
        ("hybrid", {"mode": "tree"}, "records"),
        ("hybrid", {"mode": "tree", "budget": 64}, "records"),
        ("hybrid", {"mode": "tree", "budget": 65}, "snapshots"),
        ("hybrid", {"mode": "auto"}, "records"),
        ("hybrid", {"mode": "auto", "widths": [16, 64]}, "records"),
        ("hybrid", {"mode": "auto", "widths": [16, 65]}, "snapshots"),
        ("hybrid", {"mode": "linear"}, "snapshots"),
        ("hybrid", {"mode": "shadow-linear"}, "snapshots"),
        ("wrapped", {"mode": "tree"}, "records"),
        ("dense", {"mode": "tree"}, "snapshots"),
        ("dense", {"mode": "tree", "budget": 200}, "snapshots"),
        ("odd key heads", {"mode": "tree"}, "snapshots"),
        ("gelu", {"mode": "auto"}, "snapshots"),
    ],
)
@pytest.mark.parametrize("asked", [None, "snapshots", "records"])
def test_a_word_stands_and_without_one_records_are_kept_where_they_are_written_for(
    name: str, chosen: dict[str, Any], word: str, asked: str | None, folder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if asked is not None:
        monkeypatch.setenv(states.ENV, asked)
    facts = facts_of(folder(CONFIGS[name]), chosen, "auto", monkeypatch)
    trees = chosen["mode"] in ("tree", "auto")
    assert facts.states == ((asked or word) if trees else "snapshots")
    unasked = asked is None and trees and name != "dense" and word == "snapshots"
    assert bool(facts.states_why) is unasked
    budget = max(chosen.get("widths", [chosen.get("budget", 16)]))
    refused = refusals._records(None, config.DDTreeConfig("tree", budget), facts)
    assert bool(refused) is (asked == "records" and trees and word == "snapshots")


@pytest.mark.usefixtures("_sglang")
def test_the_proof_is_looked_for_as_states_are_kept(folder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The two records that ship are about sm_90, one for each way."""
    from sglang_ddtree import args

    monkeypatch.setattr(args, "compute_capability", lambda _gpus: "9.0")
    at = folder(CONFIGS["hybrid"])
    for mode in ("tree", "auto"):
        assert facts_of(at, {"mode": mode}, "auto", monkeypatch).proof == "proven.json#1"
    monkeypatch.setenv(states.ENV, "snapshots")
    for mode in ("tree", "auto"):
        assert facts_of(at, {"mode": mode}, "auto", monkeypatch).proof == "proven.json#0"


@pytest.mark.usefixtures("_sglang")
@pytest.mark.parametrize("strategy", ["extra_buffer", "no_buffer"])
def test_a_proof_is_looked_for_with_the_prefix_cache_where_there_is_one(
    strategy: str, folder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text model's records are about the wrapper, for which SGLang keeps states."""
    from sglang_ddtree import args

    monkeypatch.setattr(args, "compute_capability", lambda _gpus: "9.0")
    cached = {"disable_radix_cache": False, "uses_mamba_radix_cache": True, "mamba_radix_cache_strategy": strategy}
    proven = {"extra_buffer": "proven.json#1", "no_buffer": None}[strategy]

    def facts(name: str, chosen: dict[str, Any], **resolved: Any) -> refusals.Facts:
        return facts_of(folder(CONFIGS[name]), chosen, "auto", monkeypatch, **resolved)

    trees = facts("wrapped", {"mode": "tree"}, **cached)
    assert (trees.architecture, trees.prefix_cache) == ("Qwen3_5ForConditionalGeneration", strategy)
    assert (trees.proof, trees.cache_proof, trees.auto) == ("proven.json#1", proven, False)
    wide = facts("wrapped", {"mode": "tree", "budget": 17}, **cached)
    assert (wide.proof, wide.cache_proof) == ("proven.json#1", None)
    changing = facts("wrapped", {"mode": "auto", "widths": [15]}, **cached)
    assert (changing.proof, changing.cache_proof, changing.auto) == ("proven.json#1", None, True)
    assert "runs together" in changing.cache_reasons[1]
    admitted = config.DDTreeConfig(mode="tree", allow_hybrid_unsafe=True)
    shown = f"proven by {proven}" if proven else "unproven, admitted by --speculative-ddtree-allow-hybrid-unsafe"
    assert args.verdict(admitted, trees) == shown
    assert args.verdict(admitted, wide).startswith("unproven")
    for off in ({**cached, "disable_radix_cache": True}, {**cached, "uses_mamba_radix_cache": False}):
        facts_off = facts("wrapped", {"mode": "tree"}, **off)
        assert (facts_off.prefix_cache, facts_off.cache_proof) == (None, None)
        assert args.verdict(admitted, facts_off) == "proven by proven.json#1"
    dense = dataclasses.replace(trees, hybrid="")
    assert args.cache_strategy(SimpleNamespace(**cached), dense) is None


@pytest.mark.usefixtures("_sglang")
@pytest.mark.parametrize(
    ("budget", "asked", "word", "says"),
    [
        (64, None, "records", ""),
        (
            65,
            None,
            "snapshots",
            "kept as snapshots: records are written for at most 64 nodes and the budget is 65; for",
        ),
        (64, "snapshots", "snapshots", ""),
    ],
)
def test_the_choice_is_shown_and_a_fall_back_is_logged_with_its_reason(
    budget: int,
    asked: str | None,
    word: str,
    says: str,
    folder: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    from sglang.srt.arg_groups import overrides, speculative_hook
    from sglang_ddtree import args

    if asked is not None:
        monkeypatch.setenv(states.ENV, asked)
    facts = facts_of(folder(CONFIGS["hybrid"]), {"mode": "tree", "budget": budget}, "auto", monkeypatch)
    monkeypatch.setattr(args, "gather_facts", lambda *_: facts)
    monkeypatch.setattr(refusals, "reasons", lambda *_: [])
    monkeypatch.setattr(overrides, "resolved_view", lambda given: given)
    monkeypatch.setattr(speculative_hook, "_resolve_dflash_draft_attention_backend", lambda _args: None)
    given = flags.stub_args(speculative_num_draft_tokens=budget + 1)
    with caplog.at_level(logging.INFO, logger="sglang_ddtree.args"):
        resolved = args.resolve(given)
    assert resolved.public()["states"] == word  # what /server_info shows (hooks.after_internal_state)
    assert (states.recording(given) is not None) == (word == "records")  # what pool, hooks and worker go by
    lines = [line for line in caplog.messages if "recurrent states are kept as" in line]
    assert len(lines) == bool(says)
    assert all(says in line for line in lines)
    assert any(f"'states': '{word}'" in line for line in caplog.messages)


def test_what_is_named_is_the_first_thing_in_the_way_and_how_to_have_records() -> None:
    assert keeping.gap(TARGET, 64, 64) is None
    found = keeping.gap(TARGET, 65, 64)
    assert found is not None
    assert str(found) == (
        "records are written for at most 64 nodes and the budget is 65; for records set "
        "--speculative-ddtree-budget 64, or no wider width in mode auto"
    )
    assert keeping.choose(None, True, found) == ("snapshots", str(found))
    assert keeping.choose("records", True, found) == ("records", "")
    assert keeping.choose(None, False, found) == ("snapshots", "")
    assert (keeping.SNAPSHOTS, keeping.RECORDS) == (states.SNAPSHOTS, states.RECORDS)
