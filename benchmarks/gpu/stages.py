"""The stages, in order of value: what is not shown yet and what each takes. Data; `python -m benchmarks.gpu` runs them.

Estimates are for one H200 with 16 cores, where the start of a process that imports SGLang takes 45 to 130 s.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu.planner import Stage

ROOT = Path(__file__).parents[2]
PAIR = "patches/selftest-pair"
BENCH = ("--prompts", "24", "--tokens", "128", "--concurrencies", "1", "8", "--repeats", "2")

# Sections of the parity suite (parity/sections.py). A variant of the engine is one more line here.
PARITY = (
    "hybrid/behaviour:tree-10k,tree-radix,tree-behaviour",  # the longest first
    "hybrid/matrix:tree-16-2",
    "hybrid/audits:no-overlap,audit-eager,shadow",
    "hybrid/bf16",
)
PARITY_REST = ("dense/matrix", "dense/behaviour", "dense/oracle:oracle-32", "hybrid/variants")
# The whole model at one request, a slice at one and eight, and a model so small that the host's work shows.
COSTS = ("shape-27b/costs", "shape-27b-12/costs", "hybrid/costs:cost-ar,cost-linear,cost-tree-16")
COSTS_OF_EIGHT = ("shape-27b/costs-of-eight",)


@dataclass(frozen=True)
class Setting:
    """Where and with what the stages run. work: their folders; cores: of this host."""

    python: str
    work: Path
    cores: int

    def folder(self, name: str) -> str:
        return str(self.work / name)


def stages(at: Setting) -> list[Stage]:
    """All stages, the most valuable first."""
    beside = max(at.cores - 4, 1)
    return [
        Stage(
            "host",
            "GPU, driver and versions",
            (at.python, "-m", "benchmarks.gpu.host", "--out", at.folder("host")),
            limit_s=90, estimate_s=15, least_s=10,
        ),
        suite(at, "parity", "what the hybrid target has not shown", PARITY, 300, beside),
        Stage(
            "kernels",
            "the kernels against their oracle, captured, without a sync, in pools past 2^31 elements",
            pytest(at, "kernels", "tests/gpu/test_kernels_gpu.py"),
            limit_s=420, estimate_s=150, least_s=60, cores=2,
        ),
        Stage(
            "selftest",
            "the pair proves this GPU; the record it leaves",
            (at.python, "-m", "sglang_ddtree.selftest", "--pair", PAIR, "--proofs-dir", at.folder("selftest/proofs"),
             "--out", at.folder("selftest/arms"), "--parallel", "9", "--limit-s", "{limit}",
             "--gpu-lock", at.folder("gpu.lock")),
            limit_s=300, estimate_s=170, least_s=120, cores=9,
        ),
        Stage(
            "server",
            "the pair in a real server: what it answers, and what it logs on the way up",
            (at.python, "-m", "benchmarks.gpu.capture", "--out", at.folder("server/captures")),
            limit_s=300, estimate_s=150, least_s=120, cores=3,
        ),
        Stage(
            "sanitizer",
            "the kernels under compute-sanitizer: memory and races",
            (at.python, "-m", "benchmarks.gpu.sanitizer", "--out", at.folder("sanitizer")),
            limit_s=400, estimate_s=120, least_s=90, cores=1,
        ),
        suite(at, "costs", "what a round costs, stage by stage, at 27B shapes", COSTS, 420, 6, alone=True, least=300),
        Stage(
            "benchmark",
            "speed of the pair in all modes over HTTP",
            (at.python, "-m", "benchmarks.engine.bench", "launch", "benchmarks/engine/h200.toml",
             "--out", at.folder("benchmark/result.json"), "--limit-s", "{limit}", *BENCH),
            limit_s=540, estimate_s=350, least_s=280, cores=at.cores, alone=True,
        ),
        suite(at, "parity-rest", "the dense target; all cells without overlap and graphs", PARITY_REST, 400, 6),
        Stage(
            "kernel-times",
            "each kernel against its bound and a torch baseline",
            (at.python, "benchmarks/engine/kernels.py", "--out", at.folder("kernel-times/kernels.json")),
            limit_s=300, estimate_s=100, least_s=90, cores=1, alone=True,
        ),
        suite(at, "costs-of-eight", "the whole 27B shapes at eight requests", COSTS_OF_EIGHT, 200, 3, alone=True),
        Stage(
            "suite-tests",
            "the suite as a host's own self-test, on random weights",
            pytest(at, "suite-tests", "tests/gpu/test_parity_gpu.py"),
            limit_s=540, estimate_s=330, least_s=240, cores=9,
        ),
    ]  # fmt: skip


def suite(
    at: Setting,
    name: str,
    why: str,
    sections: tuple[str, ...],
    estimate: float,
    cores: int,
    *,
    alone: bool = False,
    least: float = 140,
) -> Stage:
    """A run of the parity suite; arms that have answered are kept."""
    asked = [word for section in sections for word in ("--section", section)]
    argv = (at.python, "-m", "sglang_ddtree.parity.suite", "--out", at.folder(name), *asked, "--keep",
            "--parallel", "{cores}", "--limit-s", "{limit}", "--gpu-lock", at.folder("gpu.lock"))  # fmt: skip
    return Stage(name, why, argv, limit_s=580, estimate_s=estimate, least_s=least, cores=cores, alone=alone)


def pytest(at: Setting, name: str, file: str) -> tuple[str, ...]:
    """pytest without the project's settings, which ask for plugins that a GPU host need not have."""
    return (at.python, "-m", "pytest", "-c", "/dev/null", "--rootdir", ".", "--noconftest", "-p", "no:cacheprovider",
            "-q", "-s", f"--junitxml={at.folder(name)}/junit.xml", file)  # fmt: skip
