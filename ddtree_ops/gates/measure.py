"""A measurement: the fixed prompts, each asked ``rounds`` times at each concurrency; and how it is read. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ddtree_ops.gates.prompts import prompts
from ddtree_ops.model import GateSettings


@dataclass(frozen=True)
class Sample:
    """One prompt answered once. ``gaps[i]``: by how much token i beat the runner-up (nats), where the server says."""

    prompt: int
    seconds: float
    tokens: tuple[int, ...]
    accept_length: float | None = None
    gaps: tuple[float, ...] | None = None


@dataclass(frozen=True)
class Run:
    """All samples at one concurrency, and how long they took together."""

    concurrency: int
    wall_s: float
    samples: tuple[Sample, ...]
    errors: tuple[str, ...] = ()

    @property
    def tokens_per_s(self) -> float:
        return sum(len(sample.tokens) for sample in self.samples) / self.wall_s if self.wall_s > 0 else 0.0

    @property
    def accept_length(self) -> float | None:
        known = [sample.accept_length for sample in self.samples if sample.accept_length is not None]
        return sum(known) / len(known) if known else None

    def seconds_by_prompt(self) -> dict[int, float]:
        """Mean time of each prompt over its rounds."""
        times: dict[int, list[float]] = {}
        for sample in self.samples:
            times.setdefault(sample.prompt, []).append(sample.seconds)
        return {prompt: sum(found) / len(found) for prompt, found in sorted(times.items())}


@dataclass(frozen=True)
class Measurement:
    """One run for each concurrency."""

    runs: tuple[Run, ...]

    def at(self, concurrency: int) -> Run | None:
        return next((run for run in self.runs if run.concurrency == concurrency), None)

    def samples(self) -> Iterable[Sample]:
        for run in self.runs:
            yield from run.samples

    @property
    def errors(self) -> tuple[str, ...]:
        return tuple(error for run in self.runs for error in run.errors)


def load_request(gates: GateSettings, concurrency: int, *, gaps: bool = False) -> dict[str, Any]:
    """The arguments of the helper's ``load`` for one run. Greedy, and never ended early: equal work in every arm."""
    sampling = {"temperature": 0, "max_new_tokens": gates.tokens, "ignore_eos": True}
    extra: dict[str, Any] = {"return_logprob": True, "top_logprobs_num": 2} if gaps else {}
    return {
        "path": "/generate",
        "bodies": [{"text": text, "sampling_params": sampling, **extra} for text in prompts(gates.prompts)],
        "rounds": gates.rounds,
        "concurrency": concurrency,
        "warmup": min(concurrency, gates.prompts),
    }


SLOWEST_TOKENS_PER_S = 5.0
"""A stream slower than this is given up: nobody serves at it, and a host waits that long to be confirmed."""


def longest_s(request: Mapping[str, Any]) -> float:
    """How long a load may take at most."""
    answers = int(len(request["bodies"]) * request["rounds"] + request["warmup"])
    tokens = answers * int(request["bodies"][0]["sampling_params"]["max_new_tokens"])
    return 60.0 + tokens / (SLOWEST_TOKENS_PER_S * min(int(request["concurrency"]), answers))


def parse_run(answer: Mapping[str, Any], tokens: int) -> Run:
    """Read the helper's answer. A reply that is not ``tokens`` long, or none, is an error of that request."""
    samples, errors = [], []
    for reply in answer["replies"]:
        if reply.get("error"):
            errors.append(f"prompt {reply['body']}: {reply['error']}")
        elif len(reply["tokens"]) != tokens:
            errors.append(f"prompt {reply['body']}: {len(reply['tokens'])} tokens where {tokens} were asked for")
        else:
            samples.append(_sample(reply))
    return Run(int(answer["concurrency"]), float(answer["wall_s"]), tuple(samples), tuple(errors))


def _sample(reply: Mapping[str, Any]) -> Sample:
    return Sample(
        prompt=int(reply["body"]),
        seconds=float(reply["seconds"]),
        tokens=tuple(reply["tokens"]),
        accept_length=reply.get("accept_length"),
        gaps=tuple(reply["gaps"]) if reply.get("gaps") else None,
    )


def dump(measurement: Measurement) -> list[dict[str, Any]]:
    """For the baseline's file on the host."""
    return [
        {
            "concurrency": run.concurrency,
            "wall_s": run.wall_s,
            "replies": [
                {
                    "body": sample.prompt,
                    "seconds": sample.seconds,
                    "tokens": list(sample.tokens),
                    "accept_length": sample.accept_length,
                    **({"gaps": list(sample.gaps)} if sample.gaps else {}),
                }
                for sample in run.samples
            ],
        }
        for run in measurement.runs
    ]


def load(stored: Sequence[Mapping[str, Any]], tokens: int) -> Measurement:
    return Measurement(tuple(parse_run(run, tokens) for run in stored))
