"""What the whole-round tests do not reach: watched and sampled rounds, grammars, tensor-parallel ranks, reports."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sglang_setup
import test_plugin_round as rounds
import torch

pytestmark = pytest.mark.xdist_group("sglang")


@pytest.fixture(autouse=True)
def _sglang(sglang_src: Path) -> None:
    sglang_setup.load(sglang_src)


def watching(worker: Any) -> Any:
    """The worker of the round tests, set to shadow-linear over a played DFLASH round."""
    from sglang_ddtree import config, metrics
    from sglang_ddtree.kernels.shadow import ShadowRing

    worker.ddtree = config.Resolved(config.DDTreeConfig(mode="shadow-linear", budget=9, topk_cap=4), rounds.BLOCK)
    worker.ring = ShadowRing.allocate(4, rounds.BLOCK - 1, 10, "cpu")
    worker._draft_sampler = worker.head
    worker.reporter = metrics.Reporter((worker.ring.total, worker.ring.histogram), metrics.shadow_summary, 10**9, [])
    return worker


def played_dflash(self: Any, batch: Any, _publish: Any, _barrier: Any) -> Any:
    """A linear round as DFLASH runs it: the head's top-1 chain against plain decoding."""
    count, block = len(batch.seq_lens), rounds.BLOCK
    ids = torch.full((count, block), rounds.VOCAB - 1)
    ids[:, 0] = batch.spec_info.bonus_tokens
    given = SimpleNamespace(batch_size=count, input_ids=ids.flatten(), seq_lens=batch.seq_lens,
                            req_pool_indices=batch.req_pool_indices)  # fmt: skip
    self.head(self.draft_model_runner.forward(given).logits_output.hidden_states, ids)
    chain = self.head.out[: count * (block - 1)].view(count, block - 1)
    out, lens = torch.zeros((count, block), dtype=torch.int64), torch.zeros(count, dtype=torch.int32)
    pool, table = self.model_runner.pool, self.model_runner.req_to_token_pool.req_to_token
    for row in range(count):
        length = int(batch.seq_lens[row])
        slots = table[batch.req_pool_indices[row]].long()
        sequence = [*pool.at_slot[slots[:length]].tolist(), int(ids[row, 0])]
        emitted = []
        for token in [*chain[row].tolist(), -1]:
            emitted.append(rounds.next_token(sequence))
            if emitted[-1] != token:
                break
            sequence.append(token)
        pool.at_slot[slots[length : length + len(emitted)]] = torch.tensor([int(ids[row, 0]), *emitted[:-1]])
        out[row, : len(emitted)], lens[row] = torch.tensor(emitted), len(emitted)
    bonus = out.gather(1, (lens.long() - 1)[:, None])[:, 0]
    result = {"next_token_ids": out.flatten(), "accept_lens": lens, "new_seq_lens": batch.seq_lens + lens}
    return SimpleNamespace(**result, can_run_cuda_graph=True, next_draft_input=SimpleNamespace(bonus_tokens=bonus))


def watched(worker: Any, turns: int) -> tuple[list[list[int]], int]:
    batch = rounds.start(worker, rounds.PROMPTS, [rounds.request(f"r{i}") for i in range(3)])
    emitted = [[int(t)] for t in batch.spec_info.bonus_tokens]
    chain = 0
    for _ in range(turns):
        result = worker._watched_round(batch, None, None)
        for row, count in enumerate(result.accept_lens.tolist()):
            emitted[row] += result.next_token_ids.view(3, -1)[row, :count].tolist()
            chain += count - 1
        batch.seq_lens = result.new_seq_lens
        batch.spec_info.bonus_tokens = result.next_draft_input.bonus_tokens
    return emitted, chain


def test_watching_changes_no_token_and_scores_at_least_the_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2

    monkeypatch.setattr(DFlashWorkerV2, "forward_batch_generation", played_dflash)
    worker = watching(rounds.make_worker(monkeypatch, budget=9, requests=3))
    emitted, chain = watched(worker, 12)
    for prompt, tokens in zip(rounds.PROMPTS, emitted, strict=True):
        assert tokens == rounds.plain_decoding(prompt, len(tokens))
    seen = worker.ddtree_counters()["counters"]
    assert seen["trees"] > 20  # the last trees are still open
    assert seen["would_accept_per_tree"] > chain / 36
    assert sum(seen["histogram"]) == seen["trees"]


def test_an_eager_draft_is_not_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the captured batches DFLASH picks its tokens without the head, whose buffers then are an older round's."""
    from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2

    def eager(*given: Any) -> Any:
        result = played_dflash(*given)
        result.can_run_cuda_graph = False
        return result

    monkeypatch.setattr(DFlashWorkerV2, "forward_batch_generation", eager)
    worker = watching(rounds.make_worker(monkeypatch, budget=9, requests=3))
    watched(worker, 3)
    assert worker.ddtree_counters()["counters"]["trees"] == 0


def sampling(seeds: list[int]) -> Any:
    count = len(seeds)
    return SimpleNamespace(
        is_all_greedy=False, has_custom_logit_processor=False, acc_additive_penalties=None, acc_scaling_penalties=None,
        logit_bias=None, sampling_seed=None, temperatures=torch.full((count, 1), 0.3), top_ps=torch.ones(count),
        top_ks=torch.full((count,), 1 << 30, dtype=torch.int32), min_ps=torch.zeros(count),
        need_top_k_sampling=False, need_top_p_sampling=False, need_min_p_sampling=False,
    )  # fmt: skip


def test_a_sampled_round_draws_what_plain_decoding_with_the_seed_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """The played target gives 1 to one token and 0 to the rest; at 0.3 the others are drawn often enough to matter."""
    from sglang_ddtree.reference import sampling as law

    seeds = [11, 12, 13]
    worker = rounds.make_worker(monkeypatch, budget=9, requests=3)
    batch = rounds.start(
        worker, rounds.PROMPTS, [rounds.request(f"r{i}", sampling_seed=s, top_k=1 << 30) for i, s in enumerate(seeds)]
    )
    batch.sampling_info = sampling(seeds)
    emitted = [[int(t)] for t in batch.spec_info.bonus_tokens]
    for _ in range(6):
        result = worker._tree_round(batch, None, None)
        for row, count in enumerate(result.accept_lens.tolist()):
            emitted[row] += result.next_token_ids.view(3, -1)[row, :count].tolist()
        batch.seq_lens, batch.spec_info.bonus_tokens = result.new_seq_lens, result.next_draft_input.bonus_tokens.clone()
    unlikely = 0
    for prompt, seed, tokens in zip(rounds.PROMPTS, seeds, emitted, strict=True):
        sequence = [*prompt, tokens[0]]
        for token in tokens[1:]:
            logits = torch.zeros(rounds.VOCAB)
            logits[rounds.next_token(sequence)] = 1.0
            noise = law.gumbel(seed, len(sequence) - 1, torch.arange(rounds.VOCAB).numpy())
            assert token == int((logits.double() / 0.3 + torch.from_numpy(noise)).argmax())
            unlikely += token != rounds.next_token(sequence)
            sequence.append(token)
    assert unlikely > 3


def test_a_grammar_masks_each_row_between_target_and_walk(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tree is handed over before the target runs, its mask applied after; links and tokens are the tree's own."""
    from sglang.srt.speculative import spec_utils

    worker = rounds.make_worker(monkeypatch, budget=4, requests=3)
    batch = rounds.start(worker, rounds.PROMPTS, [rounds.request(f"r{i}") for i in range(3)])
    batch.has_grammar = True
    order: list[str] = []

    def build(*, tree: Any, barrier: Any, **_given: Any) -> Any:
        barrier()
        links, siblings, tokens = tree.resolve()
        assert links.shape == siblings.shape == tokens.shape == (3, 5)
        assert tokens[:, 0].tolist() == [rounds.next_token(p) for p in rounds.PROMPTS]
        order.append("mask")
        return SimpleNamespace(apply=lambda logits: logits.copy_(torch.eye(rounds.VOCAB)[3].expand_as(logits)))

    monkeypatch.setattr(spec_utils, "build_grammar_vocab_mask", build)
    result = worker._tree_round(batch, None, lambda: order.append("barrier"))
    assert order == ["barrier", "mask"]
    assert set(result.next_token_ids.view(3, -1)[:, 0].tolist()) == {3}


class Ranks:
    """A tensor-parallel group of two ranks, played one after the other: the first pass records, the second answers."""

    world_size = 2

    def __init__(self) -> None:
        self.sent: list[list[torch.Tensor]] = [[], []]
        self.rank, self.call = 0, 0

    def all_gather_into_tensor(self, target: torch.Tensor, part: torch.Tensor) -> None:
        if len(self.sent[self.rank]) <= self.call:
            self.sent[self.rank].append(part.clone())
        parts = [sent[self.call] if self.call < len(sent) else torch.zeros_like(part) for sent in self.sent]
        target.copy_(torch.cat(parts))
        self.call += 1


def test_ranks_with_half_the_vocabulary_each_agree_with_one_that_has_all() -> None:
    from sglang_ddtree.head import DraftHead

    generator = torch.Generator().manual_seed(2)
    weight, hidden = torch.randn(20, 8, generator=generator), torch.randn(2 * rounds.BLOCK, 8, generator=generator)
    shape = {"block_size": rounds.BLOCK, "children": 4, "capacity": 2}
    whole = DraftHead(weight=weight, num_org=20, org_vocab_start=0, **shape)
    whole(hidden)
    group = Ranks()
    padding = torch.full((3, 8), 9.0)  # rows of a shard beyond its tokens: they must not count
    heads = [DraftHead(weight=torch.cat([weight[10 * r : 10 * r + 10], padding]), num_org=10, org_vocab_start=10 * r,
                       tp_group=group, **shape) for r in range(2)]  # fmt: skip
    for _ in range(2):
        for group.rank, head in enumerate(heads):
            group.call = 0
            head(hidden)
    for head in heads:
        assert torch.equal(head.ids, whole.ids)
        torch.testing.assert_close(head.logp, whole.logp)
        assert torch.equal(head.out, whole.out)


@pytest.mark.parametrize(
    ("lm_head", "says"),
    [
        (None, "no lm_head"),
        (SimpleNamespace(weight=torch.zeros(4, 4, dtype=torch.int8)), "quantised"),
        (
            SimpleNamespace(weight=torch.zeros(4, 4), shard_indices=SimpleNamespace(num_added_elements=2)),
            "added tokens",
        ),
    ],
)
def test_a_head_that_cannot_draft_says_why(lm_head: Any, says: str) -> None:
    from sglang_ddtree.head import HeadUnsupportedError, build_head

    with pytest.raises(HeadUnsupportedError, match=says):
        build_head(SimpleNamespace(lm_head=lm_head), block_size=4, children=2, capacity=1, tp_group=None)


def test_reports_come_soon_then_every_interval_and_from_a_copy() -> None:
    from sglang_ddtree import metrics

    told: list[dict[str, Any]] = []
    counters = tuple(torch.zeros(n, dtype=torch.int64) for n in (4, 3, 3))
    reporter = metrics.Reporter(counters, metrics.tree_summary, 4, [told.append])
    for _ in range(17):
        counters[0].add_(torch.tensor([1, 16, 3, 1]))
        reporter.round_done()
    assert [t["trees"] for t in told] == [1, 2, 4, 8, 12, 16]
    assert told[0]["nodes_per_tree"] == 16
    assert told[0]["off_spine_share"] == 0.3333
    assert reporter.now()["trees"] == 17


def test_gauges_stand_beside_sglangs_own() -> None:
    from prometheus_client import REGISTRY
    from sglang_ddtree import metrics

    gauges = metrics.Gauges({"model_name": "m"})
    gauges.set({"trees": 5, "accepted_per_tree": 2.5, "acceptance_by_depth": [0.5]})
    assert REGISTRY.get_sample_value("sglang:ddtree_trees", {"model_name": "m"}) == 5
    assert REGISTRY.get_sample_value("sglang:ddtree_accepted_per_tree", {"model_name": "m"}) == 2.5
