"""Flags, configuration file, environment, and the order in which SGLang reads what they set."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sglang_setup

pytestmark = pytest.mark.xdist_group("sglang")
TREE = ["--speculative-algorithm", "DDTREE", "--speculative-ddtree-mode", "tree"]


@pytest.fixture(autouse=True)
def _sglang(sglang_src: Path) -> None:
    sglang_setup.load(sglang_src)


def parse(*argv: str) -> Any:
    from sglang.srt.server_args import prepare_server_args

    return prepare_server_args(["--model-path", "dummy", *argv])


def chosen() -> Any:
    from sglang_ddtree.config import DDTreeConfig

    return DDTreeConfig.from_environment()


def test_flags_reach_the_environment_before_the_arguments_resolve() -> None:
    args = parse(*TREE, "--speculative-ddtree-budget", "33", "--speculative-ddtree-topk-cap", "4")
    config = chosen()
    assert (config.mode, config.budget, config.children) == ("tree", 33, 4)
    # Sizes are in place although the dummy model stops resolution before the algorithm's own turn.
    assert args.speculative_num_draft_tokens == 34
    assert args.speculative_eagle_topk == 4
    assert args.max_speculative_num_draft_tokens == 34


def test_one_child_still_asks_sglang_for_tree_links() -> None:
    args = parse(*TREE, "--speculative-ddtree-topk-cap", "1")
    assert args.speculative_eagle_topk == 2


def test_the_configuration_file_works_like_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "server.yaml"
    file.write_text(
        "speculative-algorithm: DDTREE\nspeculative-ddtree-mode: tree\nspeculative-ddtree-budget: 24\n"
        "speculative-ddtree-allow-hybrid-unsafe: true\n"
    )
    parse("--config", str(file))
    assert chosen().budget == 24
    assert chosen().allow_hybrid_unsafe


def test_flags_win_over_the_environment_and_keep_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_DDTREE_CONFIG", json.dumps({"mode": "tree", "budget": 8, "keep_spine": True}))
    parse("--speculative-algorithm", "DDTREE", "--speculative-ddtree-budget", "12")
    assert (chosen().mode, chosen().budget, chosen().keep_spine) == ("tree", 12, True)


def test_engine_users_set_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.server_args import ServerArgs

    monkeypatch.setenv("SGLANG_DDTREE_CONFIG", json.dumps({"mode": "tree", "budget": 8}))
    args = ServerArgs(model_path="dummy", speculative_algorithm="ddtree")
    assert args.speculative_num_draft_tokens == 9


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--speculative-ddtree-budget", "8"], "without --speculative-algorithm DDTREE"),
        ([*TREE, "--speculative-ddtree-budget", "0"], "--speculative-ddtree-budget is 0"),
        ([*TREE, "--speculative-ddtree-topk-cap", "40"], "--speculative-ddtree-topk-cap is 40"),
        ([*TREE, "--speculative-num-draft-tokens", "5"], "--speculative-num-draft-tokens does not apply"),
        ([*TREE, "--speculative-eagle-topk", "3"], "--speculative-eagle-topk does not apply"),
    ],
)
def test_contradictions_are_named(argv: list[str], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse(*argv)


@pytest.mark.parametrize("text", ["[1]", "not json", '{"budgets": 3}', '{"mode": "fast"}'])
def test_a_broken_environment_is_named(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_DDTREE_CONFIG", text)
    with pytest.raises(ValueError, match=r"SGLANG_DDTREE_CONFIG|--speculative-ddtree-mode"):
        chosen()


def test_linear_is_left_as_dflash_would_be() -> None:
    plain = parse("--speculative-algorithm", "DFLASH")
    linear = parse("--speculative-algorithm", "DDTREE", "--speculative-ddtree-mode", "linear")
    for field in ("speculative_num_draft_tokens", "speculative_eagle_topk", "attention_backend"):
        assert getattr(linear, field) == getattr(plain, field)


def test_how_states_are_kept_is_chosen_by_flag_file_or_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang_ddtree import states

    assert states.from_environment() is None
    parse(*TREE, "--speculative-ddtree-states", "records")
    assert states.from_environment() == "records"
    file = tmp_path / "server.yaml"
    file.write_text("speculative-algorithm: DDTREE\nspeculative-ddtree-states: snapshots\n")
    parse("--config", str(file))
    assert states.from_environment() == "snapshots"
    monkeypatch.setenv(states.ENV, "records")
    parse(*TREE)  # no flag: the environment stands
    assert states.from_environment() == "records"
    monkeypatch.setenv(states.ENV, "ring")
    with pytest.raises(ValueError, match="SGLANG_DDTREE_STATES is 'ring'"):
        states.from_environment()
    with pytest.raises(ValueError, match="--speculative-ddtree-states set without"):
        parse("--speculative-ddtree-states", "records")


def test_an_attention_backend_of_the_user_is_kept() -> None:
    assert parse(*TREE).attention_backend == "triton"
    assert parse(*TREE, "--attention-backend", "fa3").attention_backend == "fa3"


class Stub(SimpleNamespace):
    """What DFLASH's own handler reads and writes, without a model behind it."""


def stub_args(**values: Any) -> Stub:
    defaults = {
        "device": "cuda",
        "pp_size": 1,
        "speculative_draft_model_path": "drafter",
        "speculative_num_steps": 1,
        "speculative_eagle_topk": 8,
        "speculative_num_draft_tokens": 17,
        "speculative_dflash_block_size": 10,
        "speculative_draft_window_size": None,
        "max_running_requests": 4,
        "enable_mixed_chunk": False,
        "max_speculative_num_draft_tokens": 17,
        "enable_dp_attention": False,
    }
    return Stub(**{**defaults, **values})


@pytest.fixture
def resolve(monkeypatch: pytest.MonkeyPatch) -> Any:
    """args.resolve with facts and rules that admit everything: the order of writes is what is under test."""
    from sglang.srt.arg_groups import overrides, speculative_hook
    from sglang_ddtree import args, refusals

    monkeypatch.setattr(args, "gather_facts", lambda *_: refusals.Facts(architecture="X", hybrid="gdn"))
    monkeypatch.setattr(refusals, "reasons", lambda *_: [])
    monkeypatch.setattr(overrides, "resolved_view", lambda given: given)
    monkeypatch.setattr(speculative_hook, "_resolve_dflash_draft_attention_backend", lambda _args: None)
    return args.resolve


def test_the_block_is_read_by_dflash_and_the_tree_written_after(resolve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """DFLASH's handler insists on block == draft tokens and top-1; the tree's sizes must survive it."""
    from sglang_ddtree import config

    monkeypatch.setenv(config.ENV, config.DDTreeConfig(mode="tree", budget=16, topk_cap=8).to_json())
    args = stub_args()
    resolved = resolve(args)
    assert resolved.block_size == 10
    assert (args.speculative_num_draft_tokens, args.speculative_eagle_topk) == (17, 8)
    assert (resolved.rows, resolved.width, resolved.slots) == (17, 10, 17)
    assert "max_speculative_num_draft_tokens" not in vars(args)
    assert config.of(args) is resolved


@pytest.mark.parametrize(("mode", "shown"), [("tree", "records"), ("linear", "snapshots")])
def test_resolved_settings_say_how_states_are_kept(
    mode: str, shown: str, resolve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang_ddtree import args, config, refusals, states

    monkeypatch.setenv(config.ENV, config.DDTreeConfig(mode=mode).to_json())
    monkeypatch.setenv(states.ENV, "records")
    # In linear mode nothing is asked of the models; in a tree the choice reaches the rules.
    facts = args.gather_facts(None, None, config.DDTreeConfig(mode="linear"))
    if mode == "tree":
        facts = refusals.Facts(hybrid="gdn", states=states.from_environment() or states.SNAPSHOTS)
    monkeypatch.setattr(args, "gather_facts", lambda *_: facts)
    given = stub_args(speculative_num_draft_tokens=None if mode == "linear" else 17)
    resolved = resolve(given)
    assert resolved.public()["states"] == resolved.states == shown
    assert (states.recording(given) is not None) == (mode == "tree")


def test_what_records_hang_on_is_read_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from sglang.srt.configs import hybrid_arch
    from sglang_ddtree import args

    text = SimpleNamespace(linear_key_head_dim=128, linear_value_head_dim=64, hidden_act="silu")
    monkeypatch.setattr(hybrid_arch, "hybrid_gdn_config", lambda _model: text)
    found = args.recurrent_layers(SimpleNamespace(dtype=torch.float16))
    assert found == {"heads": (128, 64), "activation": "silu", "dtypes": ("float16", "bfloat16")}
    monkeypatch.setenv("SGLANG_MAMBA_CONV_DTYPE", "float16")
    assert args.recurrent_layers(SimpleNamespace(dtype=torch.float16))["dtypes"] == ("float16", "float16")
    monkeypatch.setattr(hybrid_arch, "hybrid_gdn_config", lambda _model: SimpleNamespace())  # other words for the sizes
    assert args.recurrent_layers(SimpleNamespace(dtype=torch.float16))["heads"] == (0, 0)


def test_linear_resolves_to_the_block(resolve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang_ddtree import config

    monkeypatch.setenv(config.ENV, config.DDTreeConfig(mode="linear").to_json())
    args = stub_args(speculative_num_draft_tokens=None, speculative_eagle_topk=None)
    resolved = resolve(args)
    assert (args.speculative_num_draft_tokens, args.speculative_eagle_topk) == (10, 1)
    assert resolved.rows == resolved.block_size == 10


def test_resolved_settings_survive_copies_and_processes() -> None:
    from sglang.srt.server_args import ServerArgs
    from sglang_ddtree import config

    args = ServerArgs(model_path="dummy")
    resolved = config.Resolved(config.DDTreeConfig(mode="tree", budget=5), 16, "proven by x")
    config.attach(args, resolved)
    assert config.of(copy.deepcopy(args)) == resolved
    assert config.of(pickle.loads(pickle.dumps(args))) == resolved
    assert config.of(ServerArgs(model_path="dummy")) is None


def test_the_drafter_gets_a_chain_of_its_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the tree's topk the drafter's attention would enter tree code without a mask."""
    from sglang.srt.server_args import ServerArgs
    from sglang_ddtree import config, worker

    monkeypatch.setenv(config.ENV, config.DDTreeConfig(mode="tree", budget=32).to_json())
    args = ServerArgs(model_path="dummy", speculative_algorithm="DDTREE")
    assert args.max_speculative_num_draft_tokens == 33
    draft = worker.draft_args(args, config.Resolved(config.DDTreeConfig.from_environment(), 16))
    assert (draft.speculative_num_draft_tokens, draft.speculative_eagle_topk) == (16, 1)
    assert draft.max_speculative_num_draft_tokens == 16
    assert (args.speculative_num_draft_tokens, args.speculative_eagle_topk) == (33, 8)


def test_gpus_that_share_a_model_are_one_kind_or_named_all(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from sglang_ddtree import args

    kinds = [(12, 0), (12, 0), (9, 0)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(kinds))
    monkeypatch.setattr(torch.cuda, "get_device_capability", kinds.__getitem__)
    assert args.compute_capability() == "12.0"
    assert args.compute_capability(range(2)) == "12.0"
    assert args.compute_capability((1, 2)) == "9.0+12.0"
    assert args.compute_capability((5,)) == "none"
