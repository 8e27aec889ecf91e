"""The stages, in order of value: what is not shown yet and what each takes. Data; `python -m benchmarks.gpu` runs them.

Estimates are for one H200 with 16 cores, and for two with 32, where the start of a process that imports SGLang takes 45
to 130 s.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.gpu.planner import Stage

ROOT = Path(__file__).parents[2]
PAIR = "patches/selftest-pair"
BENCH = ("--prompts", "20", "--tokens", "128", "--concurrencies", "1", "2", "4", "8", "16", "--repeats", "2")

# Sections of the parity suite (parity/sections.py): what has not been shown yet, the longest arms first.
PARITY = (
    "hybrid/behaviour:tree-radix,tree-behaviour",
    "hybrid/matrix:tree-16-2",
    "hybrid/audits:no-overlap,audit-eager,shadow",
    "hybrid/bf16",
)
PARITY_RECORDS = (
    "hybrid/matrix@records:tree-16-8,tree-64-8,tree-32-8,tree-1-8,tree-4-8,tree-15-8,tree-17-8,tree-16-1,tree-16-2,tree-16-4",
    "hybrid/oracle@records",
    "hybrid/audits@records:audit,no-overlap,audit-eager",
    "hybrid/behaviour@records:tree-behaviour,tree-retract,tree-radix,tree-limit,tree-seeded",
    "hybrid/bf16@records:bf16-ar,bf16-tree",
)
PARITY_REST = (
    "dense/matrix",
    "hybrid/behaviour@records:tree-seeded",
    "dense/behaviour:tree-behaviour,tree-seeded,tree-retract,tree-radix,tree-limit",
    "dense/oracle:oracle-32",
    "hybrid/auto",
    "hybrid/auto@records",
    "hybrid/variants",
)
# Ten thousand tokens one by one: other arms wait for the GPU meanwhile.
PARITY_LONG = ("hybrid/behaviour:tree-10k", "hybrid/behaviour@records:tree-10k")
# Two GPUs to a model: the targets on random weights, as any host proves itself.
PARITY_TWO = ("hybrid/selftest", "dense/selftest")
ON_TWO = ("--tp", "2", "--nccl-only")
# The whole model at one request, and a model so small that the host's work shows.
COSTS = (
    "shape-27b/costs:cost-ar,cost-linear,cost-tree-16,cost-tree-32",
    "shape-27b/costs@records:cost-tree-16,cost-tree-32,cost-tree-64",
    "shape-27b/costs:cost-tree-64",
    "hybrid/costs:cost-ar,cost-linear,cost-tree-16",
    "hybrid/costs@records:cost-tree-16",
)
# A slice of it at one request and at eight.
COSTS_SLICE = (
    "shape-27b-12/costs",
    "shape-27b-12/costs@records:cost-tree-16,cost-tree-32,cost-tree-64",
)
COSTS_OF_EIGHT = (
    "shape-27b/costs-of-eight:cost-ar-x8,cost-linear-x8,cost-tree-16-x8",
    "shape-27b/costs-of-eight@records:cost-tree-16-x8,cost-tree-64-x8",
    "shape-27b-12/costs-of-eight@records:cost-linear-x8,cost-tree-15-x8,cost-tree-31-x8,cost-tree-63-x8",
)


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
    return [
        Stage(
            "host",
            "GPU, driver and versions",
            (at.python, "-m", "benchmarks.gpu.host", "--out", at.folder("host")),
            limit_s=90, estimate_s=15, least_s=10,
        ),
        suite(at, "parity-records", "the hybrid target with states kept as records", PARITY_RECORDS, 520, 6),
        suite(at, "parity", "what the hybrid target has not shown with snapshots", PARITY, 440, 6),
        Stage(
            "kernels",
            "the kernels against their oracle, captured, without a sync, in pools past 2^31 elements",
            pytest(at, "kernels", "tests/gpu/test_kernels_gpu.py"),
            limit_s=420, estimate_s=90, least_s=60, cores=2,
        ),
        server(at, "server", "tree-16-snapshots", 31300),
        server(at, "server-records", "tree-32", 31310),
        selftest(at, "selftest-records", "records"),
        selftest(at, "selftest", "snapshots"),
        *on_two(at),
        Stage(
            "sanitizer",
            "the kernels under compute-sanitizer: memory and races",
            (at.python, "-m", "benchmarks.gpu.sanitizer", "--out", at.folder("sanitizer")),
            limit_s=400, estimate_s=50, least_s=45,
        ),
        suite(at, "costs", "what a round costs, stage by stage, at 27B shapes", COSTS, 460, 6, alone=True, least=300),
        Stage(
            "benchmark",
            "speed of the pair in all modes over HTTP",
            (at.python, "-m", "benchmarks.engine.bench", "launch", "benchmarks/engine/h200.toml",
             "--out", at.folder("benchmark/result.json"), "--limit-s", "{limit}", *BENCH),
            limit_s=540, estimate_s=480, least_s=300, cores=at.cores, alone=True,
        ),
        suite(at, "costs-slice", "12 layers of the 27B shapes at one and eight requests", COSTS_SLICE, 350, 6,
              alone=True, least=200),
        Stage(
            "kernel-times",
            "each kernel against its bound and a torch baseline",
            (at.python, "benchmarks/engine/kernels.py", "--out", at.folder("kernel-times/kernels.json")),
            limit_s=300, estimate_s=100, least_s=90, alone=True,
        ),
        suite(at, "parity-rest", "the dense target; all cells without overlap and graphs", PARITY_REST, 450, 6),
        suite(at, "parity-long", "ten thousand tokens, hybrid target", PARITY_LONG, 240, 3),
        suite(at, "costs-of-eight", "27B shapes at eight requests: the whole, and 12 layers with rows in whole tiles",
              COSTS_OF_EIGHT, 300, 3, alone=True),
        Stage(
            "suite-tests",
            "the suite as a host's own self-test, on random weights",
            pytest(at, "suite-tests", "tests/gpu/test_parity_gpu.py"),
            limit_s=540, estimate_s=330, least_s=240, cores=9,
        ),
    ]  # fmt: skip


def on_two(at: Setting) -> list[Stage]:
    """Two GPUs to a model. All of it fits one call of ten minutes with 32 cores: the first three side by side, then the
    table, for which their limits leave time.
    """
    record = ("--proof", at.folder("parity-two/proofs/suite-tp2.json"))
    found = [
        suite(at, "parity-two", "two GPUs to a model: the hybrid and the dense target", PARITY_TWO, 300, 14,
              flags=(*ON_TWO, *record)),
        selftest(at, "selftest-two", "snapshots", ON_TWO),
        selftest(at, "selftest-two-records", "records", ON_TWO),
    ]  # fmt: skip
    found = [replace(stage, limit_s=330, estimate_s=300, cores=max(stage.cores, 8)) for stage in found]
    argv = (at.python, "-m", "benchmarks.gpu.pair_two", "--out", at.folder("pair-two"), "--pair", PAIR, "--parallel",
            "{cores}", "--limit-s", "{limit}", "--gpu-lock", at.folder("gpu.lock"))  # fmt: skip
    why = "the pair on two GPUs beside one: tokens, ranks, accept length, milliseconds of a round, tok/s"
    table = Stage("pair-two", why, argv, limit_s=300, estimate_s=190, least_s=150, cores=at.cores, alone=True)
    return [replace(stage, gpus=2) for stage in (*found, table)]


def server(at: Setting, name: str, arm: str, port: int) -> Stage:
    """One arm of the benchmark as a server that is asked everything."""
    argv = (at.python, "-m", "benchmarks.gpu.capture", "--out", at.folder(f"{name}/captures"), "--arm", arm,
            "--port", str(port))  # fmt: skip
    why = f"{arm} of the pair in a real server: what it answers, and what it logs on the way up"
    return Stage(name, why, argv, limit_s=300, estimate_s=150, least_s=120, cores=2)


def selftest(at: Setting, name: str, states: str, flags: tuple[str, ...] = ()) -> Stage:
    """The pair proves this GPU for one way to keep states, and leaves a record."""
    argv = (at.python, "-m", "sglang_ddtree.selftest", "--pair", PAIR, "--proofs-dir", at.folder(f"{name}/proofs"),
            "--out", at.folder(f"{name}/arms"), "--keep", "--states", states, "--parallel", "{cores}",
            "--limit-s", "{limit}", "--gpu-lock", at.folder("gpu.lock"), *flags)  # fmt: skip
    several = "two GPUs to a model" if flags else "this GPU"
    why = f"the pair proves {several} with states kept as {states}; the record it leaves"
    return Stage(name, why, argv, limit_s=330, estimate_s=270, least_s=140, cores=5)


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
    flags: tuple[str, ...] = (),
) -> Stage:
    """A run of the parity suite; arms that have answered are kept."""
    asked = [word for section in sections for word in ("--section", section)]
    argv = (at.python, "-m", "sglang_ddtree.parity.suite", "--out", at.folder(name), *asked, "--keep",
            "--parallel", "{cores}", "--limit-s", "{limit}", "--gpu-lock", at.folder("gpu.lock"), *flags)  # fmt: skip
    return Stage(name, why, argv, limit_s=580, estimate_s=estimate, least_s=least, cores=cores, alone=alone)


def pytest(at: Setting, name: str, file: str) -> tuple[str, ...]:
    """pytest without the project's settings, which ask for plugins that a GPU host need not have."""
    return (at.python, "-m", "pytest", "-c", "/dev/null", "--rootdir", ".", "--noconftest", "-p", "no:cacheprovider",
            "-q", "-s", f"--junitxml={at.folder(name)}/junit.xml", file)  # fmt: skip
