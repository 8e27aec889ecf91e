"""Run the programs of every kernel launch in other orders as well, and compare all that the launch can write.

A GPU promises no order, while Triton's interpreter runs programs one after the other: a program that reads what another
one of the same launch writes, or two that write one cell, look right there and are wrong on a GPU.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from triton.runtime import interpreter

Order = Callable[[list[int]], list[int]]


class OrderError(AssertionError):
    """A launch wrote something else when its programs ran in another order."""


def _backwards(programs: list[int]) -> list[int]:
    return programs[::-1]


def _shuffled(programs: list[int]) -> list[int]:
    return random.Random(len(programs)).sample(programs, len(programs))


ORDERS: tuple[Order, ...] = (_backwards, _shuffled)


@contextmanager
def _permuted(order: Order) -> Iterator[None]:
    """The interpreter's loop over the grid, led through the programs in another order."""
    builder = interpreter.interpreter_builder
    plain, turn = builder.set_grid_idx, iter(())  # type: ignore[var-annotated]

    def instead(*_: int) -> None:
        nonlocal turn
        dims = tuple(builder.grid_dim)
        program = next(turn, None)
        if program is None:
            turn = iter(order(list(range(math.prod(dims)))))
            program = next(turn)
        plain(program // (dims[1] * dims[2]), program // dims[2] % dims[1], program % dims[2])

    builder.set_grid_idx = instead
    try:
        yield
    finally:
        del builder.set_grid_idx


def _memory(arguments: list[Any]) -> list[torch.Tensor]:
    """Every byte that the launch can reach, once."""
    found = {}
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            storage = argument.untyped_storage()
            found[storage.data_ptr()] = torch.empty(0, dtype=torch.uint8).set_(storage)  # type: ignore[call-overload]
    return list(found.values())


@contextmanager
def in_every_order(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Launches of the block run once in order and once in each of ORDERS; yields the most programs of each kernel.
    Raises OrderError, out of the launch, where the bytes differ.
    """
    plain = interpreter.GridExecutor.__call__
    most: Counter[str] = Counter()

    def launch(self: Any, *args: Any, **kwargs: Any) -> None:
        memory = _memory([*args, *kwargs.values()])
        before = [part.clone() for part in memory]
        plain(self, *args, **kwargs)
        want = [part.clone() for part in memory]
        for order in ORDERS:
            for part, old in zip(memory, before, strict=True):
                part.copy_(old)
            with _permuted(order):
                plain(self, *args, **kwargs)
            if not all(map(torch.equal, memory, want)):
                raise OrderError(f"{self.fn.__name__} over {self.grid} depends on the order of its programs")
        most[self.fn.__name__] = max(most[self.fn.__name__], math.prod(self.grid))

    with monkeypatch.context() as patch:
        patch.setattr(interpreter.GridExecutor, "__call__", launch)
        yield most
