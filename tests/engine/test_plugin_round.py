"""Whole tree rounds of the real worker on the CPU: its kernels in the interpreter, drafter and target played by
functions.

The played target sees what the real one would: it writes each row's token into the row's KV slot, and reads the
sequence of a row back through req_to_token and the attention mask. Its next token is a hash of that sequence.
So a wrong slot, mask cell, position, link, acceptance or compaction changes what is generated, and plain
decoding of the same hash is the oracle.
"""

from __future__ import annotations

import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sglang_setup
import torch

pytestmark = pytest.mark.xdist_group("sglang")
VOCAB, BLOCK, CONTEXT = 12, 5, 96


def next_token(sequence: list[int]) -> int:
    return zlib.crc32(bytes(sequence)) % VOCAB


def plain_decoding(prompt: list[int], new: int) -> list[int]:
    sequence = list(prompt)
    for _ in range(new):
        sequence.append(next_token(sequence))
    return sequence[len(prompt) :]


class Pool:
    """KV slots that hold token ids in place of keys and values."""

    def __init__(self) -> None:
        self.at_slot = torch.full((2048,), -1, dtype=torch.int64)

    def move_kv_cache(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.at_slot[target] = self.at_slot[source].clone()


class Target:
    """`model_runner` and `target_worker` in one: embeddings, tables, and the verify pass."""

    def __init__(self, slots: int) -> None:
        self.pool = Pool()
        table = torch.zeros((slots, CONTEXT), dtype=torch.int32)
        table[1:] = (
            torch.randperm(2000, generator=torch.Generator().manual_seed(5))[: (slots - 1) * CONTEXT].view(
                slots - 1, CONTEXT
            )
            + 1
        )
        self.req_to_token_pool = SimpleNamespace(req_to_token=table, size=slots - 1)
        self.token_to_kv_pool_allocator = SimpleNamespace(get_kvcache=lambda: self.pool)
        self.model = SimpleNamespace(get_input_embeddings=lambda: lambda ids: ids[..., None].float())
        self.model_runner = self

    def forward_batch_generation(self, forward_batch: Any, **_flags: Any) -> Any:
        """Logits of each row from the tokens its mask and slots let it see."""
        given = forward_batch
        requests, rows = len(given.lengths), given.tokens.numel() // len(given.lengths)
        self.pool.at_slot[given.out_cache_loc] = given.tokens
        logits = torch.zeros((requests * rows, VOCAB))
        base = 0
        for request, length in enumerate(given.lengths.tolist()):
            slots = self.req_to_token_pool.req_to_token[given.slots_of[request]].long()
            prefix = self.pool.at_slot[slots[:length]].tolist()
            width = length + rows
            for row in range(rows):
                cells = given.mask[base + row * width + length : base + (row + 1) * width]
                seen = [j for j in range(rows) if cells[j]]
                positions = given.positions.view(requests, rows)[request]
                if len({int(positions[j]) for j in seen}) == len(seen):  # a real row's path has one row a position
                    own = given.out_cache_loc.view(requests, rows)[request]
                    path = [int(self.pool.at_slot[own[j]]) for j in sorted(seen, key=lambda j: int(positions[j]))]
                    logits[request * rows + row, next_token(prefix + path)] = 1.0
            base += rows * width
        hidden = torch.arange(requests * rows)[:, None].float()
        output = SimpleNamespace(next_token_logits=logits, hidden_states=hidden)
        return SimpleNamespace(logits_output=output, can_run_cuda_graph=False)


class Drafter:
    """Guesses the truth at changing ranks, through the worker's own head: its hidden states are the wanted logits."""

    def __init__(self, target: Target) -> None:
        self.target = target

    def forward(self, forward_batch: Any) -> Any:
        given = forward_batch
        hidden = torch.zeros((given.batch_size * BLOCK, VOCAB))
        for request in range(given.batch_size):
            table = self.target.req_to_token_pool.req_to_token[given.req_pool_indices[request]].long()
            length = int(given.seq_lens[request])
            sequence = [*self.target.pool.at_slot[table[:length]].tolist(), int(given.input_ids[request * BLOCK])]
            for depth in range(1, BLOCK):
                truth = next_token(sequence)
                row = hidden[request * BLOCK + depth]
                row += torch.rand(VOCAB, generator=torch.Generator().manual_seed(length * 31 + depth))
                row[truth] = row.max() + (1.0 if (length + depth) % 3 else -0.2)
                sequence.append(truth)
        return SimpleNamespace(can_run_graph=False, logits_output=SimpleNamespace(hidden_states=hidden))


def make_worker(monkeypatch: pytest.MonkeyPatch, *, budget: int, requests: int) -> Any:
    from sglang_ddtree import config, info, metrics, worker
    from sglang_ddtree.head import DraftHead
    from sglang_ddtree.kernels.buffers import AcceptBuffers, TreeBuffers, TreeCounters
    from sglang_ddtree.tags import RequestTags

    resolved = config.Resolved(config.DDTreeConfig(mode="tree", budget=budget, topk_cap=4), BLOCK)
    made = object.__new__(worker.DDTreeWorker)
    target = Target(requests + 1)
    attributes = {
        "ddtree": resolved,
        "device": "cpu",
        "_target_worker": target,
        "model_runner": target,
        "_mask": None,
        "_round": 0,
        "draft_model_runner": Drafter(target),
        "_mask_token_id": VOCAB - 1,
        "_draft_block_spec_info": None,
        "head": DraftHead(
            weight=torch.eye(VOCAB), num_org=VOCAB, org_vocab_start=0, block_size=BLOCK, children=4, capacity=requests
        ),
        "trees": TreeBuffers.allocate(requests, budget + 1, "cpu"),
        "tags": RequestTags("cpu"),
        "accepts": [AcceptBuffers.allocate(requests, BLOCK, "cpu") for _ in range(2)],
        "counters": TreeCounters.allocate(BLOCK, "cpu"),
        "blocks": [torch.zeros((requests, BLOCK), dtype=torch.int64) for _ in range(2)],
        "slots": torch.zeros((requests, resolved.slots), dtype=torch.int64),
        "appended": [],
    }
    for name, value in attributes.items():
        object.__setattr__(made, name, value)
    source = (made.counters.total, made.counters.offered, made.counters.accepted)
    made.reporter = metrics.Reporter(source, metrics.tree_summary, 10**9, [])
    made._append_target_hidden_to_draft_kv_by_loc = lambda **given: made.appended.append(given)
    monkeypatch.setattr(worker, "commit_mamba_states_after_verify", lambda *given: made.__dict__.update(states=given))
    monkeypatch.setattr(worker, "get_tp_group", lambda: None)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)
    monkeypatch.setattr(info.DDTreeVerifyInput, "begin", begin)
    monkeypatch.setattr(info.DDTreeVerifyInput, "load", load)
    return made


def begin(self: Any, batch: Any, _target: Any) -> tuple[Any, bool]:
    forward = SimpleNamespace(
        tokens=self.draft_token,
        positions=self.positions,
        out_cache_loc=batch.out_cache_loc,
        lengths=batch.seq_lens.clone(),
        slots_of=batch.req_pool_indices,
    )
    return forward, False


def load(_self: Any, forward_batch: Any, _replay: bool, _target: Any, mask: torch.Tensor) -> None:
    forward_batch.mask = mask.clone()


def request(name: str, **params: Any) -> Any:
    defaults = {
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "min_new_tokens": 0,
        "sampling_seed": None,
        "top_k": 1,
    }
    return SimpleNamespace(
        rid=name, sampling_params=SimpleNamespace(**{**defaults, **params}), custom_logit_processor=None
    )


def start(worker: Any, prompts: list[list[int]], requests: list[Any]) -> Any:
    """A batch behind its prefill: prompts in their slots, the first token emitted."""
    target = worker.model_runner
    for slot, prompt in enumerate(prompts, start=1):
        target.pool.at_slot[target.req_to_token_pool.req_to_token[slot, : len(prompt)].long()] = torch.tensor(prompt)
    first = torch.tensor([next_token(p) for p in prompts])
    info = SimpleNamespace(
        is_all_greedy=True,
        has_custom_logit_processor=False,
        acc_additive_penalties=None,
        acc_scaling_penalties=None,
        logit_bias=None,
    )
    return SimpleNamespace(
        seq_lens=torch.tensor([len(p) for p in prompts]),
        req_pool_indices=torch.arange(1, len(prompts) + 1),
        spec_info=SimpleNamespace(bonus_tokens=first, reserved_seq_lens_cpu=None, reserved_seq_lens_sum=None),
        reqs=requests,
        sampling_info=info,
        has_grammar=False,
        seq_lens_cpu=None,
        seq_lens_sum=None,
        out_cache_loc=None,
    )


def generate(worker: Any, prompts: list[list[int]], rounds: int, requests: list[Any] | None = None) -> tuple[Any, Any]:
    batch = start(worker, prompts, requests or [request(f"r{i}") for i in range(len(prompts))])
    emitted = [[int(t)] for t in batch.spec_info.bonus_tokens]
    lengths = []
    for _ in range(rounds):
        result = worker._tree_round(batch, None, None)
        tokens = result.next_token_ids.view(len(prompts), -1)
        for row, count in enumerate(result.accept_lens.tolist()):
            emitted[row] += tokens[row, :count].tolist()
        lengths.append(result.accept_lens.tolist())
        batch.seq_lens = result.new_seq_lens.clone()
        batch.spec_info.bonus_tokens = result.next_draft_input.bonus_tokens.clone()
    return emitted, lengths


PROMPTS = [[1, 2, 3, 4], [7, 7, 7, 7, 7, 7, 7], [5]]


@pytest.fixture(autouse=True)
def _sglang(sglang_src: Path) -> None:
    sglang_setup.load(sglang_src)


@pytest.mark.parametrize("budget", [1, 3, 4, 9])
def test_rounds_generate_what_plain_decoding_does(budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = make_worker(monkeypatch, budget=budget, requests=3)
    emitted, lengths = generate(worker, PROMPTS, rounds=8)
    for prompt, tokens in zip(PROMPTS, emitted, strict=True):
        assert tokens == plain_decoding(prompt, len(tokens))
    taken = [n for line in lengths for n in line]
    assert max(taken) > (2 if budget > 3 else 1), "nothing was accepted: the test would prove nothing"
    summary = worker.ddtree_counters()["counters"]
    assert summary["trees"] == 24
    assert summary["accepted_per_tree"] * 24 == pytest.approx(sum(taken) - 24, abs=0.05)
    assert summary["accepted_off_spine"] > 0 or budget == 1


def test_the_drafter_learns_of_the_accepted_path_only(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = make_worker(monkeypatch, budget=9, requests=3)
    generate(worker, PROMPTS, rounds=1)
    (given,) = worker.appended
    accept = worker.accepts[0].rows(3)
    hidden = given["target_hidden"].view(3, BLOCK)
    table = worker.model_runner.req_to_token_pool.req_to_token
    for row, count in enumerate(accept.commit_lens.tolist()):
        assert hidden[row, :count].tolist() == accept.accept_index[row, :count].tolist()
        start_at = len(PROMPTS[row])
        assert given["cache_loc_2d"][row].tolist() == table[row + 1, start_at : start_at + BLOCK].tolist()
        assert given["positions"].view(3, BLOCK)[row].tolist() == list(range(start_at, start_at + BLOCK))
    assert given["commit_lens"] is accept.commit_lens or given["commit_lens"].equal(accept.commit_lens)


def test_recurrent_states_are_committed_along_the_path_every_round(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = make_worker(monkeypatch, budget=9, requests=3)
    generate(worker, PROMPTS, rounds=1)
    target, batch, commit_lens, accept_index, rows = worker.states
    assert target is worker.target_worker
    assert rows == 10
    assert batch.seq_lens.tolist() == [4 + commit_lens[0], 7 + commit_lens[1], 1 + commit_lens[2]]
    assert accept_index.shape == (3, BLOCK)
    assert (commit_lens >= 1).all()


def test_lengths_are_published_before_the_drafter_is_fed(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = make_worker(monkeypatch, budget=4, requests=3)
    batch = start(worker, PROMPTS, [request(f"r{i}") for i in range(3)])
    published: list[list[int]] = []
    result = worker._tree_round(
        batch, lambda lengths: published.append(lengths.tolist()) or worker.appended.clear(), None
    )
    assert published == [result.new_seq_lens.tolist()]
    assert len(worker.appended) == 1


def test_results_of_two_rounds_do_not_share_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang copies a round's results to the host while the next one runs."""
    worker = make_worker(monkeypatch, budget=4, requests=3)
    batch = start(worker, PROMPTS, [request(f"r{i}") for i in range(3)])
    first = worker._tree_round(batch, None, None)
    kept = [t.clone() for t in (first.next_token_ids, first.accept_lens, first.new_seq_lens)]
    batch.seq_lens, batch.spec_info.bonus_tokens = first.new_seq_lens, first.next_draft_input.bonus_tokens
    worker._tree_round(batch, None, None)
    for before, now in zip(kept, (first.next_token_ids, first.accept_lens, first.new_seq_lens), strict=True):
        assert before.equal(now)


def test_a_penalised_request_takes_one_token_a_round_and_others_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = make_worker(monkeypatch, budget=9, requests=3)
    requests = [request("a"), request("b", repetition_penalty=1.3), request("c")]
    emitted, lengths = generate(worker, PROMPTS, rounds=6, requests=requests)
    assert [line[1] for line in lengths] == [1] * 6
    assert max(line[0] for line in lengths) > 1
    for prompt, tokens in zip(PROMPTS, emitted, strict=True):
        assert tokens == plain_decoding(prompt, len(tokens))


def test_penalties_reach_the_root_and_bias_every_row() -> None:
    from sglang_ddtree import verify

    logits = torch.tensor([[1.0, -1.0, 0.5]]).repeat(6, 1)
    info = SimpleNamespace(
        has_custom_logit_processor=False,
        acc_additive_penalties=torch.tensor([[0.0, 0.0, -2.0], [0.0, 0.0, 0.0]]),
        acc_scaling_penalties=torch.tensor([[2.0, 2.0, 1.0], [1.0, 1.0, 1.0]]),
        logit_bias=torch.tensor([[0.0] * 3, [1.0] * 3]),
    )
    verify.adjust_logits(logits, info, rows=3)
    assert logits[0].tolist() == [0.5, -2.0, -1.5]
    assert logits[1].tolist() == [1.0, -1.0, 0.5]
    assert logits[3].tolist() == [2.0, 0.0, 1.5]
    assert logits[5].tolist() == [2.0, 0.0, 1.5]


def test_one_hidden_mask_cell_changes_what_is_generated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The played target reads the mask: if it did not, the tests above would pass on any."""
    from sglang_ddtree import worker as module

    worker = make_worker(monkeypatch, budget=9, requests=3)
    write = module.write_tree_mask

    def hide_the_root(trees: Any, lengths: torch.Tensor, mask: torch.Tensor) -> None:
        trees.ancestors[:, 1:, 0] &= ~1
        write(trees, lengths, mask)

    monkeypatch.setattr(module, "write_tree_mask", hide_the_root)
    emitted, _ = generate(worker, PROMPTS, rounds=8)
    assert any(t != plain_decoding(p, len(t)) for p, t in zip(PROMPTS, emitted, strict=True))
