"""The unit: golden for each mode, exact through systemd's own reading, silent under systemd-analyze."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import systemd_words
from hypothesis import example, given
from hypothesis import strategies as st
from syrupy.assertion import SnapshotAssertion

from ddtree_ops.errors import ExitCode, InventoryError
from ddtree_ops.model import Address, HostSpec, Mode, Settings
from ddtree_ops.render import render_target, render_unit, server_argv
from ddtree_ops.render.quote import quote_arg, quote_env
from ddtree_ops.text import unusable

RELEASE = "0123456789abcdef"
ENGINE = "/opt/ddtree/engines/fedcba9876543210"
BASE = Settings(
    instance="main", mode=Mode.TREE, gpus=(1,), port=30001, model="/models/target", drafter="/models/drafter", budget=32
)

texts = st.text(st.characters(exclude_categories=["Cs"])).filter(lambda text: unusable(text) is None)
NASTY = [
    "", " ", "%", "%%", "%h", "$", "$$", "$HOME", "${HOME}", '"', "'", "\\", "\\n", "a\nb", "\r", "\t", ";", "#", "-",
    "é", "漢字", "\x7f", "\x1b[0m", "\u2028", "\u0085", "a b", "50%off $x \"q\" '\\'", "@/bin/sh", "\\\n",
]  # fmt: skip


def unit(settings: Settings = BASE, **options: Any) -> str:
    fixed: dict[str, Any] = {"scope": "system", "systemd_version": 252} | options
    return render_unit(settings, release=RELEASE, engine_dir=ENGINE, root="/opt/ddtree", **fixed)


def changed(**fields: Any) -> Settings:
    return Settings.model_validate(BASE.model_dump() | fields)


# -- golden


@pytest.mark.parametrize("mode", list(Mode))
def test_unit_of_each_mode(mode: Mode, snapshot: SnapshotAssertion) -> None:
    assert unit(changed(mode=mode)) == snapshot


def test_unit_with_everything_set(snapshot: SnapshotAssertion) -> None:
    settings = changed(
        gpus=(2, 5), served_model_name="qwen", bind="0.0.0.0", user="sglang", context_length=32768,
        mem_fraction_static=0.85, extra_args=("--attention-backend", "triton", "--chat-template", "/t/50% $5.jinja"),
        env={"HF_HUB_OFFLINE": "1", "NOTE": 'a "b" 100% $x'}, allow_hybrid_unsafe=True, unsafe_reason="parity run",
        drain_timeout_s=5, start_timeout_s=60,
    )  # fmt: skip
    assert unit(settings, systemd_version=257) == snapshot


def test_unit_of_scope_user(snapshot: SnapshotAssertion) -> None:
    assert unit(scope="user") == snapshot


# -- argv


def test_modes_differ_in_speculation_only() -> None:
    def argv(mode: Mode) -> list[str]:
        return server_argv(changed(mode=mode), RELEASE)

    ar, linear, tree = argv(Mode.AR), argv(Mode.LINEAR), argv(Mode.TREE)
    assert not [word for word in ar if "speculative" in word]
    assert linear == [*ar, "--speculative-algorithm", "DDTREE", "--speculative-draft-model-path", "/models/drafter",
                      "--speculative-ddtree-mode", "linear"]  # fmt: skip
    assert tree == [*linear[:-1], "tree", "--speculative-ddtree-budget", "32", "--speculative-ddtree-topk-cap", "8"]
    assert argv(Mode.SHADOW_LINEAR) == ["shadow-linear" if word == "tree" else word for word in tree]


def test_mode_auto_names_its_widths_in_place_of_a_budget() -> None:
    argv = server_argv(changed(mode=Mode.AUTO, widths=(8, 64)), RELEASE)
    tree = server_argv(changed(mode=Mode.TREE), RELEASE)
    at = tree.index("--speculative-ddtree-mode")
    assert argv[: at + 1] == tree[: at + 1]
    assert argv[at + 1 :] == ["auto", "--speculative-ddtree-widths", "8,64", *tree[at + 4 :]]


@pytest.mark.parametrize("states", ["snapshots", "records"])
def test_how_a_tree_keeps_states_is_said_where_somebody_said_it(states: str) -> None:
    """Left out, the engine decides."""

    def flags(mode: Mode, kept: str | None) -> list[str]:
        return server_argv(changed(mode=mode, states=kept), RELEASE)

    for mode in (Mode.TREE, Mode.AUTO):
        assert "--speculative-ddtree-states" not in flags(mode, None)
        assert flags(mode, states) == [*flags(mode, None), "--speculative-ddtree-states", states]
    for mode in (Mode.AR, Mode.LINEAR, Mode.SHADOW_LINEAR):
        assert flags(mode, states) == flags(mode, None)


def test_flags_are_those_of_sglang(sglang_flags: frozenset[str]) -> None:
    settings = changed(served_model_name="x", context_length=1, mem_fraction_static=0.5)
    ours = {word for word in server_argv(settings, RELEASE) if word.startswith("--")}
    assert {flag for flag in ours if not flag.startswith("--speculative-ddtree-")} <= sglang_flags


@pytest.fixture(scope="session")
def sglang_flags() -> frozenset[str]:
    """The flags of SGLang 0.5.17: fields of ServerArgs, which its own parser is derived from (captured list)."""
    return frozenset((Path(__file__).parent / "data" / "sglang-0.5.17-flags.txt").read_text().split())


# -- quoting


@given(texts)
@example("\\\n")
def test_an_argument_survives_systemd(word: str) -> None:
    [got] = systemd_words.split_words(quote_arg(word))
    assert systemd_words.variables(systemd_words.specifiers(got)) == word


@given(texts)
def test_a_variable_survives_systemd(value: str) -> None:
    [got] = systemd_words.split_words(quote_env("NAME", value))
    assert systemd_words.specifiers(got) == f"NAME={value}"


@given(texts)
def test_a_quoted_word_stays_on_its_line(word: str) -> None:
    assert not re.search(r"[\x00-\x1f\x7f]", quote_arg(word))


@pytest.mark.parametrize("word", NASTY)
def test_a_whole_unit_gives_back_the_exact_argv(word: str) -> None:
    settings = changed(model=word, drafter=word + "x", extra_args=("--x", word, word), env={"A": word})
    text = unit(settings)
    assert systemd_words.exec_start(text) == server_argv(settings, RELEASE)
    assert systemd_words.environment(text)["A"] == word


@given(st.lists(texts, max_size=5))
def test_any_extra_arguments_come_back(extra: list[str]) -> None:
    settings = changed(extra_args=tuple(extra))
    assert systemd_words.exec_start(unit(settings)) == server_argv(settings, RELEASE)


@pytest.mark.parametrize("word", ["\0", "a\0b", "\ud800", "\ufdd0", "\uffff", "\U0001fffe"])
def test_what_systemd_cannot_hold_is_refused(word: str) -> None:
    with pytest.raises(ValueError):
        quote_arg(word)


# -- the environment


def test_the_engine_comes_before_site_packages_and_gpus_are_pinned_in_the_order_of_nvidia_smi() -> None:
    env = systemd_words.environment(unit(changed(gpus=(3, 1))))
    assert env["PYTHONPATH"] == f"{ENGINE}/site"
    assert (env["CUDA_DEVICE_ORDER"], env["CUDA_VISIBLE_DEVICES"]) == ("PCI_BUS_ID", "3,1")
    assert server_argv(changed(gpus=(3, 1)), RELEASE)[9:11] == ["--tp-size", "2"]


def test_without_gpus_nothing_is_pinned() -> None:
    text = unit(changed(gpus=()))
    assert "CUDA_" not in text.replace("CUDA_CACHE_PATH", "")
    assert "--tp-size" not in text


def test_settings_may_move_a_cache() -> None:
    env = systemd_words.environment(unit(changed(env={"TRITON_CACHE_DIR": "/fast"})))
    assert env["TRITON_CACHE_DIR"] == "/fast"
    assert env["CUDA_CACHE_PATH"] == "/var/cache/sglang-ddtree/main/cuda"


# -- mounts


def test_the_unit_waits_for_the_mounts_of_what_it_needs() -> None:
    env = {"HF_HOME": "/data/hf", "TRITON_CACHE_DIR": "/fast/triton", "OTHER": "/not/looked/at"}
    paths = ["/opt/ddtree", "/opt/sglang/venv", "/models/target", "/models/drafter", "/fast/triton", "/data/hf"]
    assert systemd_words.mounts(unit(changed(env=env))) == paths
    assert systemd_words.mounts(unit(changed(mode=Mode.AR))) == paths[:3]
    assert systemd_words.mounts(unit(scope="user")) == []  # its manager mounts nothing


@pytest.mark.parametrize("word", [*NASTY, "a/../b"], ids=ascii)
def test_a_path_comes_back_or_is_left_out(word: str) -> None:
    settings = changed(model="/m/" + word, drafter="Qwen/name")
    left_out = any(c in "\n\r\t\x7f\x1b" for c in word) or ".." in word
    assert systemd_words.mounts(unit(settings)) == [
        "/opt/ddtree",
        "/opt/sglang/venv",
        *([] if left_out else ["/m/" + word]),
    ]


# -- by systemd's version, and systemd's own opinion


def test_what_an_old_systemd_would_ignore_is_not_written() -> None:
    assert "RestartSteps" not in unit(systemd_version=252)
    assert "RestartSteps=4" in unit(systemd_version=254)


def test_never_notify() -> None:
    assert "Type=exec" in unit()


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="needs systemd-analyze")
@pytest.mark.parametrize("word", ["plain", *[w for w in NASTY if w]], ids=ascii)
def test_systemd_analyze_is_silent(word: str, tmp_path: Path) -> None:
    """Its exit status is 0 for lines it ignores, so what counts is that it has nothing to say."""
    venv = tmp_path / "v env%"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "python").symlink_to(sys.executable)
    settings = changed(venv=str(venv), model=word, drafter="/d/" + word, extra_args=("--x", word), env={"A": word})
    path = tmp_path / "sglang-ddtree-main.service"
    path.write_text(unit(settings, scope="system"))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", str(path)], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")


# -- templates


def host(template: Path | None) -> HostSpec:
    return HostSpec(name="h", address=Address(host="h"), unit_template=str(template) if template else None)


def render(template: Path | None) -> str:
    return render_target(host(template), BASE, release=RELEASE, engine_dir=ENGINE, systemd_version=252)


def test_a_hosts_own_template_is_used(tmp_path: Path) -> None:
    own = tmp_path / "own.j2"
    own.write_text("X={{ settings.port }}\n")
    assert render(own) == "X=30001\n"
    assert render(None) == unit()


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("a\nX={{ bugdet }}\n", "own.j2:2: 'bugdet' is undefined"),
        ("X={{ settings.bugdet }}\n", "own.j2:1: 'ddtree_ops.model.Settings object' has no attribute 'bugdet'"),
        ("{% if %}", "own.j2:1: Expected an expression"),
        (None, "does not exist"),
    ],
)
def test_a_template_with_a_gap_is_an_error(text: str | None, found: str, tmp_path: Path) -> None:
    own = tmp_path / "own.j2"
    if text is not None:
        own.write_text(text)
    with pytest.raises(InventoryError) as caught:
        render(own)
    assert found in caught.value.found
    assert caught.value.next
    assert caught.value.exit_code == ExitCode.USAGE
