"""The same question to many hosts at once, one answer or one error each: one host never hides another.

What only reads is asked in threads that nobody waits for once a person pressed Ctrl-C: a host that is silent, or a log
that is followed, must not hold them. What changes a host is finished first, so that its lock is freed.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from ddtree_ops import wiring
from ddtree_ops.connection import Connection
from ddtree_ops.errors import DdtreeError, ExitCode
from ddtree_ops.model import HostSpec, Settings
from ddtree_ops.outcome import WORST

T = TypeVar("T")
Hosts = Sequence[tuple[HostSpec, Sequence[Settings]]]

PARALLEL = 16


@dataclass(frozen=True)
class Answer(Generic[T]):
    """What one host (or one of its instances) answered, or why it did not."""

    host: HostSpec
    instances: tuple[Settings, ...]
    value: T | None = None
    error: DdtreeError | None = None


def each_host(
    hosts: Hosts, ask: Callable[[Connection, Sequence[Settings]], T], *, changes: bool = False
) -> list[Answer[T]]:
    """Ask every host; answers in the order of the hosts. ``changes``: an interrupted ``ask`` is waited for."""

    def one(pair: tuple[HostSpec, Sequence[Settings]]) -> Answer[T]:
        host, instances = pair[0], tuple(pair[1])
        try:
            connection = wiring.connect(host)
            try:
                return Answer(host, instances, ask(connection, instances))
            finally:
                connection.close()
        except DdtreeError as error:
            named = error if error.host else replace(error, host=host.name)
            return Answer(host, instances, error=named)

    jobs = [lambda pair=pair: one(pair) for pair in hosts]
    if changes:
        with ThreadPoolExecutor(max_workers=max(1, min(PARALLEL, len(hosts)))) as pool:
            return list(pool.map(lambda job: job(), jobs))
    return side_by_side(jobs)


def side_by_side(jobs: Sequence[Callable[[], T]], parallel: int = PARALLEL) -> list[T]:
    """Run all; results in order. An exception of any, or Ctrl-C, ends this at once; threads end with the process."""
    todo: queue.SimpleQueue[int] = queue.SimpleQueue()
    done: queue.SimpleQueue[tuple[int, T | None, BaseException | None]] = queue.SimpleQueue()
    for number in range(len(jobs)):
        todo.put(number)

    def work() -> None:
        while True:
            try:
                number = todo.get_nowait()
            except queue.Empty:
                return
            try:
                done.put((number, jobs[number](), None))
            except BaseException as error:  # noqa: BLE001  handed to whoever waits
                done.put((number, None, error))

    for _ in range(min(parallel, len(jobs))):
        threading.Thread(target=work, daemon=True).start()
    results: dict[int, T] = {}
    while len(results) < len(jobs):
        number, result, error = done.get()
        if error is not None:
            raise error
        results[number] = result  # type: ignore[assignment]
    return [results[number] for number in range(len(jobs))]


def code_of(errors: Iterable[DdtreeError | None]) -> ExitCode:
    """The exit code of a command that asked many."""
    codes = {error.exit_code for error in errors if error is not None}
    return next((code for code in WORST if code in codes), ExitCode.DONE)
