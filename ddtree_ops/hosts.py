"""The same question to many hosts at once, one answer or one error each: one host never hides another."""

from __future__ import annotations

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


def each_host(hosts: Hosts, ask: Callable[[Connection, Sequence[Settings]], T]) -> list[Answer[T]]:
    """Ask every host; answers in the order of the hosts."""

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

    with ThreadPoolExecutor(max_workers=max(1, min(PARALLEL, len(hosts)))) as pool:
        return list(pool.map(one, hosts))


def code_of(errors: Iterable[DdtreeError | None]) -> ExitCode:
    """The exit code of a command that asked many."""
    codes = {error.exit_code for error in errors if error is not None}
    return next((code for code in WORST if code in codes), ExitCode.DONE)
