"""The checks a GPU host runs: they pass in the interpreter, and each notices a wrong kernel."""

from __future__ import annotations

import pytest
from sglang_ddtree.kernels import checks


@pytest.mark.parametrize("name", sorted(checks.CHECKS))
def test_passes_in_the_interpreter(name: str) -> None:
    checks.CHECKS[name](checks.SMALL)


@pytest.mark.parametrize(
    ("name", "kernel"),
    [("topk", "draft_topk"), ("topk", "merge_topk"), ("build", "build_tree"), ("slots_and_mask", "prepare_round"),
     ("slots_and_mask", "write_tree_mask"), ("accept", "accept_tree"), ("sample", "sample_targets"),
     ("shadow", "shadow_step"), ("nested", "count_nested"), ("hybrid", "gdn.conv_tree"), ("hybrid", "gdn.gdn_tree"),
     ("hybrid", "gdn.commit_tree")],
)  # fmt: skip
def test_notices_a_kernel_that_does_nothing(name: str, kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(*args: object, **_: object) -> object:
        # The hybrid kernels return their output: give them zeros of the right shape.
        if kernel == "gdn.conv_tree":
            return args[0] * 0  # type: ignore[operator]
        return args[2] * 0 if kernel == "gdn.gdn_tree" else None  # type: ignore[operator]

    *module, function = kernel.split(".")
    monkeypatch.setattr(checks.gdn if module else checks, function, nothing)
    with pytest.raises(checks.CheckError):
        checks.CHECKS[name](checks.SMALL)


def test_run_checks_reports_what_differed(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(_: checks.Sizes) -> float:
        raise checks.CheckError("3 cells differ")

    monkeypatch.setattr(checks, "CHECKS", {"fine": lambda _: 1e-7, "wrong": wrong})
    assert checks.run_checks(checks.SMALL) == {"fine": 1e-7, "wrong": "3 cells differ"}
