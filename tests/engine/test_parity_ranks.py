"""The suite on several GPUs: how ranks are watched and compared, and what they load."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sglang_ddtree import proofs
from sglang_ddtree.parity import agreement, checkpoint, informed, models, plan, suite, verdicts
from sglang_ddtree.parity.plan import Arm

ANSWER = {"sums": [5, 6, 7], "results": [{"ids": [[1, 2]]}, {"trees": []}]}


def answer(**changes: Any) -> dict[str, Any]:
    return {**copy.deepcopy(ANSWER), **changes}


def test_ranks_that_agree_are_not_apart() -> None:
    assert verdicts.apart([ANSWER]) == []
    assert verdicts.apart([ANSWER, answer(), answer()]) == []


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (answer(sums=[5, 8, 9]), "rank 2 parted from rank 0 in tree round 1 of 3"),
        (answer(sums=[5, 6]), "rank 2 had 2 tree rounds, rank 0 3"),
        (answer(results=[{"ids": [[1, 3]]}, {"trees": []}]), "rank 2 emitted other tokens than rank 0 in job 0"),
    ],
)
def test_where_ranks_parted_is_told(other: dict[str, Any], says: str) -> None:
    assert verdicts.apart([ANSWER, answer(), other]) == [says]


def test_a_sum_sees_values_places_and_tensors() -> None:
    def of(*rows: list[int]) -> int:
        return int(agreement.checksum(*(torch.tensor(row, dtype=torch.int32) for row in rows)))

    found = [of([1, 2], [3]), of([2, 1], [3]), of([1, 2], [4]), of([3], [1, 2]), of([1, 2, 0], [3]), of([1], [2, 3])]
    assert len(set(found)) == len(found)
    assert of([1, 2], [3]) == found[0]
    assert int(agreement.checksum(torch.full((5000,), 2**62), torch.tensor([1]))) != 0  # it may wrap


SHARED = Arm("hybrid/tree-16-8", "tree", "hybrid", (), tp=2)


@pytest.mark.parametrize(
    ("found", "says"),
    [
        ({"sums": [4, 5]}, []),
        ({"sums": []}, ["no tree round of its ranks was compared"]),
        ({"sums": [4], "apart": ["rank 1 parted"]}, ["rank 1 parted"]),
    ],
)
def test_an_arm_on_several_gpus_is_judged_by_what_its_ranks_shared(found: dict[str, Any], says: list[str]) -> None:
    answer = {"ok": True, "start_s": 1.0, "states": "snapshots", "results": [{"job": "tokens", "ids": [[1]]}], **found}
    (row,) = suite.judge({SHARED.name: answer}, [SHARED])
    assert row["wrong"] == says
    assert (row["ranks"], row["rounds_compared"]) == (2, len(found["sums"]))


@pytest.mark.parametrize(("job", "wrong"), [("timed", 0), ("tokens", 1)])
def test_only_an_arm_that_is_all_on_the_clock_need_have_no_sums(job: str, wrong: int) -> None:
    arm = dataclasses.replace(SHARED, jobs=({"job": "timed"}, {"job": job}))
    results = [{"job": "timed"}, {"job": job, "ids": [[1]]}]
    answer = {"ok": True, "start_s": 1.0, "states": "snapshots", "sums": [], "results": results}
    (row,) = suite.judge({arm.name: answer}, [arm])
    assert len(row["wrong"]) == wrong


def test_no_round_is_summed_on_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang_ddtree.parity import arm, jobs

    seen, during = agreement.Watch(), {}  # type: tuple[agreement.Watch, dict[str, bool]]

    def job(name: str) -> Any:
        def run(_session: Any, **_given: Any) -> dict[str, Any]:
            during[name] = seen.on
            return {}

        run.__name__ = name
        return run

    monkeypatch.setattr(jobs, "JOBS", {name: job(name) for name in ("tokens", "timed")})
    monkeypatch.setattr(arm, "meet", lambda: None)
    for name in ("timed", "tokens"):
        arm.answered(None, {"job": name}, None, seen)
    assert during == {"timed": False, "tokens": True}
    assert seen.on


@pytest.mark.parametrize("name", ["tokens", "timed"])
def test_ranks_wait_for_rank_0s_turn_and_it_keeps_it_until_all_have_ended(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fcntl

    from sglang_ddtree.parity import arm, jobs

    lock, events = str(tmp_path / "lock"), []  # type: tuple[str, list[tuple[str, bool]]]

    def happens(what: str) -> None:
        with Path(f"{lock}.0").open("a") as place:
            try:
                fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                events.append((what, True))
            else:
                events.append((what, False))

    def job(_session: Any) -> dict[str, Any]:
        happens("job")
        return {}

    job.__name__ = name
    monkeypatch.setattr(jobs, "JOBS", {name: job})
    monkeypatch.setattr(arm, "meet", lambda: happens("meet"))
    arm.answered(None, {"job": name}, lock, agreement.Watch())
    happens("after")
    assert events == [("meet", True), ("job", True), ("meet", True), ("after", False)]
    events.clear()
    arm.answered(None, {"job": name}, lock)  # of one rank: nobody to meet
    assert events == [("job", True)]


def test_a_proof_says_how_many_gpus_its_arms_shared() -> None:
    arms = [plan.spread(arm, 2) for arm in plan.selftest("hybrid")]
    proof = suite.proof([{"arm": arm.name, "wrong": []} for arm in arms], arms, "now")
    assert proof["tp"] == 2
    assert proof["engine"] == proofs.engine_digest(tp=2)
    wanted = proofs.Combination("Qwen3_5ForCausalLM", "triton", proof["compute_capability"], proof["engine"], None, 64,
                                tp=2)  # fmt: skip
    assert proofs.reject(proof, wanted) is None


def test_what_is_spread_over_gpus_and_what_it_is_compared_with() -> None:
    arms = {arm.name: arm for arm in [*plan.selftest("hybrid"), *plan.half_precision("hybrid"), *plan.costs("hybrid")]}
    spread = {name: plan.spread(arm, 2) for name, arm in arms.items()}
    assert {name for name, arm in spread.items() if arm.tp == 1} == {"hybrid/ar", "hybrid/ar-radix"}
    for name, arm in spread.items():
        argv = arm.argv(Path("/m"))
        assert argv[argv.index("--tp-size") + 1] == str(arm.tp)
        drawn = arms[name].seed is not None
        assert arm.seed is None
        assert argv[len(argv) - argv[::-1].index("--load-format")] == ("auto" if drawn else "dummy")
        assert plan.spread(arms[name], 1) == arms[name]
        spec = arm.spec(Path("/m"), Path("/lock"))
        assert spec["tp"] == arm.tp
        assert (plan.RANKS_ENVIRONMENT.items() <= spec["environ"].items()) == (arm.tp > 1)
        by_nccl = plan.spread(arms[name], 2, nccl_only=True)
        assert set(by_nccl.argv(Path("/m"))) - set(argv) == (set(plan.NCCL_ONLY) if arm.tp > 1 else set())


def test_models_for_several_ranks_have_weights_and_tokens_for_each(tmp_path: Path) -> None:
    import json

    models.write(tmp_path, ("drafter", "shape-27b"), ranks=4)
    config = json.loads((tmp_path / "drafter" / "config.json").read_text())
    assert config["vocab_size"] == 3 * 64 + 16
    assert (tmp_path / "drafter" / checkpoint.FILE).exists()
    assert [file.name for file in (tmp_path / "shape-27b").iterdir()] == ["config.json"]
    models.write(tmp_path, ("drafter",))
    assert json.loads((tmp_path / "drafter" / "config.json").read_text()) == models.MODELS["drafter"]


class Shards:
    """A group of ranks, asked one after the other: the first time each leaves its part, the second it gets all."""

    def __init__(self, ranks: int) -> None:
        self.world_size, self.parts = ranks, {}  # type: tuple[int, dict[int, torch.Tensor]]
        self.rank = 0

    def all_gather_into_tensor(self, out: torch.Tensor, part: torch.Tensor) -> None:
        self.parts[self.rank] = part.clone()
        out.copy_(torch.cat([self.parts.get(rank, part) for rank in range(self.world_size)]))


def test_a_drafter_over_shards_is_told_what_one_over_the_whole_vocabulary_is() -> None:
    whole, depths, slots = 80, 4, torch.tensor([1, 0])
    logits = torch.randn(2 * depths, whole, generator=torch.Generator().manual_seed(3))
    truth = torch.arange(40).remainder(whole)[None] * torch.tensor([[7], [11]]) % whole
    truth[0, 8] = informed.NOTHING

    def told(part: torch.Tensor, start: int, group: Any) -> torch.Tensor:
        informant = informed.Informant.__new__(informed.Informant)
        informant.table, informant.ranks, informant.group = truth, torch.tensor(informed.RANKS), group
        return informant.sharpen(part, slots, torch.tensor([5, 9]), start)

    want = told(logits, 0, None)
    assert not torch.equal(want, logits * informed.SHARPNESS)
    group, bounds = Shards(3), ((0, 64), (64, 80), (80, 80))
    for turn in range(2):
        for group.rank, (a, b) in enumerate(bounds):
            got = told(logits[:, a:b], a, group)
            assert turn == 0 or torch.equal(got, want[:, a:b])


@pytest.mark.parametrize("name", ["hybrid", "dense", "drafter"])
def test_a_checkpoint_has_the_tensors_of_its_model_and_is_written_once(name: str, tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    config = {**models.MODELS[name], "hidden_size": 32, "intermediate_size": 48}
    checkpoint.write(tmp_path, config, 1)
    found = load_file(tmp_path / checkpoint.FILE)
    assert {key: value.shape for key, value in found.items()} == checkpoint.shapes(config)
    gains = found[("" if name == "drafter" else "model.") + "layers.0.input_layernorm.weight"]
    assert abs(float(np.mean(gains)) - (0.0 if name == "hybrid" else 1.0)) < 0.2
    before = (tmp_path / checkpoint.FILE).stat().st_mtime_ns
    checkpoint.write(tmp_path, config, 2)
    assert (tmp_path / checkpoint.FILE).stat().st_mtime_ns == before
    assert [file.name for file in tmp_path.iterdir()] == [checkpoint.FILE]


def test_the_names_are_those_of_a_trained_pair() -> None:
    """The self-test's own weights are checkpoints that SGLang serves: the same tensors, of the same sizes."""
    import json

    from cpu_pair import FOLDER
    from safetensors import safe_open

    for part in ("target", "drafter"):
        config = json.loads((FOLDER / part / "config.json").read_text())
        (file,) = (FOLDER / part).glob("*.safetensors")
        with safe_open(file, "np") as there:
            sizes = {key: tuple(there.get_slice(key).get_shape()) for key in there.keys()}  # noqa: SIM118
        assert checkpoint.shapes(config) == sizes
