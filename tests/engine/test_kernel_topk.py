"""Top-k log-probabilities and their merge over shards against float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from engine_trees import poison
from sglang_ddtree.kernels import topk
from sglang_ddtree.reference import topk as ref


def run(logits: torch.Tensor, k: int, **options: object) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows = logits.shape[0]
    ids, values, lse = torch.empty(rows, k, dtype=torch.int64), torch.empty(rows, k), torch.empty(rows)
    poison(ids, values, lse)
    topk.draft_topk(logits, ids, values, lse, **options)
    return ids, values, lse


def assert_exact(logits: torch.Tensor, k: int, valid: int, **launch: object) -> None:
    """Every id and value as the oracle has it, -inf and fillers included, over a workspace that holds other things."""
    rows = logits.shape[0]
    ids, values, lse = torch.empty(rows, k, dtype=torch.int64), torch.empty(rows, k), torch.empty(rows)
    poison(ids, values, lse)
    workspace = topk.TopKWorkspace.allocate(rows + 1, logits.shape[1], k, "cpu")
    for part in vars(workspace).values():
        part.fill_(float("inf"))
    if launch:
        workspace = topk.TopKWorkspace(*(torch.full((rows, 1000), float("inf")) for _ in range(2)))
        topk._launch(logits, ids, values, lse, workspace, 7, valid, False, None, **launch)
    else:
        topk.draft_topk(logits, ids, values, lse, vocab_start=7, num_valid=valid, normalise=False, workspace=workspace)
    want_ids, want_values, want_lse = ref.topk(logits.float().numpy(), k, vocab_start=7, num_valid=valid)
    np.testing.assert_array_equal(ids.numpy(), want_ids)
    np.testing.assert_array_equal(values.numpy().astype(np.float64), want_values)
    assert_close(lse, want_lse)


def assert_close(got: torch.Tensor, want: np.ndarray) -> None:
    np.testing.assert_allclose(got.numpy().astype(np.float64), want, rtol=1e-6, atol=4e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("vocab", "k", "padding"), [(5, 8, 0), (37, 1, 3), (4096, 4, 0), (9000, 8, 129), (12289, 16, 5)]
)
def test_equals_log_softmax(vocab: int, k: int, padding: int, dtype: torch.dtype) -> None:
    torch.manual_seed(vocab)
    logits = (torch.randn(4, vocab) * 5).to(dtype)
    logits[1] = logits[1, 0]  # ties everywhere
    logits[2, ::2] = float("-inf")
    valid = vocab - padding
    logits[:, valid:] = 1e9  # padding rows of a shard must not be seen
    want_ids, want_values, want_lse = ref.topk(logits.float().numpy(), k, vocab_start=1000, num_valid=valid)
    ids, values, lse = run(logits, k, vocab_start=1000, num_valid=valid)
    real = np.isfinite(want_values)
    np.testing.assert_array_equal(ids.numpy()[real], want_ids[real])
    assert_close(values, ref.log_probs(want_values, want_lse))
    assert_close(lse, want_lse)
    plain = run(logits, k, vocab_start=1000, num_valid=valid, normalise=False)
    assert_close(plain[1], want_values)


KS = [1, 3, 8, 9, 16, 17, 64]  # on both sides of every change of the sub-chunk's size


def crowded(valid: int, k: int) -> torch.Tensor:
    """Rows that a search by sub-chunks could get wrong, the padding behind ``valid`` huge."""
    generator = torch.Generator().manual_seed(valid + k)
    logits = torch.randn(8, valid + 130, generator=generator)
    start = 1024 if valid > 1024 + k else 0
    logits[0, start : start + k] += 50  # all of the best in one sub-chunk
    logits[1, 5:valid:61] = 9.0  # ties between sub-chunks and inside them, more of them than are asked for
    logits[1, valid - 1] = 9.0
    logits[2, 63:valid:64] = 9.0  # equal maxima, while the second best of a late sub-chunk beats all other second bests
    logits[2, valid - 2] = 8.5
    logits[3] = float("-inf")
    logits[4, :valid] = float("-inf")  # fewer columns than are asked for, far apart
    logits[4, valid // 2] = logits[4, valid - 1] = -3.0
    logits[5, : valid // 2] = float("nan")
    logits[5, valid // 2 : valid - valid // 4] = float("-inf")
    logits[6, valid - 1] = 99.0  # the best is the last valid column
    logits[7] = torch.tensor([0.0, -0.0])[torch.arange(logits.shape[1]) % 2]
    logits[:, valid:] = 1e9
    return logits


@pytest.mark.parametrize("k", KS)
@pytest.mark.parametrize("valid", [3, 64, 65, 300, 4096, 4097, 9000])
def test_the_best_are_found_wherever_they_lie(valid: int, k: int) -> None:
    assert_exact(crowded(valid, k), k, valid)
    assert_exact(crowded(valid, k).to(torch.bfloat16), k, valid)


@pytest.mark.parametrize("k", KS)
def test_rows_of_few_different_values(k: int) -> None:
    generator = torch.Generator().manual_seed(k)
    few = torch.tensor([float("nan"), float("-inf"), -1.5, -0.0, 0.0, 2.0])
    for chance in (0.5, 0.01, 0.0005):
        valid = int(torch.randint(1, 6000, (1,), generator=generator))
        rare = torch.rand(4, valid, generator=generator) < chance
        assert_exact(torch.where(rare, few[torch.randint(0, 6, rare.shape, generator=generator)], -2.0), k, valid)


@pytest.mark.parametrize("launch", [{"chunk": 8192, "sub": 512}, {"chunk": 1024, "sub": 64}, {"sub": 4096}])
def test_other_sizes_of_chunks_change_nothing(launch: dict[str, int]) -> None:
    for k in (5, 64):
        assert_exact(crowded(9000, k), k, 9000, **launch)


def test_a_workspace_for_less_is_refused() -> None:
    small = topk.TopKWorkspace.allocate(2, 600, 8, "cpu")
    run(torch.zeros(2, 600), 8, workspace=small)
    for logits, k in ((torch.zeros(3, 600), 8), (torch.zeros(2, 800), 8), (torch.zeros(2, 600), 64)):
        with pytest.raises(ValueError, match="workspace is too small"):
            run(logits, k, workspace=small)


def test_top_one_is_argmax_and_rows_may_be_strided() -> None:
    torch.manual_seed(1)
    logits = torch.randn(3, 6000)[:, :5000]
    ids, _, _ = run(logits, 3)
    assert torch.equal(ids[:, 0], logits.argmax(-1))
    assert torch.equal(ids, torch.topk(logits, 3).indices)


def test_nan_infinite_and_signed_zero_rows() -> None:
    logits = torch.zeros(4, 50)
    logits[0] = float("-inf")
    logits[1, 7] = float("nan")
    logits[2, 3] = -0.0
    logits[3, 1:] = float("-inf")
    ids, values, lse = run(logits, 4)
    assert values[0].tolist() == [float("-inf")] * 4
    assert float(lse[0]) == float("-inf")
    assert ids[1].tolist() == [0, 1, 2, 3]
    assert ids[2].tolist() == [0, 1, 2, 3]
    assert values[3].tolist() == [0.0] + [float("-inf")] * 3
    assert not torch.isnan(values).any()


@pytest.mark.parametrize(("ranks", "k"), [(2, 4), (4, 8), (3, 16)])
def test_shards_merge_to_the_whole(ranks: int, k: int) -> None:
    torch.manual_seed(ranks)
    logits = torch.round(torch.randn(5, 30 * ranks) * 3)  # rounded: ties across shards
    logits[4, : 30 * (ranks - 1)] = float("-inf")
    parts = [run(logits[:, 30 * r : 30 * (r + 1)], k, vocab_start=30 * r, normalise=False) for r in range(ranks)]
    ids, values, lse = (torch.stack([p[i] for p in parts]) for i in range(3))
    out_ids, out_logp = torch.empty(5, k, dtype=torch.int64), torch.empty(5, k)
    poison(out_ids, out_logp)
    topk.merge_topk(ids, values, lse, out_ids, out_logp)
    whole_ids, whole_values, whole_lse = ref.topk(logits.numpy(), k)
    np.testing.assert_array_equal(out_ids.numpy(), whole_ids)
    assert_close(out_logp, ref.log_probs(whole_values, whole_lse))
    ref_ids, ref_logp = ref.merge_topk(ids.numpy(), values.numpy(), lse.numpy())
    np.testing.assert_array_equal(ref_ids[np.isfinite(ref_logp)], out_ids.numpy()[np.isfinite(ref_logp)])
    assert_close(out_logp, ref_logp)


def test_temperatures_scale_groups_of_rows() -> None:
    torch.manual_seed(2)
    logits = torch.randn(6, 5000)
    temperatures = torch.tensor([0.5, 2.0])
    _, values, lse = run(logits, 4, normalise=False, temperatures=temperatures)
    scaled = logits / temperatures.repeat_interleave(3)[:, None]
    assert_close(values, torch.topk(scaled, 4).values.numpy())
    assert_close(lse, torch.logsumexp(scaled, -1).numpy())


def test_refusals() -> None:
    with pytest.raises(ValueError, match="k must be"):
        run(torch.zeros(1, 10), 65)
    with pytest.raises(ValueError, match="valid columns"):
        run(torch.zeros(1, 10), 2, num_valid=11)
    with pytest.raises(ValueError, match="unit column stride"):
        run(torch.zeros(10, 4).t(), 2)
