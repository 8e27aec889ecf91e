"""Which arms the suite runs and what each must show: data for suite.py, free of SGLang."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from sglang_ddtree.parity import float32, models
from sglang_ddtree.parity.jobs_data import fixed_asks

BUDGETS = (1, 4, 15, 16, 17, 32, 64)
CAPS = (1, 2, 4, 8)


@dataclasses.dataclass(frozen=True)
class Arm:
    """One process: a server configuration and its jobs. kind: ar, dflash, linear, shadow-linear, tree or auto.

    memory: (shares, of): 0 of 1 for a small model; 1 of 2 where two arms' weights fit the GPU at once, 2 of 2 where
    one's do. The last value of a flag counts, so `extra` can replace any above it. states: how a tree keeps recurrent
    states (states.py). widths: of an auto arm, whose budget is the widest. tp: GPUs that share the model, each with a
    process of its own.
    """

    name: str
    kind: str
    target: str
    jobs: tuple[dict[str, Any], ...]
    drafter: str = "drafter"
    budget: int = 16
    cap: int = 8
    dtype: str = "float32"
    seed: int | None = 1
    requests: int = 8
    tokens: int = 24000
    informed: bool = True
    extra: tuple[str, ...] = ()
    seeded: bool = False
    extra_buffer: bool = False
    environ: tuple[tuple[str, str], ...] = ()
    memory: tuple[int, int] = (0, 1)
    states: str = "snapshots"
    widths: tuple[int, ...] = ()
    tp: int = 1

    def argv(self, models: Path) -> list[str]:
        """Arguments of sglang.launch_server. Radix cache and prefill graphs are off unless `extra` says otherwise."""
        args = [
            "--model-path",
            str(models / self.target),
            "--skip-tokenizer-init",
            "--load-format",
            "dummy",
            "--dtype",
            self.dtype,
            "--attention-backend",
            "triton",
            "--sampling-backend",
            "pytorch",
            "--grammar-backend",
            "none",
            "--disable-prefill-cuda-graph",
            "--page-size",
            "1",
            "--max-running-requests",
            str(self.requests),
            "--cuda-graph-max-bs-decode",
            str(self.requests),
            *(["--cuda-graph-bs-decode", "1", "2", "4", "8"] if self.requests == 8 else []),
            "--max-total-tokens",
            str(self.tokens),
            "--mem-fraction-static",
            "0.8",
            "--tp-size",
            str(self.tp),
            "--random-seed",
            "7",
            "--log-level",
            "warning",
        ]
        if "--context-length" not in self.extra:
            args += ["--context-length", "4096"]  # SGLang's graph buffers grow with it
        if "--enable-radix" not in self.extra:
            args.append("--disable-radix-cache")
        args += [a for a in self.extra if a != "--enable-radix"]
        if self.kind == "ar":
            return args
        args += [
            "--speculative-draft-model-path",
            str(models / self.drafter),
            "--speculative-draft-attention-backend",
            "triton",
            "--speculative-algorithm",
            "DFLASH" if self.kind == "dflash" else "DDTREE",
        ]
        if self.kind == "dflash":
            return args
        return [
            *args,
            "--speculative-ddtree-mode",
            self.kind,
            *self._sizes(),
            "--speculative-ddtree-topk-cap",
            str(self.cap),
            "--speculative-ddtree-allow-hybrid-unsafe",
            *(["--speculative-ddtree-states", self.states] if self.kind in ("tree", "auto") else []),
        ]

    def _sizes(self) -> list[str]:
        if self.kind == "auto":
            return ["--speculative-ddtree-widths", ",".join(map(str, self.widths))]
        return ["--speculative-ddtree-budget", str(self.budget)]

    def spec(self, models: Path, lock: Path) -> dict[str, Any]:
        environ = dict(self.environ)
        if self.dtype == "float32":
            environ.update(float32.ENVIRONMENT)
        if self.tp > 1:
            environ.update(RANKS_ENVIRONMENT)
        return {
            "argv": self.argv(models),
            "seed": self.seed,
            "environ": environ,
            "jobs": list(self.jobs),
            "float32": self.dtype == "float32",
            "informed": self.informed and self.kind in ("tree", "auto"),
            "late_seeds": self.seeded,
            "extra_buffer": self.extra_buffer,
            "gpu_lock": str(lock),
            "memory": list(self.memory),
            "tp": self.tp,
        }


# Arms side by side, some on the first GPU alone, are no reason to stop. A server's launcher keeps NCCL from NVLink
# multicast unless it is asked for; arms have no launcher.
RANKS_ENVIRONMENT = {"SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0", "NCCL_NVLS_ENABLE": "0"}
# SGLang's own all-reduce is compiled at the first start, and sets up NVLink multicast where a GPU has it; so does the
# fused one, which SGLang 0.5.17 chooses by itself for some architectures.
NCCL_ONLY = ("--disable-custom-all-reduce", "--enforce-disable-flashinfer-allreduce-fusion")


def spread(arm: Arm, tp: int, *, nccl_only: bool = False) -> Arm:
    """The arm over `tp` GPUs. Weights that were to be drawn come from a checkpoint, which ranks cut. What trees are
    compared with in float32 decodes on one GPU: then ranks that are wrong in the same way are seen as well.

    nccl_only: sums over GPUs are NCCL's, not those of SGLang's own kernels, which a server has by default.
    """
    if tp == 1:
        return arm
    plain = arm.kind == "ar" and arm.dtype == "float32"
    saved = () if arm.seed is None else ("--load-format", "auto")
    sums = NCCL_ONLY if nccl_only and not plain else ()
    return dataclasses.replace(arm, tp=1 if plain else tp, seed=None, extra=(*arm.extra, *saved, *sums))


def tokens_job(count: int = 4, new: int = 256, *, together: bool = False, **params: Any) -> dict[str, Any]:
    return {"job": "tokens", "together": together, "asks": fixed_asks(count, new, **params)}


def informed_job(count: int, new: int, together: bool) -> dict[str, Any]:
    return {"job": "informed_tokens", "together": together, "asks": fixed_asks(count, new, ignore_eos=True)}


# Two requests alone, eight as a batch of mixed lengths, then both again with a drafter that knows the answers.
MATRIX_JOBS = (
    tokens_job(2, 256, ignore_eos=True),
    tokens_job(8, 48, together=True),
    informed_job(2, 256, together=False),
    informed_job(8, 64, together=True),
)


def matrix(target: str) -> list[Arm]:
    """Token identity in float32: every budget at the widest cap, every cap at one budget, alone and as a batch."""
    jobs = MATRIX_JOBS
    arms = [
        Arm(f"{target}/ar", "ar", target, jobs),
        Arm(f"{target}/dflash", "dflash", target, jobs),
        Arm(f"{target}/linear", "linear", target, jobs),
    ]
    cells = [(b, 8) for b in BUDGETS] + [(b, c) for c in CAPS[:-1] for b in (16,)]
    arms += [Arm(f"{target}/tree-{b}-{c}", "tree", target, jobs, budget=b, cap=c) for b, c in cells]
    return arms


def variants(target: str) -> list[Arm]:
    """The matrix's trees once more, without overlap and without graphs."""
    trees = [arm for arm in matrix(target) if arm.kind == "tree"]
    ways = {"no-overlap": ("--disable-overlap-schedule",), "eager": ("--disable-cuda-graph",)}
    plain = next(arm for arm in matrix(target) if arm.kind == "ar")
    return [plain] + [
        dataclasses.replace(arm, name=f"{arm.name}-{way}", extra=(*arm.extra, *flags))
        for way, flags in ways.items()
        for arm in trees
    ]


def oracle(target: str) -> list[Arm]:
    """Trees recorded with every node's law; the suite then asks plain decoding about each path."""
    record = {"job": "record_trees", "rounds": 24, "asks": fixed_asks(3, 48)}
    return [
        Arm(f"{target}/oracle-{b}", "tree", target, (record,), budget=b, extra=("--disable-overlap-schedule",))
        for b in (8, 16, 32)
    ]


AUTO_WIDTHS = (4, 16, 64)
CYCLE = (("SGLANG_DDTREE_CONFIG", '{"mode": "auto", "choice": "cycle"}'),)


def auto(target: str) -> list[Arm]:
    """Rounds whose width changes: another one every round, with each node's law looked at, and as served."""
    record = {"job": "record_trees", "rounds": 24, "asks": fixed_asks(3, 48)}
    plain = next(arm for arm in matrix(target) if arm.kind == "ar")
    audit = {"job": "sync_audit", "asks": fixed_asks(4, 96, ignore_eos=True)}
    eager = ("--disable-overlap-schedule",)

    def arm(tail: str, jobs: tuple[dict[str, Any], ...], environ: Any = CYCLE, extra: tuple[str, ...] = ()) -> Arm:
        name, widest = f"{target}/auto-{tail}", max(AUTO_WIDTHS)
        return Arm(name, "auto", target, jobs, budget=widest, widths=AUTO_WIDTHS, environ=environ, extra=extra)

    return [
        plain,
        arm("cycle", MATRIX_JOBS),
        arm("cycle-no-overlap", MATRIX_JOBS, extra=eager),
        arm("measured", (*MATRIX_JOBS, audit), ()),
        arm("oracle-no-overlap", (record,), extra=eager),
    ]


def common_jobs(left: Arm, right: Arm) -> list[int]:
    """Numbers of the jobs that both arms were given at the same place."""
    return [
        n
        for n, (a, b) in enumerate(zip(left.jobs, right.jobs, strict=False))
        if a == b and "ids" in a.get("asks", [{}])[0]
    ]


def oracle_reference(target: str, sequences: list[list[int]]) -> Arm:
    return Arm(f"{target}/oracle-ar", "ar", target, ({"job": "last_logprobs", "sequences": sequences},))


# A hybrid target's states for the prefix cache, at every 64th token, in slots beside the running ones.
KEEP_STATES = (
    *("--mamba-radix-cache-strategy", "extra_buffer"),
    *("--mamba-track-interval", "64"),
    *("--max-mamba-cache-size", "64"),
)


def behaviour(target: str) -> list[Arm]:
    """What a server must survive: ends inside a path, aborts, retraction, prefix hits, the context limit, sampling."""
    ends = [
        {"ids": a["ids"], "params": {"max_new_tokens": n}}
        for a, n in zip(fixed_asks(6, 0), (1, 2, 3, 5, 200, 200), strict=True)
    ]
    stop = [{"ids": a["ids"], "params": {"max_new_tokens": 128, "stop_token_ids": [7, 9]}} for a in fixed_asks(4, 0)]
    long_lived = fixed_asks(8, 96, ignore_eos=True)
    aborts = [{**a, "abort_after": 12 + 7 * i} if i % 2 else a for i, a in enumerate(long_lived)]
    # An abort lands a round sooner or later, so only what both emitted is compared; the requests beside it are whole.
    penalties = fixed_asks(3, 64, frequency_penalty=0.7, repetition_penalty=1.2, ignore_eos=True)
    biased = fixed_asks(3, 64, logit_bias={"5": 3.0, "6": -3.0}, ignore_eos=True)
    jobs = tuple(
        {"job": "tokens", "together": together, "asks": asks}
        for asks, together in (
            (ends, True),
            (stop, True),
            (aborts, True),
            (fixed_asks(8, 96), True),
            (penalties, False),
            (biased, False),
            (fixed_asks(8, 96), True),
        )
    )
    retract = (("SGLANG_TEST_RETRACT", "1"), ("SGLANG_TEST_RETRACT_INTERVAL", "7"))
    again = {"job": "multi_turn", "asks": fixed_asks(3, 150, ignore_eos=True), "tail": [5, 6, 7]}
    limit = [{"ids": a["ids"], "params": {"max_new_tokens": 4000, "ignore_eos": True}} for a in fixed_asks(1, 0)]
    long = {"job": "tokens", "together": False, "asks": limit}
    ten_thousand = {"job": "tokens", "asks": fixed_asks(1, 10000, ignore_eos=True)}
    seeded = (
        tokens_job(4, 128, temperature=0.8, top_p=0.9, top_k=20, sampling_seed=1234, ignore_eos=True),
        tokens_job(4, 128, together=True, temperature=1.0, sampling_seed=77, ignore_eos=True),
    )
    arms = []
    for kind in ("ar", "tree"):
        arms += [
            Arm(f"{target}/{kind}-behaviour", kind, target, jobs),
            Arm(f"{target}/{kind}-seeded", kind, target, seeded, seeded=True),
            Arm(f"{target}/{kind}-retract", kind, target, (tokens_job(8, 96, together=True),), environ=retract),
            Arm(
                f"{target}/{kind}-radix",
                kind,
                target,
                (again,),
                extra=("--enable-radix", *(KEEP_STATES if target == "hybrid" else ())),
                extra_buffer=target == "hybrid",
            ),
            Arm(f"{target}/{kind}-limit", kind, target, (long,), extra=("--context-length", "1024")),
            Arm(f"{target}/{kind}-10k", kind, target, (ten_thousand,), extra=("--context-length", "12288")),
        ]
    return arms


def selftest(target: str) -> list[Arm]:
    """What a host proves for itself: the matrix's ends, the oracle, no sync; of a hybrid target also its states in the
    prefix cache. Its proof covers budgets up to 64, with the prefix cache up to 16.
    """
    tails = ("ar", "dflash", "linear", "tree-1-8", "tree-16-1", "tree-16-8", "tree-64-8")
    names = [f"{target}/{tail}" for tail in tails]
    audit = next(a for a in audits(target) if a.name == f"{target}/audit")
    law = next(a for a in oracle(target) if a.budget == 32)
    turns = [a for a in behaviour(target) if target == "hybrid" and a.name.endswith("-radix")]
    return [*(a for a in matrix(target) if a.name in names), audit, law, *turns]


def half_precision(target: str) -> list[Arm]:
    """bfloat16 as served: linear must be DFLASH's very tokens; where a tree leaves plain decoding, a near tie."""
    kinds = ("ar", "dflash", "linear", "tree")
    return [Arm(f"{target}/bf16-{kind}", kind, target, MATRIX_JOBS, dtype="bfloat16") for kind in kinds]


COST_CELLS = (("ar", 16), ("linear", 16), ("tree", 8), ("tree", 16), ("tree", 32), ("tree", 64))
# One node less makes the rows of eight requests a multiple of 128, which the products' tiles divide.
WHOLE_TILES = (("tree", 15), ("tree", 31), ("tree", 63))
# Which arms of a real size may hold their weights at once on 139 GiB: 64 layers are 54 GB, and stock snapshots take
# 144 MiB a row for each request and one more.
WHOLE = "shape-27b"


def cost_memory(target: str, kind: str, budget: int, requests: int) -> tuple[int, int]:
    if target == WHOLE:
        rows = 0 if kind == "ar" else 16 if kind == "linear" else budget + 1
        return (1, 2) if rows * (requests + 1) <= 70 else (2, 2)
    return (1, 4) if target.startswith(WHOLE) else (0, 1)


def costs(target: str, batches: tuple[int, ...] = (), cells: tuple[tuple[str, int], ...] = COST_CELLS) -> list[Arm]:
    """Milliseconds of a round and where they go, on dummy weights: each arm alone on the GPU while it is timed.

    batches: 1 on the whole model and 1 and 8 elsewhere, unless given.
    """
    batches = batches or ((1,) if target == WHOLE else (1, 8))
    vocab = models.MODELS[target]["vocab_size"]
    timed = {"job": "timed", "vocab": vocab, "short": 16, "long": 112, "repeats": 5}
    profiled = {"job": "profiled", "vocab": vocab, "new": 24}
    jobs = tuple({**job, "batch": batch} for batch in batches for job in (timed, profiled))
    drafter = "drafter" if target == "hybrid" else f"{target}-drafter"
    requests = max(batches)
    tail = "" if batches in ((1,), (1, 8)) else "".join(f"-x{batch}" for batch in batches)
    return [
        Arm(
            f"{target}/cost-{kind}" + (f"-{budget}" if kind == "tree" else "") + tail,
            kind,
            target,
            jobs,
            drafter=drafter,
            budget=budget,
            dtype="bfloat16",
            seed=None,
            informed=False,
            requests=requests,
            tokens=8000,
            extra=("--mem-fraction-static", "0.97"),
            memory=cost_memory(target, kind, budget, requests),
        )
        for kind, budget in cells
    ]


def costs_of_eight(target: str) -> list[Arm]:
    """Eight requests at once on the whole model. Snapshots of more than 16 nodes do not fit beside 54 GB of weights."""
    return costs(target, (8,), (*COST_CELLS, *WHOLE_TILES))


def recording(arm: Arm) -> Arm:
    """The same arm with states kept as records, which take next to no memory; only arms that verify trees have any."""
    if arm.kind not in ("tree", "auto"):
        return arm
    memory = (1, 2) if arm.memory == (2, 2) else arm.memory
    return dataclasses.replace(arm, name=f"{arm.name}@records", states="records", memory=memory)


def audits(target: str) -> list[Arm]:
    audit = {"job": "sync_audit", "asks": fixed_asks(4, 96, ignore_eos=True)}
    flip = {"job": "flipped_mask", "asks": fixed_asks(2, 64)}
    return [
        Arm(f"{target}/audit", "tree", target, (MATRIX_JOBS[0], audit, flip), informed=False),
        Arm(f"{target}/audit-eager", "tree", target, MATRIX_JOBS[:2], extra=("--disable-cuda-graph",), informed=False),
        Arm(f"{target}/shadow", "shadow-linear", target, MATRIX_JOBS),
        Arm(f"{target}/no-overlap", "tree", target, MATRIX_JOBS, extra=("--disable-overlap-schedule",)),
    ]
