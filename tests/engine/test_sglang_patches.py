"""Each patch of the series against the real SGLang sources: the defect shows without it and is gone with it.

The functions are taken out of the sources and run as they are; what they would import from a GPU build is stood in
for. So the tests need torch, but neither a GPU nor SGLang's own dependencies.
"""

from __future__ import annotations

import ast
import sys
import weakref
import zipfile
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from ddtree_ops.bundle.patches import apply_series, read_base, read_series  # noqa: E402
from ddtree_ops.bundle.wheel import SGLANG_VERSION, fetch_wheel  # noqa: E402
from ddtree_ops.data import data_dir  # noqa: E402

Sources = dict[str, str]
SRT = "sglang/srt/"


@pytest.fixture(scope="session")
def trees() -> dict[str, Sources]:
    """The files that the series touches, before and after, and the ones they are compared with."""
    folder = data_dir("patches") / f"sglang-{SGLANG_VERSION}"
    with zipfile.ZipFile(fetch_wheel()) as wheel:
        base = read_base(folder)
        before = {path: wheel.read(path).decode() for path in base}
        after = {p: data.decode() for p, data in apply_series(read_series(folder), base, wheel.read).items()}
        for name in ("sampling/penaltylib/repetition_penalty.py", "sampling/penaltylib/orchestrator.py"):
            before[SRT + name] = after[SRT + name] = wheel.read(SRT + name).decode()
    return {"base": before, "patched": after}


def take(source: str, name: str, namespace: dict[str, Any]) -> Any:
    """A function or class of ``source`` (``Class.method`` too), executed in ``namespace``."""
    body: list[ast.stmt] = ast.parse(source).body
    for part in name.split("."):
        node = next(n for n in body if isinstance(n, ast.FunctionDef | ast.ClassDef) and n.name == part)
        body = node.body
    module = ast.Module([ast.parse("from __future__ import annotations").body[0], node], type_ignores=[])
    exec(compile(module, name, "exec"), namespace)
    return namespace[name.rpartition(".")[2]]


def methods(source: str, class_name: str) -> set[str]:
    return {
        item.name
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef) and node.name == class_name
        for item in node.body
        if isinstance(item, ast.FunctionDef)
    }


def test_every_patched_file_compiles(trees: dict[str, Sources]) -> None:
    changed = [path for path in trees["base"] if trees["base"][path] != trees["patched"][path]]
    assert set(changed) == set(read_base(data_dir("patches") / f"sglang-{SGLANG_VERSION}")), (
        "each is changed by some patch"
    )
    for path in changed:
        compile(trees["patched"][path], path, "exec", dont_inherit=True)


# -- 0001: text-only Qwen3.5 ------------------------------------------------------------------------------------------

TEXT_MODEL = SRT + "models/qwen3_5_text.py"


def test_base_text_model_cannot_capture(trees: dict[str, Sources]) -> None:
    assert "set_dflash_layers_to_capture" not in methods(trees["base"][TEXT_MODEL], "Qwen3_5ForCausalLM")


def test_patched_text_model_captures_after_the_named_layers(trees: dict[str, Sources]) -> None:
    capture = take(trees["patched"][TEXT_MODEL], "Qwen3_5ForCausalLM.set_dflash_layers_to_capture", {})
    asked: list[list[int]] = []
    body = SimpleNamespace(layers=[object()] * 8, set_dflash_layers_to_capture=asked.append)
    model = SimpleNamespace(pp_group=SimpleNamespace(is_last_rank=True), model=body, capture_aux_hidden_states=False)
    capture(model, [1, 3, 6])
    assert asked == [[2, 4, 7]]
    assert model.capture_aux_hidden_states
    for wrong in ([1, 1], [3, 1], [7], [-1]):
        with pytest.raises(ValueError, match="strictly increasing"):
            capture(model, wrong)


# -- 0002: Mamba tracking ---------------------------------------------------------------------------------------------

INTERVAL = 256


def track_steps(source: str, pre: list[int], commit: list[int]) -> list[int] | None:
    """The verify step whose state is copied to the tracking slot, by request; -1 for none."""
    exec_view = SimpleNamespace(mamba=SimpleNamespace(mamba_track_interval=INTERVAL))
    update = take(
        source,
        "DFlashWorkerV2._update_target_mamba_state_after_verify",
        {"torch": torch, "get_exec": lambda: exec_view},
    )
    seen: dict[str, Any] = {}
    backend = SimpleNamespace(update_mamba_state_after_mtp_verify=lambda **given: seen.update(given))
    runner = SimpleNamespace(attn_backend=backend, model=None)
    worker = SimpleNamespace(_need_mamba_verify_commit=True, target_worker=SimpleNamespace(model_runner=runner))
    seq_lens = torch.tensor(pre)
    commit_lens = torch.tensor(commit, dtype=torch.int32)
    batch = SimpleNamespace(
        seq_lens=seq_lens,
        mamba_track_indices=torch.arange(len(pre)),
        req_pool_indices=torch.arange(len(pre)),
    )
    given = {"batch": batch, "seq_lens_pre_verify": seq_lens.clone(), "commit_lens": commit_lens}
    if "seq_lens_post_verify" in update.__code__.co_varnames:
        given["seq_lens_post_verify"] = seq_lens + commit_lens
    update(worker, **given)
    assert seen["last_correct_step_indices"].tolist() == [n - 1 for n in commit]
    return seen["mamba_steps_to_track"].tolist()


CASES = [
    # before, committed, the step (from 0) that reaches a multiple of the interval
    ([250, 100, 255, 256, 511], [8, 16, 1, 16, 3], [5, -1, 0, -1, 0]),
    ([240], [16], [15]),
    ([240], [15], [-1]),
]


@pytest.mark.parametrize(("pre", "commit", "want"), CASES)
def test_interval_crossings_are_tracked(
    trees: dict[str, Sources], pre: list[int], commit: list[int], want: list[int]
) -> None:
    path = SRT + "speculative/dflash_worker_v2.py"
    assert track_steps(trees["patched"][path], pre, commit) == want
    assert track_steps(trees["base"][path], pre, commit) == [-1] * len(pre), "base: no crossing is ever seen"


@pytest.mark.parametrize("tree", ["base", "patched"])
def test_lengths_after_the_verify_are_what_is_passed(trees: dict[str, Sources], tree: str) -> None:
    source = trees[tree][SRT + "speculative/dflash_worker_v2.py"]
    calls = [
        {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "self._update_target_mamba_state_after_verify"
    ]
    assert len(calls) == 1
    assert (calls[0].get("seq_lens_post_verify") == "new_seq_lens") is (tree == "patched")


@pytest.mark.parametrize("tree", ["base", "patched"])
@pytest.mark.parametrize("idle", [False, True])
def test_tracking_slots_are_rebuilt_before_the_forward_batch(
    trees: dict[str, Sources], monkeypatch: pytest.MonkeyPatch, tree: str, idle: bool
) -> None:
    order: list[str] = []
    stub = SimpleNamespace(prepare_mamba_track_for_verify=lambda _batch: order.append("track"))
    for name in ("sglang", "sglang.srt", "sglang.srt.speculative"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(__path__=[]))
    monkeypatch.setitem(sys.modules, "sglang.srt.speculative.spec_utils", stub)
    mode = SimpleNamespace(is_idle=lambda: idle)

    def init_new(*_args: Any, **_kwargs: Any) -> str:
        order.append("init_new")
        return "forward batch"

    prepare = take(
        trees[tree][SRT + "speculative/dflash_info.py"],
        "DFlashVerifyInput.prepare_for_verify",
        {
            "ForwardBatch": SimpleNamespace(init_new=init_new),
            "ForwardMode": SimpleNamespace(IDLE=mode, TARGET_VERIFY=mode),
        },
    )
    attention = SimpleNamespace(init_forward_metadata=lambda _batch: None)
    runner = SimpleNamespace(decode_cuda_graph_runner=None, attn_backend=attention)
    spec = SimpleNamespace(draft_token=None, capture_hidden_mode=None)
    prepare(spec, SimpleNamespace(forward_mode=mode), SimpleNamespace(model_runner=runner))
    assert order == (["track", "init_new"] if tree == "patched" and not idle else ["init_new"])


# -- 0003: penalties --------------------------------------------------------------------------------------------------

BATCH, WIDTH, VOCAB = 2, 3, 5


def scaled(logits: Any, penalties: Any) -> None:
    logits[:] = torch.where(logits < 0, logits * penalties, logits / penalties)


def adjust(source: str, logits: Any, **sampling: Any) -> Any:
    """The logits after ``apply_dflash_verify_logits_adjustments``."""

    class Info(SimpleNamespace):
        def __len__(self) -> int:
            return BATCH

        def apply_logits_bias(self, rows: Any) -> None:
            for penalty in self.penalizer_orchestrator.penalizers.values():
                penalty.apply(rows)

    namespace: dict[str, Any] = {"torch": torch, "Any": Any, "apply_scaling_penalties": scaled}
    apply = take(source, "apply_dflash_verify_logits_adjustments", namespace)
    blank = {"penalizer_orchestrator": None, "has_custom_logit_processor": False, "grammar_mask": None}
    out = logits.clone()
    info = Info(**{**blank, "logit_bias": None, **sampling})
    apply(next_token_logits=out, sampling_info=info, draft_token_num=WIDTH)
    return out


def logits() -> Any:
    return torch.randn(BATCH * WIDTH, VOCAB, generator=torch.Generator().manual_seed(5))


def test_accumulated_penalties_reach_every_row_of_the_block(trees: dict[str, Sources]) -> None:
    path = SRT + "speculative/dflash_utils.py"
    additive = torch.tensor([[0.0, -2.0, 0.0, 0.0, -1.0], [0.0] * VOCAB])
    scaling = torch.tensor([[1.0] * VOCAB, [1.0, 2.0, 1.0, 1.5, 1.0]])
    given = {"acc_additive_penalties": additive, "acc_scaling_penalties": scaling}
    want = logits() + additive.repeat_interleave(WIDTH, 0)
    scaled(want, scaling.repeat_interleave(WIDTH, 0))
    bias = torch.full((BATCH, VOCAB), 0.25)
    assert torch.equal(adjust(trees["patched"][path], logits(), **given), want)
    assert torch.equal(adjust(trees["patched"][path], logits(), logit_bias=bias, **given), want + 0.25)
    assert torch.equal(adjust(trees["base"][path], logits(), **given), logits()), "base: dropped without a word"


def test_a_live_orchestrator_scales_the_logits_themselves(
    trees: dict[str, Sources], monkeypatch: pytest.MonkeyPatch
) -> None:
    orchestrator = take(
        trees["base"][SRT + "sampling/penaltylib/orchestrator.py"],
        "BatchedPenalizerOrchestrator",
        {"torch": torch, "weakref": weakref},
    )
    stub = SimpleNamespace(apply_scaling_penalties=scaled)
    for name in ("sglang", "sglang.srt", "sglang.srt.sampling", "sglang.srt.sampling.penaltylib"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(__path__=[]))
    monkeypatch.setitem(sys.modules, "sglang.srt.sampling.penaltylib.repetition_penalty", stub)
    penalties = torch.full((BATCH, VOCAB), 2.0)
    repetition = SimpleNamespace(
        is_multiplicative=True,
        _is_prepared=True,
        get_scaling_penalties=lambda: penalties,
        apply=lambda rows: scaled(rows, penalties),
    )
    live = object.__new__(orchestrator)
    live.penalizers, live.is_required = {"repetition": repetition}, True
    path = SRT + "speculative/dflash_utils.py"
    want = logits()
    scaled(want, penalties.repeat_interleave(WIDTH, 0))
    none = {"acc_additive_penalties": None, "acc_scaling_penalties": None}
    assert torch.equal(adjust(trees["patched"][path], logits(), penalizer_orchestrator=live, **none), want)
    assert torch.equal(adjust(trees["base"][path], logits(), penalizer_orchestrator=live, **none), logits())


def test_a_grammar_mask_still_masks(trees: dict[str, Sources]) -> None:
    def forbid(rows: Any) -> None:
        rows[:, 2] = float("-inf")

    given = {"grammar_mask": SimpleNamespace(apply=forbid), "acc_additive_penalties": None}
    out = adjust(trees["patched"][SRT + "speculative/dflash_utils.py"], logits(), **given)
    assert torch.isinf(out[:, 2]).all()
    assert torch.equal(out[:, :2], logits()[:, :2])


@pytest.mark.parametrize("required", [True, False])
@pytest.mark.parametrize("tree", ["base", "patched"])
def test_output_tokens_are_accumulated_every_round(trees: dict[str, Sources], tree: str, required: bool) -> None:
    class Stop(Exception):
        pass

    def stop(*_args: Any) -> None:
        raise Stop

    prepare: Callable[..., None] = take(
        trees[tree][SRT + "speculative/dflash_info_v2.py"],
        "DFlashDraftInputV2.prepare_for_decode",
        {"_get_overlap_plan_stream": lambda _device: (None, None)},
    )
    calls: list[str] = []
    batch = SimpleNamespace(
        device="cpu",
        batch_size=lambda: 1,
        sampling_info=SimpleNamespace(penalizer_orchestrator=SimpleNamespace(is_required=required)),
        cumulate_penalty_output_tokens=lambda: calls.append("cumulate"),
    )
    with pytest.raises(Stop):
        prepare(SimpleNamespace(_ensure_prepare_length_buffers=stop), batch)
    assert calls == (["cumulate"] if tree == "patched" and required else [])


def test_no_file_of_the_series_reads_a_field_that_is_gone(trees: dict[str, Sources]) -> None:
    path = SRT + "speculative/dflash_utils.py"
    assert "acc_linear_penalties" in trees["base"][path]
    assert "acc_linear_penalties" not in trees["patched"][path]
