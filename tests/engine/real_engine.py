"""SGLang 0.5.17 under our patches and with our plugin, and arms of it that run on this machine's CPU.

`run(arms, site, folder)` starts one process (sglang_on_cpu.py), which loads SGLang and forks for each arm: the real
scheduler, model runner, models, attention backends and worker serve the arm's jobs (sglang_ddtree.parity.jobs).
By hand, from the repository's root:

    python tests/engine/real_engine.py tree --budget 6 --cap 2 --job informed_tokens --count 2 --new 16 --together
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]
PLUGIN = REPOSITORY / "patches/sglang-ddtree/src"
if __name__ == "__main__":
    sys.path[:0] = [str(REPOSITORY), str(PLUGIN)]

import sglang_source  # noqa: E402
from sglang_ddtree.parity import checkpoint, float32, models, plan  # noqa: E402
from sglang_ddtree.parity.jobs_data import prompts  # noqa: E402

BLOCK = 5
LAYERS = 3
_SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
_SMALL |= {"head_dim": 32, "max_position_embeddings": 512}
MODELS = {
    # Gated DeltaNet, attention, Gated DeltaNet: each kind behind the other, with grouped heads in both
    "hybrid": models.hybrid(
        LAYERS,
        **_SMALL,
        full_attention_interval=2,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        rope_parameters={
            "mrope_interleaved": True,
            "mrope_section": [2, 1, 1],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000,
            "rope_type": "default",
        },
    ),
    "dense": {**models.dense(), **_SMALL, "num_hidden_layers": LAYERS},
    "drafter": models.drafter(1, (0, 1), LAYERS, **_SMALL, block_size=BLOCK),
}
# SGLang pads vocabularies to 64 tokens a rank at least: the second of two ranks has 16 of these, and padding.
MODELS["hybrid-80"] = {**MODELS["hybrid"], "vocab_size": 80}


def overlay(source: Path, cache: Path) -> Path:
    """A folder for sys.path: the pinned SGLang of `source` under our patch series, and the plugin's entry point.

    It is kept in the cache by the digest of what was put over SGLang; the plugin's modules are not in it.
    """
    from ddtree_ops.bundle.build import plugin_files
    from ddtree_ops.bundle.patches import apply_series, read_base, read_series
    from ddtree_ops.bundle.wheel import SGLANG_VERSION
    from ddtree_ops.data import data_dir

    series = data_dir("patches") / f"sglang-{SGLANG_VERSION}"
    over = apply_series(read_series(series), read_base(series), lambda path: (source / path).read_bytes())
    plugin = plugin_files(data_dir("patches") / "sglang-ddtree")
    over.update({path: data for path, data in plugin.items() if ".dist-info/" in path})
    digest = hashlib.sha256()
    for path in sorted(over):
        digest.update(path.encode() + b"\0" + over[path] + b"\0")
    folder = cache / "src" / f"sglang-{SGLANG_VERSION}-patched-{digest.hexdigest()[:16]}"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as work:
        made = Path(work) / "site"
        shutil.copytree(source / "sglang", made / "sglang", ignore=shutil.ignore_patterns("__pycache__"))
        for path, data in over.items():
            (made / path).parent.mkdir(parents=True, exist_ok=True)
            (made / path).write_bytes(data)
        try:
            made.rename(folder)
        except OSError:  # another test process was first
            assert folder.is_dir()
    return folder


@dataclasses.dataclass(frozen=True)
class Arm:
    """One server. kind: ar, dflash, linear, shadow-linear, tree or auto, which takes another of its widths or the
    chain every round; fault: one of sglang_on_cpu.FAULTS, put in.

    graphs: the batches whose decode graphs are recorded; none means that rounds run without. cached: with the prefix
    cache. tp: ranks. saved: weights from a checkpoint, which ranks cut, instead of a draw in place, which they cannot
    share.
    """

    kind: str
    jobs: tuple[dict[str, Any], ...]
    target: str = "hybrid"
    budget: int = 8
    widths: tuple[int, ...] = (2, 4, 9)
    cap: int = 4
    requests: int = 3
    seed: int = 1  # of the weights
    informed: bool = True
    seeded: bool = False
    overlap: bool = False
    fault: str | None = None
    extra: tuple[str, ...] = ()
    tp: int = 1
    saved: bool = False
    states: str | None = "snapshots"
    graphs: tuple[int, ...] = ()
    cached: bool = False

    def argv(self, folder: Path) -> list[str]:
        """Arguments of sglang.launch_server; `folder` holds the models' configurations."""
        args = ["--device", "cpu", "--model-path", str(folder / self.target), "--skip-tokenizer-init"]
        args += [
            "--load-format",
            "auto" if self.saved else "dummy",
            "--tp-size",
            str(self.tp),
            "--dtype",
            "float32",
            "--attention-backend",
            "triton",
        ]
        args += ["--sampling-backend", "pytorch", "--grammar-backend", "none", "--page-size", "1"]
        args += ["--cuda-graph-backend-prefill", "disabled"]
        args += ["--cuda-graph-backend-decode", "full" if self.graphs else "disabled"]
        args += ["--cuda-graph-bs-decode", *map(str, self.graphs)] if self.graphs else []
        args += [] if self.cached else ["--disable-radix-cache"]
        args += ["--random-seed", "7", "--log-level", "warning"]
        args += [] if self.overlap else ["--disable-overlap-schedule"]
        args += ["--max-running-requests", str(self.requests), "--max-total-tokens", "512", "--context-length", "128"]
        args += self.extra
        if self.kind == "ar":
            return args
        args += ["--speculative-draft-model-path", str(folder / "drafter")]
        args += ["--speculative-draft-attention-backend", "triton"]
        if self.kind == "dflash":
            return [*args, "--speculative-algorithm", "DFLASH"]
        args += ["--speculative-algorithm", "DDTREE", "--speculative-ddtree-mode", self.kind]
        sizes = ["--speculative-ddtree-budget", str(self.budget)]
        if self.kind == "auto":
            sizes = ["--speculative-ddtree-widths", ",".join(map(str, self.widths))]
        args += [*sizes, "--speculative-ddtree-topk-cap", str(self.cap)]
        args += ["--speculative-ddtree-states", self.states] if self.states else []
        return [*args, "--speculative-ddtree-allow-hybrid-unsafe"]

    def spec(self, folder: Path) -> dict[str, Any]:
        return {
            "argv": self.argv(folder),
            "jobs": list(self.jobs),
            "seed": None if self.saved else self.seed,
            "float32": True,
            "informed": self.informed and self.kind in ("tree", "auto"),
            "environ": dict(plan.CYCLE) if self.kind == "auto" else {},
            "late_seeds": self.seeded,
            "fault": self.fault,
            "tp": self.tp,
            "extra_buffer": self.cached,
            "graphs": bool(self.graphs),
        }


def asks(count: int, new: int, length: int = 6, **params: Any) -> list[dict[str, Any]]:
    """`count` prompts of growing length, for `new` tokens each."""
    given = {"max_new_tokens": new, "ignore_eos": True, **params}
    return [{"ids": ids, "params": given} for ids in prompts(count, length, models.VOCAB)]


def run(arms: dict[str, Arm], site: Path, folder: Path, limit: float = 1500) -> dict[str, list[dict[str, Any]]]:
    """The results of each arm's jobs. site: see `overlay`; folder: scratch; limit: seconds for all arms together.

    Raises AssertionError with an arm's traceback and the process's last words.
    """
    for name, config in MODELS.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "config.json").write_text(json.dumps(config))
    for name in {name for arm in arms.values() if arm.saved for name in (arm.target, "drafter")}:
        checkpoint.write(folder / name, MODELS[name], 1)
    pairs = []
    for name, arm in arms.items():
        spec, out = folder / f"{name}.spec.json", folder / f"{name}.out.json"
        store = folder / f"{name}.store"
        spec.write_text(json.dumps({**arm.spec(folder), "store": str(store)}))
        for file in (out, store):
            file.unlink(missing_ok=True)
        pairs += [str(spec), str(out)]
    _serve(pairs, site, folder, limit)
    results = {}
    for name in arms:
        out = folder / f"{name}.out.json"
        result = json.loads(out.read_text()) if out.is_file() else {"ok": False, "error": "it wrote no result"}
        if not result["ok"]:
            tail = "\n".join((folder / "log").read_text().splitlines()[-40:])
            raise AssertionError(f"arm {name} failed: {result['error']}\n{tail}")
        results[name] = result["results"]
    return results


def _serve(pairs: list[str], site: Path, folder: Path, limit: float) -> None:
    """Run the process and its forks to their end; nothing of them outlives this call."""
    path = os.pathsep.join(map(str, (site, PLUGIN, HERE)))
    environ = {name: value for name, value in os.environ.items() if not name.startswith("SGLANG_")}
    environ |= {"PYTHONPATH": path, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", **float32.ENVIRONMENT}
    environ["TORCH_COMPILE_DISABLE"] = "1"  # a compiled function would be traced into the interpreter
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "sglang_on_cpu", *pairs],
            env=environ,
            cwd=folder,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            print(f"the arms did not end in {limit} s", file=log)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description="Run one arm of the real engine on the CPU and print its result.")
    parser.add_argument("kind", choices=("ar", "dflash", "linear", "shadow-linear", "tree", "auto"))
    parser.add_argument("--target", default="hybrid", choices=("hybrid", "dense"))
    parser.add_argument("--budget", type=int, default=8)
    parser.add_argument("--cap", type=int, default=4)
    parser.add_argument("--fault")
    parser.add_argument("--job", default="tokens", help="a job of sglang_ddtree.parity.jobs that takes asks")
    parser.add_argument("--count", type=int, default=1)
    parser.add_argument("--new", type=int, default=12)
    parser.add_argument("--together", action="store_true")
    parser.add_argument("--overlap", action="store_true")
    parser.add_argument("extra", nargs="*", help="further arguments of sglang.launch_server, after --")
    given = parser.parse_args()
    from ddtree_ops.data import cache_dir

    site = overlay(sglang_source.pinned(), cache_dir())
    job = {"job": given.job, "asks": asks(given.count, given.new), "together": given.together}
    arm = Arm(
        given.kind,
        (job,),
        target=given.target,
        budget=given.budget,
        cap=given.cap,
        overlap=given.overlap,
        fault=given.fault,
        extra=tuple(given.extra),
    )
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(run({"arm": arm}, site, Path(folder))["arm"][0], indent=1))


if __name__ == "__main__":
    main()
