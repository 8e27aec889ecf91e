from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddtree_ops.errors import RefusedError
from ddtree_ops.pair import prove_pair
from ddtree_ops.shapes import parse_drafter, parse_model

CONFIGS = Path(__file__).parent / "fixtures/configs"
TARGET = parse_model((CONFIGS / "shape-27b.json").read_text(), "config.json")
DRAFTER = parse_drafter((CONFIGS / "shape-27b-dflash.json").read_text(), "config.json")


def test_a_pair_that_fits() -> None:
    proof = prove_pair(TARGET, DRAFTER)
    assert proof.fits
    assert proof.mismatches == ()
    shown = dict(proof.facts)
    assert shown["target"] == "Qwen3_5ForCausalLM, 64 layers (48 recurrent), bfloat16"
    assert shown["block"] == "16 tokens, 15 drafted"


@pytest.mark.parametrize("target", ["tiny-dense", "tiny-hybrid"])
def test_the_small_pairs_fit(target: str) -> None:
    small = parse_model((CONFIGS / f"{target}.json").read_text(), "config.json")
    assert prove_pair(small, parse_drafter((CONFIGS / "tiny-dflash.json").read_text(), "config.json")).fits


@pytest.mark.parametrize(
    ("change", "name", "fatal"),
    [
        ({"hidden": 4096}, "hidden", True),
        ({"vocab": 151936}, "vocab", True),
        ({"target_layers": 48}, "depth", True),
        ({"target_layer_ids": (1, 16, 63)}, "target-layers", True),
        ({"target_layer_ids": (1, 31, 16)}, "target-layers", True),
        ({"block_size": None}, "block-size", True),
        ({"block_size": 1}, "block-size", True),
        ({"mask_token_id": 248320}, "mask-token", True),
        ({"mask_token_id": None}, "mask-token", False),
        ({"dtype": "float32"}, "dtype", False),
        ({"rope_theta": 1e6}, "rope", False),
    ],
)
def test_each_mismatch_is_named(change: dict[str, Any], name: str, fatal: bool) -> None:
    proof = prove_pair(TARGET, replace(DRAFTER, **change))
    assert [(m.name, m.fatal) for m in proof.mismatches] == [(name, fatal)]
    assert proof.fits is not fatal


def test_all_mismatches_are_named_at_once() -> None:
    proof = prove_pair(TARGET, replace(DRAFTER, hidden=1, vocab=2, block_size=None))
    assert len(proof.mismatches) == 3


def test_a_vision_wrapper_has_the_same_shape() -> None:
    text = json.loads((CONFIGS / "shape-27b.json").read_text())
    wrapped = {"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": text, "vision_config": {}}
    found = parse_model(json.dumps(wrapped), "config.json")
    assert replace(found, architecture=TARGET.architecture) == TARGET


def test_layer_kinds_from_the_interval_alone() -> None:
    text = json.loads((CONFIGS / "shape-27b.json").read_text())
    del text["layer_types"]
    assert parse_model(json.dumps(text), "config.json").attention.layers == 16


@pytest.mark.parametrize("text", ["", "[]", "{", '"x"', "null"])
def test_what_is_no_configuration(text: str) -> None:
    with pytest.raises(RefusedError, match="is not a model configuration"):
        parse_model(text, "/models/x/config.json")


@pytest.mark.parametrize("value", [None, 0, -1, "64", True])
def test_a_useless_key_is_named(value: object) -> None:
    config = json.loads((CONFIGS / "shape-27b.json").read_text()) | {"num_hidden_layers": value}
    with pytest.raises(RefusedError, match="has no usable num_hidden_layers"):
        parse_model(json.dumps(config), "config.json")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda v: st.lists(v) | st.dictionaries(st.text(), v),
    max_leaves=5,
)


@given(st.data())
def test_a_strange_configuration_is_refused_or_compared(data: st.DataObject) -> None:
    """Anything in place of any key: a refusal that names it, or a comparison; never an error of ours."""
    texts = []
    for name in ("shape-27b", "shape-27b-dflash"):
        config = json.loads((CONFIGS / f"{name}.json").read_text())
        for key in data.draw(st.lists(st.sampled_from(sorted(config)), max_size=3)):
            config[key] = data.draw(JSON)
        texts.append(json.dumps(config))
    try:
        prove_pair(parse_model(texts[0], "target"), parse_drafter(texts[1], "drafter"))
    except RefusedError as error:
        if "has no usable" not in error.found:
            raise


@given(st.integers(0, 2000))
def test_a_cut_file_is_refused_or_read(length: int) -> None:
    text = (CONFIGS / "shape-27b.json").read_text()[:length]
    with pytest.raises(RefusedError):
        parse_model(text, "config.json")
