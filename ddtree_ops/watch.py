"""``status`` and ``logs``: many hosts looked at, once or for as long as somebody watches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ddtree_ops.connection import Connection
from ddtree_ops.errors import DdtreeError, ExitCode
from ddtree_ops.hosts import Answer, each_host
from ddtree_ops.model import HostSpec, Settings
from ddtree_ops.outcome import WORST
from ddtree_ops.status import InstanceStatus, assess, unreachable

FOLLOW_S = 3600.0
Line = Callable[[str, dict[str, Any]], None]


def statuses(hosts: Sequence[tuple[HostSpec, Sequence[Settings]]]) -> list[InstanceStatus]:
    """Every instance as it is now; two round trips for a host with one instance."""

    def ask(connection: Connection, instances: Sequence[Settings]) -> list[InstanceStatus]:
        facts = connection.facts(instances)
        found = []
        for wanted in instances:
            there = facts.instance(wanted.instance).settings or wanted
            seen = connection.probe(there).observe(0.0, ("/metrics",))
            found.append(assess(wanted, facts, seen))
        return found

    def flat(answers: Iterable[Answer[list[InstanceStatus]]]) -> Iterable[InstanceStatus]:
        for answer in answers:
            if answer.error is not None:
                error: DdtreeError = answer.error
                yield from (unreachable(answer.host.name, each.instance, error) for each in answer.instances)
            yield from answer.value or ()

    return list(flat(each_host(hosts, ask)))


def status_code(found: Sequence[InstanceStatus]) -> ExitCode:
    codes = {status.code for status in found}
    return next((code for code in WORST if code in codes), ExitCode.DONE)


def logs(
    hosts: Sequence[tuple[HostSpec, Sequence[Settings]]], last: int, line: Line, *, follow: bool
) -> list[DdtreeError]:
    """Hand over log lines as they come; returns what went wrong, one error a host at most.

    Following, each instance has a connection of its own: one that is silent must not hold back another.
    """
    pairs = [(host, [each]) for host, instances in hosts for each in instances]

    def ask(connection: Connection, instances: Sequence[Settings]) -> None:
        name = instances[0].instance
        target = f"{connection.host.name}:{name}"
        asked = {"instance": name, "last": last, "follow": follow}
        answer = connection.call(
            "logs",
            asked,
            deadline_s=FOLLOW_S if follow else 60.0,
            on_event=lambda event: line(target, event["line"]) if "line" in event else None,
        )
        for entry in answer["lines"]:
            line(target, entry)

    return [answer.error for answer in each_host(pairs, ask) if answer.error is not None]
