"""Train the pair: the target on text, then the drafter on text that the target wrote. One command, one GPU.

    python -m benchmarks.selftest_pair.train --data DIR --out DIR [--target-seconds 170] [--drafter-seconds 130]

The number of steps follows from the time limits and the speed measured in the first steps; it is written to the log,
so that `--target-steps` and `--drafter-steps` repeat a run exactly as long. Weights are written when each model is done
and once a minute for the drafter, so a run that is cut short leaves what it had.
"""

from __future__ import annotations

import argparse
import json
import lzma
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.selftest_pair.evaluate import acceptance, bits_per_byte
from benchmarks.selftest_pair.export import drafter_config, round_to_bf16, save, target_config, tokenizer_config
from benchmarks.selftest_pair.model_drafter import Drafter, DrafterConfig
from benchmarks.selftest_pair.model_target import Target, TargetConfig

LOG_EVERY = 20  # steps a point of the loss curve averages
KINDS = ("code", "prose", "dialogue")
BLOCK_DECAY = 7.0  # weight of slot j is exp(-(j - 1) / 7), as in the DFlash recipe for blocks of 16


class Run:
    """Where the run stands: device, random numbers, clock, log."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.out = Path(args.out)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        torch.manual_seed(args.seed)
        torch.set_float32_matmul_precision("high")
        self.numbers = np.random.default_rng(args.seed)
        self.start = time.perf_counter()
        self.log: dict = {"seed": args.seed, "device": self._device_name(), "torch": torch.__version__}

    def _device_name(self) -> str:
        return torch.cuda.get_device_name() if self.device.type == "cuda" else "cpu"

    def autocast(self):
        return torch.autocast("cuda", torch.bfloat16) if self.device.type == "cuda" else nullcontext()

    def say(self, text: str) -> None:
        print(f"[{time.perf_counter() - self.start:6.1f}s] {text}", flush=True)

    def write_log(self) -> None:
        (self.out / "train_log.json").write_text(json.dumps(self.log) + "\n")


class Stream:
    """Random windows of the training text."""

    def __init__(self, data: Path, run: Run) -> None:
        raw = lzma.decompress((data / "train.u16.xz").read_bytes())
        self.tokens = torch.from_numpy(np.frombuffer(raw, dtype=np.uint16).astype(np.int32)).to(run.device)
        self.run = run

    def windows(self, count: int, length: int) -> Tensor:
        starts = torch.from_numpy(self.run.numbers.integers(0, self.tokens.numel() - length, count))
        index = starts[:, None] + torch.arange(length)
        return self.tokens[index.to(self.tokens.device)].long()


def optimiser(model: nn.Module, rate: float, device: torch.device) -> torch.optim.Optimizer:
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=device.type == "cuda")


def schedule(step: int, total: int) -> float:
    """Linear warm-up over 3% of the steps, flat, then linear to nothing over the last half."""
    warm = max(1, int(0.03 * total))
    return min(1.0, (step + 1) / warm, 2 * (total - step) / total + 0.005)


def fit(
    run: Run,
    name: str,
    model: nn.Module,
    loss_of: Callable[[], Tensor],
    *,
    rate: float,
    seconds: float,
    steps: int | None,
    every_minute: Callable[[], None] | None = None,
) -> None:
    """The training loop of both models."""
    optim = optimiser(model, rate, run.device)
    losses: list[float] = []
    pending: list[Tensor] = []
    begun = mark = time.perf_counter()
    total = steps or 10**9
    probe = None
    step = 0
    while step < total:
        for group in optim.param_groups:
            group["lr"] = rate * schedule(step, total if total < 10**9 else 2000)
        with run.autocast():
            loss = loss_of()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optim.step()
        optim.zero_grad(set_to_none=True)
        pending.append(loss.detach())
        step += 1
        if step == 10:  # compiled and warm from here on
            _ = loss.item()
            probe = time.perf_counter()
        if step == 40 and steps is None and probe is not None:
            _ = loss.item()
            now = time.perf_counter()
            pace = (now - probe) / 30
            total = step + max(10, int((seconds - (now - begun)) / pace))
            run.say(f"{name}: {pace * 1000:.0f} ms a step, {total} steps")
        if step % 50 == 0 or step == total:
            losses += torch.stack(pending).tolist()
            pending.clear()
            now = time.perf_counter()
            if step % 200 == 0 or step == total:
                run.say(f"{name}: step {step}/{total} loss {np.mean(losses[-50:]):.4f}")
            if every_minute and now - mark > 60:
                every_minute()
                mark = now
            if steps is None and now - begun > 1.15 * seconds:
                run.say(f"{name}: out of time at step {step}")
                break
    means = [round(float(np.mean(losses[i : i + LOG_EVERY])), 4) for i in range(0, len(losses), LOG_EVERY)]
    seconds_used = round(time.perf_counter() - begun, 1)
    run.log[name] = {"steps": step, "seconds": seconds_used, "rate": rate, "loss_every": LOG_EVERY, "losses": means}


@contextmanager
def compiled(run: Run, layers: nn.ModuleList, trial: Callable[[], Tensor]) -> Iterator[None]:
    """Compiled layers inside the block; a compiler that fails here costs the speed, never the run."""
    plain = [layer.forward for layer in layers]
    if run.device.type == "cuda" and not run.args.no_compile:
        try:
            for layer in layers:
                layer.forward = torch.compile(layer.forward, dynamic=False)
            with run.autocast():
                trial().backward()
            run.say("layers compiled")
        except Exception as error:  # noqa: BLE001 (any compiler failure has the same answer)
            run.say(f"compilation failed, going on without: {type(error).__name__}: {str(error)[:200]}")
            for layer, forward in zip(layers, plain, strict=True):
                layer.forward = forward
    yield
    for layer, forward in zip(layers, plain, strict=True):
        layer.forward = forward


def head_loss(target: Target, hidden: Tensor, wanted: Tensor) -> Tensor:
    return F.cross_entropy(target.lm_head(hidden).float().flatten(0, -2), wanted.flatten())


def train_target(run: Run, stream: Stream) -> Target:
    args = run.args
    target = Target(replace(TargetConfig(), **json.loads(args.target_config))).to(run.device)

    def loss_of() -> Tensor:
        ids = stream.windows(args.batch, args.length)
        hidden, _ = target(ids)
        return head_loss(target, hidden[:, :-1], ids[:, 1:])

    with compiled(run, target.model.layers, loss_of):
        target.zero_grad()
        fit(run, "target", target, loss_of, rate=args.target_rate, seconds=args.target_seconds, steps=args.target_steps)
    round_to_bf16(target)
    target.eval().requires_grad_(False)
    save(run.out / "target", target, target_config(target.config))
    run.write_log()
    return target


def write_texts(run: Run, target: Target, stream: Stream) -> Tensor:
    """Texts that the target continued itself (half greedily, some cool, the rest at temperature 1), and a fifth as many
    windows of the training text."""
    args, parts = run.args, []
    for _ in range(args.rollouts):
        prompts = stream.windows(args.rollout_batch, args.rollout_prompt)
        heat = torch.ones(args.rollout_batch, device=run.device)
        heat[: args.rollout_batch // 2] = 0.0
        heat[args.rollout_batch // 2 : args.rollout_batch * 5 // 8] = 0.6
        with run.autocast():
            parts.append(target.generate(prompts, args.rollout_length, heat).short())
        run.say(f"target wrote {parts[-1].numel() / 1e6:.1f} M tokens")
    parts.append(stream.windows(max(1, args.rollouts * args.rollout_batch // 5), args.rollout_length).short())
    return torch.cat(parts)


@torch.no_grad()
def hidden_features(run: Run, target: Target, texts: Tensor, layers: tuple[int, ...]) -> list[Tensor]:
    """The frozen target's captured layers for all texts, kept on the device: [N, T, hidden] for each layer."""
    shape = (*texts.shape, target.config.hidden_size)
    kind = torch.bfloat16 if run.device.type == "cuda" else torch.float32
    kept = [torch.empty(shape, dtype=kind, device=run.device) for _ in layers]
    for start in range(0, len(texts), 128):
        rows = slice(start, start + 128)
        with run.autocast():
            _, captured = target(texts[rows].long(), capture=layers)
        for store, value in zip(kept, captured, strict=True):
            store[rows] = value
    return kept


def block_loss(target: Target, drafter: Drafter, ids: Tensor, features: list[Tensor], anchors: Tensor) -> Tensor:
    """Cross-entropy of the masked slots; earlier slots weigh more, as acceptance needs them first."""
    slots = torch.arange(1, drafter.config.block_size, device=ids.device)
    hidden = drafter(target.model.embed_tokens, ids, features, anchors)
    wanted = ids[:, anchors[:, None] + slots]
    loss = F.cross_entropy(target.lm_head(hidden).float().flatten(0, -2), wanted.flatten(), reduction="none")
    weight = torch.exp(-(slots - 1) / BLOCK_DECAY)
    return (loss.view(wanted.shape).mean((0, 1)) * weight).sum() / weight.sum()


def train_drafter(run: Run, target: Target, texts: Tensor) -> Drafter:
    args = run.args
    shape = replace(DrafterConfig(), **json.loads(args.drafter_config))
    drafter = Drafter(shape).to(run.device)
    length, block = texts.shape[1], shape.block_size
    features = hidden_features(run, target, texts, shape.target_layer_ids)
    run.say("features of the target's texts computed")

    def loss_of() -> Tensor:
        rows = torch.from_numpy(run.numbers.integers(0, len(texts), args.drafter_batch)).to(run.device)
        picked = run.numbers.choice(np.arange(8, length - block + 1), args.anchors, replace=False)
        anchors = torch.from_numpy(np.sort(picked)).to(run.device)
        return block_loss(target, drafter, texts[rows].long(), [f[rows] for f in features], anchors)

    config = drafter_config(shape, target.config.vocab_size)

    def checkpoint() -> None:
        save(run.out / "drafter", drafter, config)
        run.write_log()

    with compiled(run, drafter.layers, loss_of):
        drafter.zero_grad()
        fit(
            run, "drafter", drafter, loss_of, rate=args.drafter_rate, seconds=args.drafter_seconds,
            steps=args.drafter_steps, every_minute=checkpoint,
        )  # fmt: skip
    round_to_bf16(drafter)
    drafter.eval().requires_grad_(False)
    checkpoint()
    return drafter


def heldout_prompts(held: dict[str, np.ndarray], kind: int, count: int, length: int, seed: int) -> np.ndarray:
    """`count` windows from the held-out documents of one kind."""
    numbers = np.random.default_rng(seed)
    ends = held["lengths"].cumsum()
    spans = [
        (end - size, end)
        for end, size, k in zip(ends, held["lengths"], held["kinds"], strict=True)
        if k == kind and size > length
    ]
    starts = [int(numbers.integers(low, high - length)) for low, high in (spans[i % len(spans)] for i in range(count))]
    return np.stack([held["tokens"][s : s + length] for s in starts]).astype(np.int64)


def report(run: Run, target: Target, drafter: Drafter, data: Path) -> None:
    held = dict(np.load(data / "heldout.npz"))
    args = run.args
    with run.autocast():
        value = bits_per_byte(target, held["tokens"], held["lengths"], held["text_bytes"], args.length)
        run.log["bits_per_byte"] = round(value, 4)
        run.say(f"held-out bits per byte {value:.4f}")
        run.log["acceptance"] = {}
        for kind, name in enumerate(KINDS):
            if kind not in held["kinds"]:
                continue
            prompts = torch.from_numpy(heldout_prompts(held, kind, args.prompts, args.rollout_prompt, 7))
            for temperature in (0.0, 1.0):
                result = acceptance(
                    target, drafter, prompts.to(run.device), args.rollout_length, temperature, (8, 16, 32, 64)
                )
                run.log["acceptance"][f"{name} T={temperature:g}"] = result
                run.say(f"accept length {name} T={temperature:g}: {result}")
    run.write_log()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data", required=True)
    add("--out", required=True)
    add("--seed", type=int, default=1)
    add("--target-seconds", type=float, default=170)
    add("--drafter-seconds", type=float, default=130)
    add("--target-steps", type=int)
    add("--drafter-steps", type=int)
    add("--target-rate", type=float, default=3e-3)
    add("--drafter-rate", type=float, default=2e-3)
    add("--batch", type=int, default=64)
    add("--length", type=int, default=1024)
    add("--drafter-batch", type=int, default=128)
    add("--anchors", type=int, default=24)
    add("--rollouts", type=int, default=4)
    add("--rollout-batch", type=int, default=4096)
    add("--rollout-length", type=int, default=512)
    add("--rollout-prompt", type=int, default=96)
    add("--prompts", type=int, default=48, help="held-out prompts of each kind for the accept length")
    add("--target-config", default="{}", help="JSON overrides, for tests")
    add("--drafter-config", default="{}", help="JSON overrides, for tests")
    add("--no-compile", action="store_true")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    run = Run(args)
    run.out.mkdir(parents=True, exist_ok=True)
    data = Path(args.data)
    stream = Stream(data, run)
    run.say(f"{stream.tokens.numel() / 1e6:.1f} M tokens on {run.log['device']}")
    target = train_target(run, stream)
    texts = write_texts(run, target, stream)
    drafter = train_drafter(run, target, texts)
    shutil.copy(data / "tokenizer.json", run.out / "target")
    (run.out / "target" / "tokenizer_config.json").write_text(json.dumps(tokenizer_config(), indent=2) + "\n")
    report(run, target, drafter, data)
    run.log["seconds"] = round(time.perf_counter() - run.start, 1)
    run.write_log()


if __name__ == "__main__":
    main()
