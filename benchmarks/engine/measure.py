"""Take the measurements: every arm answers the same prompts, arms in turn, so that what drifts drifts for all."""

from __future__ import annotations

import hashlib
import itertools
import json
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.engine.client import Client, ServerError
from benchmarks.engine.parity import Law, Verdict, judge, read_law

PROMPTS = Path(__file__).with_name("prompts.jsonl")


@dataclass(frozen=True)
class Prompt:
    category: str
    text: str


@dataclass(frozen=True)
class Arm:
    name: str
    url: str


@dataclass(frozen=True)
class Grid:
    """What is measured. ``repeats`` blocks of every cell, the arms' order reversed in every second one."""

    temperatures: tuple[float, ...] = (0.0, 1.0)
    concurrencies: tuple[int, ...] = (1, 2, 4, 8)
    repeats: int = 2
    tokens: int = 128
    warmup: int = 2

    def sampling(self, temperature: float, seed: int) -> dict[str, Any]:
        """Equal work in every arm: no answer ends early."""
        return {
            "temperature": temperature, "max_new_tokens": self.tokens, "ignore_eos": True, "sampling_seed": seed,
        }  # fmt: skip


def load_prompts(path: Path = PROMPTS, count: int | None = None) -> list[Prompt]:
    """The committed prompts; ``count`` takes them category by category in turn."""
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    by_category: dict[str, list[Prompt]] = {}
    for entry in entries:
        by_category.setdefault(entry["category"], []).append(Prompt(entry["category"], entry["text"]))
    mixed = [p for group in zip(*by_category.values(), strict=True) for p in group]
    return mixed[:count]


def fingerprint(prompts: Sequence[Prompt]) -> str:
    return hashlib.sha256(json.dumps([p.text for p in prompts]).encode()).hexdigest()[:16]


def plan(grid: Grid, arms: Sequence[Arm]) -> Iterator[tuple[float, int, int, Arm]]:
    """(temperature, concurrency, repeat, arm) in the order they are measured."""
    for temperature in grid.temperatures:
        for concurrency in grid.concurrencies:
            for repeat in range(grid.repeats):
                for arm in arms if repeat % 2 == 0 else tuple(reversed(arms)):
                    yield temperature, concurrency, repeat, arm


def block(arm: Arm, prompts: Sequence[Prompt], grid: Grid, temperature: float, concurrency: int) -> dict[str, Any]:
    """All prompts once, ``concurrency`` clients at a time, each asking again as soon as it is answered."""
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    for number in range(len(prompts)):
        waiting.put(number)
    samples: list[dict[str, Any]] = []
    errors: list[str] = []

    def work() -> None:
        client = Client(arm.url)
        try:
            while not errors:
                number = waiting.get_nowait()
                reply = client.generate(prompts[number].text, grid.sampling(temperature, 1000 + number))
                samples.append({
                    "prompt": number, "tokens": list(reply.tokens), "ttft_s": reply.ttft_s,
                    "decode_s": reply.decode_s, "e2e_s": reply.e2e_s, "rounds": reply.rounds,
                    "histogram": list(reply.histogram), "first_tokens": reply.first_tokens,
                })  # fmt: skip
        except queue.Empty:
            pass
        except ServerError as error:
            errors.append(str(error))
        finally:
            client.close()

    threads = [threading.Thread(target=work, daemon=True) for _ in range(min(concurrency, len(prompts)))]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wall_s = time.perf_counter() - began
    if errors:
        raise ServerError(f"arm {arm.name}: {errors[0]}")
    return {"wall_s": wall_s, "samples": sorted(samples, key=lambda sample: sample["prompt"])}


def laws(url: str, prompts: Sequence[Prompt], grid: Grid) -> list[Law]:
    """Plain decoding's greedy tokens and how certain each was."""
    client = Client(url)
    found = []
    for prompt in prompts:
        body = {
            "text": prompt.text, "sampling_params": grid.sampling(0.0, 1), "return_logprob": True,
            "top_logprobs_num": 2,
        }  # fmt: skip
        found.append(read_law(client.post("/generate", body)))
    client.close()
    return found


def check_parity(arms: Sequence[Arm], prompts: Sequence[Prompt], grid: Grid, reference: Sequence[Law]) -> list[Verdict]:
    """Every arm's greedy answers at the first and at the highest concurrency."""
    verdicts = []
    for arm in arms:
        answers = [
            (sample["prompt"], sample["tokens"])
            for concurrency in sorted({1, max(grid.concurrencies)})
            for sample in block(arm, prompts, grid, 0.0, concurrency)["samples"]
        ]
        verdicts.append(judge(arm.name, reference, answers))
    return verdicts


def provenance(arm: Arm) -> dict[str, Any]:
    """What the server says of itself: the settings that matter to a figure, not its whole command line."""
    client = Client(arm.url)
    info = client.get("/server_info")
    client.close()
    first = (info.get("internal_states") or [{}])[0]
    keys = (
        "version", "model_path", "dtype", "attention_backend", "speculative_algorithm", "speculative_num_draft_tokens",
        "speculative_draft_model_path", "disable_overlap_schedule", "disable_cuda_graph", "max_running_requests",
        "cuda_graph_max_bs_decode", "disable_radix_cache", "tp_size", "stand_in",
    )  # fmt: skip
    shown = {key: info[key] for key in keys if key in info}
    return {"url": arm.url, "server": shown, "ddtree": first.get("ddtree")}


def measure(
    arms: Sequence[Arm],
    prompts: Sequence[Prompt],
    grid: Grid,
    say: Callable[[str], None],
    late: Callable[[], bool] = lambda: False,
) -> list[dict[str, Any]]:
    """Every block of the plan, warm-ups dropped. Once ``late()`` nothing new is begun: what is left out is left out for
    every arm alike.
    """
    for arm in arms:
        block(arm, prompts[: grid.warmup], grid, 0.0, 1)
    blocks: list[dict[str, Any]] = []
    for (temperature, concurrency, repeat), turns in itertools.groupby(plan(grid, arms), key=lambda turn: turn[:3]):
        if late():
            say(f"time is up before T={temperature:g} x{concurrency} #{repeat}")
            break
        for *_, arm in turns:
            found = block(arm, prompts, grid, temperature, concurrency)
            tokens = sum(len(sample["tokens"]) for sample in found["samples"])
            say(f"T={temperature:g} x{concurrency} #{repeat} {arm.name}: {tokens / found['wall_s']:.1f} tok/s")
            for sample in found["samples"]:
                sample["tokens"] = len(sample["tokens"])
            blocks.append({
                "arm": arm.name, "temperature": temperature, "concurrency": concurrency, "repeat": repeat,
                "tokens": tokens, **found,
            })  # fmt: skip
    return blocks


def measured(grid: Grid, blocks: Sequence[dict[str, Any]]) -> Grid:
    """The grid that the blocks cover."""
    temperatures = tuple(dict.fromkeys(block["temperature"] for block in blocks))
    concurrencies = tuple(dict.fromkeys(block["concurrency"] for block in blocks))
    return replace(grid, temperatures=temperatures, concurrencies=concurrencies)
