"""Trees under tensor parallelism, in real processes that exchange real messages: two ranks, and four."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import rank_program as program
import sglang_setup
import torch

HERE = Path(__file__).parent
LIMIT_S = 300
CASES = [(ranks, case) for ranks, cases in program.CASES.items() for case in cases]
IDS = [f"{ranks}-ranks-{case.name}" for ranks, case in CASES]


@pytest.fixture(scope="module")
def said(sglang_src: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], list[dict[str, Any]]]:
    """What each rank of a group of the given size saw."""
    if absent := sglang_setup.missing():
        pytest.skip(f"tests/engine/requirements.txt is not installed: no {', '.join(absent)}")
    out = tmp_path_factory.mktemp("ranks")
    environ = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    argv = [sys.executable, str(HERE / "rank_program.py"), str(sglang_src), str(out)]
    with (out / "log").open("w") as log:
        process = subprocess.Popen(argv, env=environ, stdout=log, stderr=log, start_new_session=True)
        try:
            code = process.wait(LIMIT_S)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    assert code == 0, (out / "log").read_text()[-3000:]
    return lambda ranks: [json.loads((out / f"{ranks}.{number}").read_text()) for number in range(ranks)]


def same(values: list[Any]) -> bool:
    return all(value == values[0] for value in values)


@pytest.mark.parametrize(("ranks", "case"), CASES, ids=IDS)
def test_all_ranks_draft_one_tree_bit_for_bit(said: Any, ranks: int, case: program.Case) -> None:
    """Also where their hidden states differ, since what they merge is gathered."""
    found = [one[case.name] for one in said(ranks)]
    assert same([one["digest"] for one in found])
    assert same([one["hidden_apart"] for one in found])
    if case.vocab > case.children:
        assert found[0]["digest"] != found[0]["hidden_apart"]


@pytest.mark.parametrize(("ranks", "case"), CASES, ids=IDS)
def test_it_is_the_tree_of_one_rank_with_the_whole_vocabulary(said: Any, ranks: int, case: program.Case) -> None:
    alone = program.alone(case)
    for one in (one[case.name] for one in said(ranks)):
        assert one["tokens"] == alone["tokens"]
        assert one["parents"] == alone["parents"]
        assert one["top1"] == alone["top1"]
        np.testing.assert_allclose(one["logp"], alone["logp"], rtol=1e-6, atol=4e-6)
    assert any(len(row) > program.BLOCK for row in alone["tokens"])


@pytest.mark.parametrize(("ranks", "case"), CASES, ids=IDS)
def test_neither_padding_nor_an_impossible_token_is_drafted(said: Any, ranks: int, case: program.Case) -> None:
    found = [one[case.name] for one in said(ranks)]
    assert sum(one["tokens_of_shard"] for one in found) == case.vocab
    assert sum(one["poisoned"] for one in found) == -case.vocab % 64
    drafted = {token for row in found[0]["tokens"] for token in row[1:]}
    possible = torch.isfinite(case.weight()[:, 0]).nonzero().view(-1).tolist()
    assert drafted <= set(possible)
    assert len(possible) < case.vocab or case.kind != "banned"


def test_a_shard_may_be_padding_alone(said: Any) -> None:
    for ranks in program.CASES:
        assert [one for one in said(ranks) if any(not seen.get("tokens_of_shard", 1) for seen in one.values())]


@pytest.mark.parametrize("ranks", list(program.CASES))
def test_ranks_verify_on_the_same_bytes_whatever_they_compute_by_themselves(said: Any, ranks: int) -> None:
    """Gathered logits are their owners' on every rank, so argmax cannot part them."""
    found = [one["verified"] for one in said(ranks)]
    vocab = program.CASES[ranks][-1].vocab
    assert len({one["hidden"] for one in found}) == ranks
    assert same([one["logits"] for one in found])
    assert same([one["greedy"] for one in found])
    assert {one["width"] for one in found} == {vocab}
    assert max(one[name]["largest"] for one in found for name in ("greedy", "processed", "drawn")) < vocab


@pytest.mark.parametrize("ranks", list(program.CASES))
def test_rank_0_decides_where_ranks_could_part(said: Any, ranks: int) -> None:
    """Draws (their seeds are each rank's own here), and greedy rows that each rank adjusted by itself."""
    found = [one["verified"] for one in said(ranks)]
    for apart in ("greedy_apart", "drawn_apart"):
        assert len({one[apart]["tokens"] for one in found}) > 1
    for name in ("drawn", "processed", "grammar"):
        assert same([one[name] for one in found]), name
    for name in ("processed", "grammar"):
        assert found[0][name] == found[0]["greedy_apart"]


class Group:
    def __init__(self, ranks: int) -> None:
        self.world_size, self.sent = ranks, 0

    def broadcast(self, _tensor: torch.Tensor, src: int = 0) -> None:
        assert src == 0
        self.sent += 1


@pytest.mark.xdist_group("sglang")
@pytest.mark.parametrize(
    ("ranks", "request_values", "flag", "greedy", "sent"),
    [
        (2, {}, False, True, 0),
        (2, {}, True, True, 1),
        (2, {"grammar": object()}, False, True, 1),
        (2, {"custom_logit_processor": "x"}, False, True, 1),
        (2, {"grammar": object()}, False, False, 1),  # the draw's own broadcast, once
        (1, {"grammar": object()}, True, True, 0),
    ],
)
def test_a_greedy_round_pays_for_agreement_only_where_it_is_needed(
    sglang_src: Path, monkeypatch: pytest.MonkeyPatch, ranks: int, request_values: dict[str, Any], flag: bool,
    greedy: bool, sent: int,
) -> None:  # fmt: skip
    sglang_setup.load(sglang_src)
    from sglang.srt.layers import sampler
    from sglang_ddtree import verify
    from sglang_ddtree.tags import RequestTags

    monkeypatch.setattr(sampler, "SYNC_TOKEN_IDS_ACROSS_TP", flag)
    group, reqs = Group(ranks), program.requests(**request_values)
    positions = torch.arange(program.BATCH * 2).view(program.BATCH, 2)
    logits = torch.randn(program.BATCH * 2, 20, generator=torch.Generator().manual_seed(6))
    target = verify.target_tokens(logits, positions, program.laws(greedy), reqs, RequestTags("cpu").of(reqs), group)
    assert group.sent == sent
    assert not greedy or torch.equal(target.view(-1), logits.argmax(-1))


def test_hooked_functions_are_those_that_a_round_calls(sglang_src: Path) -> None:
    """A hook on a name that nothing looks up any more would leave ranks to themselves."""
    sglang_setup.load(sglang_src)
    from sglang_ddtree import head, ranks, verify

    names = [path for path, _hook, _kind in ranks.table()]
    assert names == ["sglang_ddtree.head.draft_topk", "sglang_ddtree.verify.target_tokens"]
    for function in (head.draft_topk, verify.target_tokens):
        assert hasattr(function, "__wrapped__")
    ids, values, lse = torch.full((2, 3), 9), torch.zeros(2, 3), torch.zeros(2)
    head.draft_topk(torch.zeros(2, 0), ids, values, lse, vocab_start=64)
    assert SimpleNamespace(ids=ids.tolist(), v=values.tolist(), lse=lse.tolist()) == SimpleNamespace(
        ids=[[0] * 3] * 2, v=[[-float("inf")] * 3] * 2, lse=[-float("inf")] * 2
    )
