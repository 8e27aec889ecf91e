"""Rounds whose width changes, by the real worker on the CPU: the played models of test_plugin_round decide by what the
masks, slots and links of each width let them see.
"""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sglang_setup
import test_plugin_round as rounds
import torch

pytestmark = pytest.mark.xdist_group("sglang")
WIDTHS = (2, 4, 9)  # beside the chain of BLOCK - 1 = 4


@pytest.fixture(autouse=True)
def _sglang(sglang_src: Path) -> None:
    sglang_setup.load(sglang_src)


def auto_worker(monkeypatch: pytest.MonkeyPatch, chooser: Any = None, requests: int = 3) -> Any:
    from sglang_ddtree import config, metrics
    from sglang_ddtree.auto import report, worker
    from sglang_ddtree.auto.chooser import Cycle
    from sglang_ddtree.auto.settings import AutoConfig, AutoResolved
    from sglang_ddtree.worker import DDTreeWorker

    made = rounds.make_worker(monkeypatch, budget=max(WIDTHS), requests=requests)
    made.__class__ = worker.AutoWorker
    chosen = config.DDTreeConfig(mode="tree", budget=max(WIDTHS), topk_cap=4)
    made.ddtree = AutoResolved(chosen, rounds.BLOCK, auto=AutoConfig(WIDTHS, "cycle"))
    monkeypatch.setattr(DDTreeWorker, "_allocate", lambda _self: None)
    made._allocate()
    made.chooser = chooser or Cycle(made.ddtree.shapes)
    made.watch = metrics.Reporter((made.totals,), report.seen, 1, [made.chooser.observe])
    return made


class Script:
    """A chooser that does as it is told and keeps what it hears."""

    def __init__(self, places: list[int]) -> None:
        self.places, self.heard = places, []

    def choose(self, batch: int) -> int:
        assert batch == 3
        return self.places.pop(0)

    def observe(self, summary: Any) -> None:
        self.heard.append(summary["seen"])

    def summary(self) -> dict[str, Any]:
        return {"left": len(self.places)}


def test_a_width_that_changes_every_round_generates_what_plain_decoding_does(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = auto_worker(monkeypatch)
    emitted, lengths = rounds.generate(worker, rounds.PROMPTS, rounds=12)
    for prompt, tokens in zip(rounds.PROMPTS, emitted, strict=True):
        assert tokens == rounds.plain_decoding(prompt, len(tokens))
    assert worker.chooser.rounds == [3, 3, 3, 3]
    assert worker.states[-1] == 5  # the last round's rows: the chain's
    assert max(max(line) for line in lengths[2::4]) > 2
    shown = worker.ddtree_counters()
    assert shown["counters"]["trees"] == 36
    assert shown["counters"]["accepted_off_spine"] > 0
    assert shown["auto"]["rounds"] == {"2": 3, "4": 3, "9": 3, "chain": 3}


@pytest.mark.parametrize("place", range(4))
def test_a_round_of_a_width_is_the_round_of_a_server_of_that_width(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tree by tree: tokens, rows, links and masks are those of a server that has this width alone."""
    worker = auto_worker(monkeypatch, Script([place] * 3))
    alone = worker.widths[place].resolved
    emitted, lengths = rounds.generate(worker, rounds.PROMPTS, rounds=3)
    fixed = rounds.make_worker(monkeypatch, budget=alone.config.budget, requests=3)
    fixed.ddtree = alone
    same, same_lengths = rounds.generate(fixed, rounds.PROMPTS, rounds=3)
    assert (emitted, lengths) == (same, same_lengths)
    for field in dataclasses.fields(fixed.trees):
        assert getattr(worker.widths[place].trees, field.name).equal(getattr(fixed.trees, field.name)), field.name


def test_the_chain_is_the_drafters_first_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = auto_worker(monkeypatch, Script([3]))
    rounds.generate(worker, rounds.PROMPTS, rounds=1)
    trees = worker.widths[3].trees
    assert trees.parent.tolist() == [[0, 0, 1, 2, 3]] * 3
    assert not trees.rank.any()
    assert trees.tokens[:, 1:].equal(worker.head.ids[:, :, 0])


def test_counts_reach_the_chooser_as_accept_lengths_say(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang_ddtree.auto.policy import Estimates

    script = Script([2, 2, 0, 3, 2, 3, 1, 2])
    worker = auto_worker(monkeypatch, script)
    places = list(script.places)
    _, lengths = rounds.generate(worker, rounds.PROMPTS, rounds=8)
    estimates = Estimates(worker.ddtree.shapes, half_life=1e12)
    totals = worker.totals.tolist()
    assert totals[0] == [3 * places.count(i) for i in range(4)]
    accepted = [sum(line) - 3 for line in lengths]
    assert totals[1][3] == sum(a for a, p in zip(accepted, places, strict=True) if p == 3)
    assert sum(totals[1][:3]) == sum(a for a, p in zip(accepted, places, strict=True) if p != 3)
    assert totals[1][1] > 0
    assert totals[1][2] > 0
    for seen in script.heard:
        assert estimates.observe(seen)
    assert script.heard[-1].requests == tuple(3 * places[:7].count(i) for i in range(4))


def test_after_a_round_the_widest_is_in_place_again(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = auto_worker(monkeypatch, Script([0, 0]))
    target = worker._target_worker
    target.attn_backend, target.decode_cuda_graph_runner = "home", "graphs"
    from sglang_ddtree.auto.captures import Capture

    worker.widths[0] = dataclasses.replace(worker.widths[0], capture=Capture("narrow", None))
    kept = worker.ddtree, worker.trees
    seen = []
    forward = type(target).forward_batch_generation

    def watched(self: Any, *given: Any, **flags: Any) -> Any:
        seen.append((self.attn_backend, worker.ddtree.rows, worker.trees.width))
        return forward(self, *given, **flags)

    monkeypatch.setattr(type(target), "forward_batch_generation", watched)
    rounds.generate(worker, rounds.PROMPTS, rounds=1)
    assert seen == [("narrow", 3, 3)]
    assert (worker.ddtree, worker.trees) == kept
    assert (target.attn_backend, target.decode_cuda_graph_runner) == ("home", "graphs")
    monkeypatch.setattr(type(target), "forward_batch_generation", lambda *_a, **_k: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        rounds.generate(worker, rounds.PROMPTS, rounds=1)
    assert (worker.ddtree, worker.trees) == kept
    assert target.attn_backend == "home"


def test_a_penalised_request_is_alone_in_every_width(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = auto_worker(monkeypatch)
    requests = [rounds.request("a"), rounds.request("b", repetition_penalty=1.3), rounds.request("c")]
    emitted, lengths = rounds.generate(worker, rounds.PROMPTS, rounds=8, requests=requests)
    assert [line[1] for line in lengths] == [1] * 8
    for prompt, tokens in zip(rounds.PROMPTS, emitted, strict=True):
        assert tokens == rounds.plain_decoding(prompt, len(tokens))


# -- start -------------------------------------------------------------------------------------------------------------


class Backend:
    """A hybrid attention backend: links by width on itself, the triton one inside."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.full_attn_backend = SimpleNamespace()
        self.full_attn_backend.init_cuda_graph_state = self._allocate
        self.prefill_attention_backend_str = self.decode_attention_backend_str = ""

    @property
    def verify_mask(self) -> Any:
        return self.full_attn_backend._verify_mask

    def _allocate(self, max_bs: int, max_num_tokens: int, kv_indices_buf: Any = None) -> None:
        assert max_num_tokens == max_bs * self.rows
        full = self.full_attn_backend
        full.cuda_graph_kv_indices = torch.zeros(max_num_tokens) if kv_indices_buf is None else kv_indices_buf
        full.cuda_graph_attn_logits, full.cuda_graph_attn_lse = torch.zeros(max_num_tokens), torch.zeros(max_num_tokens)
        full._verify_mask = SimpleNamespace(buffer=torch.zeros(max_num_tokens * 100, dtype=torch.uint8))


class Graphs:
    """A decode graph runner; replays are counted and give logits."""

    def __init__(self, model_runner: Any, *, attn_backend: Any, speculative_num_draft_tokens: int, **_: Any) -> None:
        from sglang_ddtree import config

        self.attn_backend, self.rows = attn_backend, speculative_num_draft_tokens
        self.capture_bs = [1, 3]
        self.seen = config.of(model_runner.server_args)
        self.on_runner = model_runner.attn_backend
        attn_backend.full_attn_backend.init_cuda_graph_state(4, 4 * self.rows)
        self.replays: list[int] = []
        self.backend = SimpleNamespace(replay=self._replay)

    def _make_graph_key(self, size: int) -> int:
        return size

    def _replay(self, key: int, batch: Any) -> Any:
        assert batch is None
        self.replays.append(key)
        return SimpleNamespace(next_token_logits=torch.zeros((4 * self.rows, rounds.VOCAB)))


def model_runner(args: Any, published: dict[str, int]) -> Any:
    made = SimpleNamespace(server_args=args, init_new_workspace=False)
    made._get_attention_backend = lambda **_: Backend(published["rows"])
    made._decode_cuda_graph_runner_cls = lambda: Graphs
    return made


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A worker behind init_cuda_graphs, with SGLang's objects played."""
    from sglang.srt import runtime_context
    from sglang_ddtree import config
    from sglang_ddtree.worker import DDTreeWorker

    worker = auto_worker(monkeypatch, requests=4)
    worker.__dict__.pop("chooser")
    worker.ddtree = dataclasses.replace(worker.ddtree, auto=dataclasses.replace(worker.ddtree.auto, choice="measured"))
    worker.server_args = SimpleNamespace(enable_metrics=False, served_model_name="m")
    worker.ps = SimpleNamespace(tp_rank=0)
    args = SimpleNamespace()
    config.attach(args, worker.ddtree)
    published = {"rows": worker.ddtree.rows}

    class Context:
        @contextlib.contextmanager
        def preserve_config(self) -> Any:
            before = dict(published)
            yield
            published.update(before)

        def override(self, _why: str, speculative_num_draft_tokens: int) -> None:
            published["rows"] = speculative_num_draft_tokens

    monkeypatch.setattr(runtime_context, "get_context", Context)
    monkeypatch.setattr(DDTreeWorker, "init_cuda_graphs", lambda _self: None)
    target = model_runner(args, published)
    target.attn_backend = Backend(worker.ddtree.rows)
    target.decode_cuda_graph_runner = Graphs(
        target, attn_backend=target.attn_backend, speculative_num_draft_tokens=worker.ddtree.rows
    )
    worker.__dict__["_target_worker"] = SimpleNamespace(model_runner=target)
    worker.__dict__["model_runner"] = target
    draft = Graphs(target, attn_backend=Backend(rounds.BLOCK), speculative_num_draft_tokens=rounds.BLOCK)
    worker.__dict__["draft_model_runner"] = SimpleNamespace(decode_cuda_graph_runner=draft)
    return worker, target, published


def test_each_width_is_captured_as_a_server_of_that_width_would_be(
    started: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang_ddtree import config
    from sglang_ddtree.auto import worker as module
    from sglang_ddtree.auto.costs import CostTable

    worker, target, published = started
    home = target.attn_backend, target.decode_cuda_graph_runner
    resolved = worker.ddtree
    monkeypatch.setattr(module, "measure_widths", lambda _worker: CostTable((1,), ((5.0,) * 4,)))
    worker.init_cuda_graphs()
    captures = [width.capture for width in worker.widths]
    assert [c.runner.rows for c in captures] == [3, 5, 10, 5]
    assert captures[2].backend is home[0]
    assert captures[2].runner is home[1]
    assert captures[1] is captures[3]  # a chain and a tree of as many rows run in one capture
    for place in (0, 1):
        narrow = captures[place]
        assert narrow.backend.rows == narrow.runner.rows == narrow.runner.seen.rows
        assert narrow.runner.on_runner is narrow.backend
        for name in ("cuda_graph_kv_indices", "cuda_graph_attn_logits", "cuda_graph_attn_lse", "_verify_mask"):
            assert getattr(narrow.backend.full_attn_backend, name) is getattr(home[0].full_attn_backend, name), name
    assert (target.attn_backend, target.decode_cuda_graph_runner) == home
    assert published == {"rows": 10}
    assert config.of(target.server_args) is resolved


def test_the_table_times_every_width_and_batch(started: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang_ddtree.auto import costs, timing
    from sglang_ddtree.auto import worker as module

    worker, _target, _published = started
    monkeypatch.setattr(costs, "REPEATS", 2)
    timed = []

    def timer(work: Any) -> float:
        before = [len(width.capture.runner.replays) for width in worker.widths]
        work()
        place = next(i for i, n in enumerate(before) if len(worker.widths[i].capture.runner.replays) > n)
        timed.append((place, worker.widths[place].capture.runner.replays[-1]))
        return 5.0 + worker.widths[place].resolved.rows * worker.widths[place].capture.runner.replays[-1] / 10

    monkeypatch.setattr(module, "measure_widths", lambda w: timing.measure_widths(w, timer))
    worker.init_cuda_graphs()
    shown = worker.ddtree_counters()["auto"]
    assert shown["ms"] == {
        "1": {"2": 5.3, "4": 5.5, "9": 6.0, "chain": 5.5},
        "3": {"2": 5.9, "4": 6.5, "9": 8.0, "chain": 6.5},
    }
    assert len(timed) == 2 * 4 * costs.REPEATS
    drafts = worker.draft_model_runner.decode_cuda_graph_runner.replays
    assert len(drafts) == 2 * 4 * (costs.REPEATS + timing.WARM_UP)
    assert shown["choice"] == {"1": "chain", "3": "chain"}


def test_without_graphs_a_cycle_runs_and_nothing_is_captured(started: Any) -> None:
    worker, target, _published = started
    worker.ddtree = dataclasses.replace(worker.ddtree, auto=dataclasses.replace(worker.ddtree.auto, choice="cycle"))
    target.decode_cuda_graph_runner = None
    worker.init_cuda_graphs()
    assert [width.capture for width in worker.widths] == [None] * 4
    assert [worker.chooser.choose(1) for _ in range(5)] == [0, 1, 2, 3, 0]


def test_the_registry_builds_the_worker_of_the_resolved_mode() -> None:
    from sglang_ddtree import config, plugin
    from sglang_ddtree.auto.settings import AutoResolved
    from sglang_ddtree.auto.worker import AutoWorker
    from sglang_ddtree.worker import DDTreeWorker

    tree, auto = SimpleNamespace(), SimpleNamespace()
    config.attach(tree, config.Resolved(config.DDTreeConfig(mode="tree"), 16))
    config.attach(auto, AutoResolved(config.DDTreeConfig(mode="tree", budget=32), 16))
    assert plugin.worker_class(tree) is DDTreeWorker
    assert plugin.worker_class(auto) is AutoWorker


def test_gauges_show_widths_table_and_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    import prometheus_client
    from sglang_ddtree.auto.chooser import Measured
    from sglang_ddtree.auto.costs import CostTable
    from sglang_ddtree.auto.policy import Seen
    from sglang_ddtree.auto.report import Gauges
    from sglang_ddtree.auto.shapes import shapes_of

    registry = prometheus_client.CollectorRegistry()
    gauge = prometheus_client.Gauge
    monkeypatch.setattr(prometheus_client, "Gauge", lambda *a, **k: gauge(*a, registry=registry, **k))
    shapes = shapes_of((8,), 16)
    chooser = Measured(shapes, CostTable((1, 4), ((5.0, 5.5), (6.0, 7.0))), Gauges({"model_name": "m"}, shapes))
    for _ in range(3):
        chooser.choose(1)
    chooser.observe({"seen": Seen((0, 3), (0, 6), (0, 12))})
    value = registry.get_sample_value
    assert value("sglang:ddtree_width", {"model_name": "m"}) == 15
    assert value("sglang:ddtree_width_rounds", {"model_name": "m", "width": "chain"}) == 3
    assert value("sglang:ddtree_width_rounds", {"model_name": "m", "width": "8"}) == 0
    assert value("sglang:ddtree_width_ms", {"model_name": "m", "width": "8", "batch": "4"}) == 6.0
