"""What a server's own log says: how far its start has come, and why it ended.

The markers are SGLang 0.5.17's own lines; where each is printed is written beside it. A line has a prefix such as
``[2026-11-30 05:00:00 TP0] `` that does not matter here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class Phase(StrEnum):
    """How far a start has come."""

    STARTING = "starting"
    LOADING = "loading weights"
    ALLOCATING = "allocating caches"
    COMPILING = "compiling kernels"
    CAPTURING = "capturing graphs"
    WARMING = "warming up"
    READY = "ready"
    DRAINING = "draining"


@dataclass(frozen=True)
class Progress:
    """The phase, and a detail such as a percentage when the log gives one."""

    phase: Phase
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.phase} ({self.detail})" if self.detail else str(self.phase)


_MARKERS: tuple[tuple[re.Pattern[str], Phase], ...] = (
    (re.compile(r"server_args=ServerArgs\("), Phase.STARTING),  # entrypoints/engine.py
    (re.compile(r"Load weight begin\."), Phase.LOADING),  # model_executor/model_runner.py
    (re.compile(r"(?:Loading|Multi-thread loading) .*?shards:? +(\d+%)"), Phase.LOADING),  # model_loader/weight_utils
    (re.compile(r"Load weight end\."), Phase.ALLOCATING),  # model_executor/model_runner.py
    (re.compile(r"(?:Mamba|KV) Cache is allocated"), Phase.ALLOCATING),  # mem_cache/memory_pool.py
    (re.compile(r"Memory pool end\."), Phase.ALLOCATING),  # mem_cache/kv_cache_configurator.py
    (re.compile(r"Running FlashInfer autotune"), Phase.COMPILING),  # runner/flashinfer_autotune.py
    (re.compile(r"JIT Pre-Compile session"), Phase.COMPILING),  # deep_gemm_wrapper/compile_utils.py
    (re.compile(r"Capture (.+?) (?:CUDA|CPU|NPU|XPU) graph begin\."), Phase.CAPTURING),  # cuda_graph_setup.py
    (re.compile(r"Capturing batches \((bs=\d+)"), Phase.CAPTURING),  # runner/decode_cuda_graph_runner.py
    (re.compile(r"(?:Application startup complete|Uvicorn running on)"), Phase.WARMING),  # uvicorn
    (re.compile(r"The server is fired up and ready to roll!"), Phase.READY),  # entrypoints/http_server.py
    (re.compile(r"SIGTERM received\.|Gracefully exiting\.\.\."), Phase.DRAINING),  # managers/tokenizer_manager.py
)


def progress(lines: Iterable[str]) -> Progress:
    """The last phase that the log of this start reports.

    A progress bar writes over itself: the journal has all its states in one line, parted by carriage returns.
    """
    found = Progress(Phase.STARTING)
    for line in (state for message in lines for state in message.split("\r")):
        for pattern, phase in _MARKERS:
            match = pattern.search(line)
            if match:
                found = Progress(phase, match.group(1) if match.groups() else "")
                break
    return found


_RAISED = re.compile(r"^(?:\[[^\]]*\] )?((?:\w+\.)*[A-Z]\w*(?:Error|Exception|Refused|Exit)): (.+)")
_ARGPARSE = re.compile(r"^\S+: error: (.+)")
_SYSTEMD = re.compile(r"Failed at step (\w+) spawning (.+?): (.+)|Failed to (?:execute|locate|set up|load) .+")
_MEMORY = re.compile(r"CUDA out of memory(.*)")
# What SGLang's launcher adds after the error that counts (entrypoints/engine.py).
_ECHO = re.compile(r"Please see the error messages above|died during initialization|SystemExit")


def reason(lines: Iterable[str]) -> str:
    """Why the server ended, as its log tells: the last error raised, argparse's refusal, or systemd's own word.

    Empty if the log gives none. The last one wins, for it is the end of a chain of exceptions; what the launcher only
    repeats after a scheduler died does not count.
    """
    found = ""
    for raw in lines:
        line = raw.strip()
        if _ECHO.search(line):
            continue
        if match := _MEMORY.search(line):
            found = f"CUDA out of memory{match.group(1)}"
        elif match := _ARGPARSE.match(line):
            found = match.group(1)
        elif match := _RAISED.match(line):
            found = f"{match.group(1).rpartition('.')[2]}: {match.group(2)}"
        elif match := _SYSTEMD.search(line):
            found = match.group(0)
    return found[:300]
