"""The plugin against the real SGLang: what it relies on is there, and it refuses when anything drifted."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import sglang_setup

pytestmark = pytest.mark.xdist_group("sglang")


@pytest.fixture(autouse=True)
def _sglang(sglang_src: Path) -> None:
    sglang_setup.load(sglang_src)


def test_the_pinned_release_is_as_the_table_says() -> None:
    from sglang.version import __version__
    from sglang_ddtree import SGLANG_VERSION, compat

    assert __version__ == SGLANG_VERSION
    assert compat.problems(__version__) == []


def test_another_release_is_refused() -> None:
    from sglang_ddtree import compat

    (problem,) = compat.problems("0.5.23")
    assert "0.5.23" in problem
    assert "0.5.17" in problem


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"parameters": ("self", "batch")}, "parameters are"),
        ({"path": "sglang.srt.mem_cache.allocation_sizing.get_alloc_len"}, "AttributeError"),
        ({"path": "sglang.srt.no_such_module.function"}, "no_such_module"),
    ],
)
def test_a_drifted_target_is_found(change: dict[str, object], says: str) -> None:
    from sglang_ddtree import compat

    target = next(t for t in compat.TARGETS if t.path.endswith("get_alloc_len_per_decode"))
    problem = compat.check_target(dataclasses.replace(target, **change))
    assert problem is not None
    assert says in problem


def test_drift_keeps_the_algorithm_out(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry
    from sglang.srt.speculative import spec_registry
    from sglang_ddtree import compat, plugin

    monkeypatch.setattr(spec_registry, "_REGISTRY", {})
    monkeypatch.setattr(HookRegistry, "_hooks", {})
    monkeypatch.setattr(compat, "problems", lambda _version: ["a function moved"])
    with pytest.raises(RuntimeError, match="a function moved"):
        plugin.register()
    assert spec_registry._REGISTRY == {}
    assert HookRegistry._hooks == {}


def test_the_algorithm_answers_what_sglang_asks() -> None:
    """CustomSpecAlgo lacks three methods that callers use on every algorithm; none may be missing on ours."""
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    algorithm = SpeculativeAlgorithm.from_string("ddtree")
    methods = [name for name, value in vars(SpeculativeAlgorithm).items() if callable(value) and name[0] != "_"]
    missing = [m for m in methods if m not in ("from_string", "register") and not hasattr(algorithm, m)]
    assert missing == []
    assert algorithm.is_dflash_family()
    assert not algorithm.is_dflash()
    assert algorithm.supports_overlap
    assert not algorithm.need_topk()


def test_every_hook_is_in_place_and_seen_by_importers() -> None:
    from sglang.srt.mem_cache import allocation_sizing, kv_cache_configurator
    from sglang.srt.model_executor import pool_configurator
    from sglang.srt.model_executor.runner import base_runner
    from sglang.srt.plugins.hook_registry import HookRegistry
    from sglang.srt.speculative import spec_info
    from sglang_ddtree import compat, plugin

    for target, _hook, _kind in plugin.table():
        assert target in HookRegistry._patched
        found = compat.resolve(target)
        assert hasattr(getattr(found, "__func__", found), "__wrapped__"), target
    assert base_runner.create_dummy_verify_input is spec_info.create_dummy_verify_input
    assert pool_configurator.get_alloc_len_per_decode is allocation_sizing.get_alloc_len_per_decode
    extra = allocation_sizing.get_req_to_token_extra_context_len
    assert kv_cache_configurator.get_req_to_token_extra_context_len is extra


def test_hooked_functions_are_all_checked_before() -> None:
    from sglang_ddtree import compat, plugin

    targets = [target for target, _hook, _kind in plugin.table()]
    assert len(targets) == len(set(targets)), "a second hook on a function would meet the first"
    sglangs = {target for target in targets if target.startswith("sglang.")}  # those of this package ship with it
    assert {target.path for target in compat.TARGETS if target.use == "hook"} == sglangs


PATCHED = """
import torchvision_stub
torchvision_stub.install()
from sglang.version import __version__
from sglang_ddtree import compat
found = compat.problems(__version__)
assert not found, found
import sglang.srt.speculative.dflash_utils as patched
assert "acc_additive_penalties" in open(patched.__file__).read(), "the series is not in"
"""


def test_the_patched_release_is_as_the_table_says_too(sglang_src: Path, tmp_path: Path) -> None:
    """What a host runs is the pinned release with the series of patches applied."""
    from sglang_ddtree import SGLANG_VERSION

    from ddtree_ops.bundle.patches import apply_series, read_base, read_series
    from ddtree_ops.data import data_dir

    folder = data_dir("patches") / f"sglang-{SGLANG_VERSION}"
    shutil.copytree(sglang_src / "sglang", tmp_path / "sglang", ignore=shutil.ignore_patterns("__pycache__"))
    patched = apply_series(read_series(folder), read_base(folder), lambda path: (sglang_src / path).read_bytes())
    for path, data in patched.items():
        (tmp_path / path).write_bytes(data)
    search = [str(tmp_path), str(Path(__file__).parent), *(p for p in sys.path if p and p != str(sglang_src))]
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PATCHED],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(search)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
