"""Phases and reasons from a server's log. The lines are SGLang 0.5.17's own formats."""

from __future__ import annotations

import pytest

from ddtree_ops.facts.journal import Phase, progress, reason

START = """\
[2026-11-30 05:00:00] server_args=ServerArgs(model_path='/models/Qwen3.6-27B', tokenizer_path='/models/Qwen3.6-27B')
[2026-11-30 05:00:09] Init torch distributed begin.
[2026-11-30 05:00:10] Load weight begin. avail mem=94.32 GB
Loading safetensors checkpoint shards:  43% Completed | 6/14 [00:05<00:07,  1.11it/s]
[2026-11-30 05:00:24] Load weight end. elapsed=13.61 s, type=Qwen3_5ForConditionalGeneration, avail mem=41.03 GB, mem usage=53.29 GB.
[2026-11-30 05:00:25] Mamba Cache is allocated. max_mamba_cache_size: 48, conv_state size: 0.14GB, ssm_state size: 6.75GB
[2026-11-30 05:00:25] Memory pool end. avail mem=9.86 GB
[2026-11-30 05:00:26] Running FlashInfer autotune with cache: True
[2026-11-30 05:00:40] Capture target verify CUDA graph begin. backend=full, num_tokens_per_req=16, bs=[1, 2, 4], avail mem=9.12 GB
Capturing batches (bs=2 avail_mem=8.97 GB):  67%|######6   | 2/3 [00:02<00:01,  1.02s/it]
[2026-11-30 05:00:44] Capture target verify CUDA graph end. elapsed=4.10 s, mem usage=0.31 GB, avail mem=8.81 GB.
[2026-11-30 05:00:45] Uvicorn running on http://127.0.0.1:30000 (Press CTRL+C to quit)
[2026-11-30 05:00:47] The server is fired up and ready to roll!
""".splitlines()  # noqa: E501  log lines are as long as they are


@pytest.mark.parametrize(
    ("lines", "shown"),
    [
        (0, "starting"),
        (2, "starting"),
        (3, "loading weights"),
        (4, "loading weights (43%)"),
        (5, "allocating caches"),
        (7, "allocating caches"),
        (8, "compiling kernels"),
        (9, "capturing graphs (target verify)"),
        (10, "capturing graphs (bs=2)"),
        (12, "warming up"),
        (13, "ready"),
    ],
)
def test_each_phase_as_the_log_reaches_it(lines: int, shown: str) -> None:
    assert str(progress(START[:lines])) == shown


def test_drafter_that_loads_after_the_target_is_loading_again() -> None:
    assert progress([*START[:9], "[2026-11-30 05:00:41] Load weight begin. avail mem=9 GB"]).phase is Phase.LOADING


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["Traceback (most recent call last):", "ValueError: budget 64 needs 65 slots"], "ValueError: budget 64 needs"),
        (["[2026-11-30 05:00:01] torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"], "Tried to"),
        (["launch_server.py: error: unrecognized arguments: --speculative-ddtree-x 1"], "unrecognized arguments"),
        (["sglang_ddtree.errors.UnsafeCombinationRefused: sm_120"], "UnsafeCombinationRefused: sm_120"),
        (
            [
                "sglang-ddtree-a.service: Failed at step EXEC spawning /opt/venv/bin/python: No such file or directory",
                "sglang-ddtree-a.service: Main process exited, code=exited, status=203/EXEC",
            ],
            "Failed at step EXEC spawning /opt/venv/bin/python: No such file or directory",
        ),
        (
            [
                "[2026-11-30 05:00:01] Scheduler hit an exception: Traceback (most recent call last):",
                "KeyError: 'target_layer_ids'",
                "RuntimeError: Rank 0 scheduler died during initialization (exit code: 1).",
                "RuntimeError: Initialization failed. Please see the error messages above.",
            ],
            "KeyError: 'target_layer_ids'",
        ),
        (START, ""),
    ],
)
def test_reason_of_an_end(lines: list[str], said: str) -> None:
    assert said in reason(lines)
    assert bool(said) == bool(reason(lines))
