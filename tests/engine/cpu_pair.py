"""The self-test pair and prompts for it, shared by the CPU engine's tests."""

from __future__ import annotations

import copy
import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
from sglang_ddtree.cpu.decode import Mode, Pair, Sampling, Session
from tokenizers import Tokenizer

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "patches" / "selftest-pair"
PROMPTS = ROOT / "benchmarks" / "engine" / "prompts.jsonl"


@functools.cache
def pair(dtype: type[np.floating[Any]] = np.float64) -> Pair:
    return Pair(FOLDER / "target", FOLDER / "drafter", dtype=dtype)


@functools.cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(FOLDER / "target" / "tokenizer.json"))


@functools.cache
def prompts(tokens: int = 32) -> list[list[int]]:
    """The benchmark's prompts, five of each category, cut to ``tokens``."""
    entries = [json.loads(line) for line in PROMPTS.read_text().splitlines()]
    chosen: list[list[int]] = []
    for category in ("code", "prose", "dialogue", "repetitive"):
        texts = [entry["text"] for entry in entries if entry["category"] == category][:5]
        chosen += [tokenizer().encode(text).ids[:tokens] for text in texts]
    return chosen


@functools.cache
def _started(number: int, temperature: float) -> Session:
    session = Session(pair(), Mode(), prompts()[number], Sampling(temperature, seed=100 + number))
    session.start()
    return session


def started(number: int, mode: Mode, temperature: float = 0.0) -> Session:
    """A session after its prompt, in ``mode``; the prompt is read once for all modes."""
    first = _started(number, temperature)
    session = copy.copy(first)
    session.mode = mode
    session.tokens, session.open = list(first.tokens), []
    session.caches, session.context = copy.deepcopy((first.caches, first.context))
    session.counters = copy.deepcopy(first.counters)
    return session


def run(session: Session, count: int) -> list[int]:
    while len(session.output) < count:
        session.round()
    return session.output[:count]
