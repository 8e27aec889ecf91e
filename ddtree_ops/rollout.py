"""A rollout over many hosts: canary first, then batches, and a stop before too much is broken.

A batch is begun only when the one before it has ended and soaked. Failures are counted, not measured in percent: at
three hosts a percentage misleads. A host that does not answer is its own state: it has not failed, it was not changed.
What was not begun is named, and can be resumed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ddtree_ops.clock import Clock, Deadline
from ddtree_ops.errors import UsageError
from ddtree_ops.outcome import Outcome, Status

REST = "rest"


@dataclass(frozen=True)
class Rules:
    """How a rollout goes. ``batches`` as written by a person: hosts (1), shares (25%), or ``rest``."""

    batches: tuple[str, ...] = (REST,)
    max_failures: int = 0
    max_unreachable: int = 0
    soak_s: float = 0.0
    deadline_s: float | None = None


def parse_batches(text: str) -> tuple[str, ...]:
    """``1,25%,rest`` to its parts; a part that is none of them is a usage error."""
    parts = tuple(part.strip() for part in text.split(","))
    for part in parts:
        number = part.removesuffix("%")
        good = part == REST or (number.isdigit() and int(number) > 0 and (part == number or int(number) <= 100))
        if not good:
            raise UsageError(
                f"{part!r} is no batch",
                why="a batch is a number of hosts, a share of them, or rest",
                next="ddtree-ops deploy all --batches 1,25%,rest",
            )
    if REST in parts[:-1]:
        raise UsageError("nothing can come after rest", next="ddtree-ops deploy all --batches 1,25%,rest")
    return parts


def split(hosts: Sequence[str], batches: Sequence[str]) -> list[list[str]]:
    """The hosts in their batches. Shares are of all hosts, at least one; what is left over comes last."""
    left, found = list(hosts), []
    for batch in batches:
        if batch == REST:
            size = len(left)
        elif batch.endswith("%"):
            size = max(1, len(hosts) * int(batch[:-1]) // 100)
        else:
            size = int(batch)
        found.append(left[:size])
        left = left[size:]
    return [batch for batch in [*found, left] if batch]


@dataclass
class Rollout:
    """One rollout. ``deploy`` takes hosts and returns what became of their instances; ``soak`` looks at them again."""

    rules: Rules
    deploy: Callable[[Sequence[str]], list[Outcome]]
    soak: Callable[[Sequence[Outcome], float], list[Outcome]]
    not_begun: Callable[[Sequence[str]], list[Outcome]]
    clock: Clock
    check: Callable[[], bool]
    say: Callable[[str], None]
    keep: Callable[[Sequence[Outcome]], None] = lambda _outcomes: None
    outcomes: list[Outcome] = field(default_factory=list)
    stopped: str = ""

    def run(self, hosts: Sequence[str]) -> list[Outcome]:
        """Batch after batch, until all are done or a rule says stop; the rest is returned as not begun."""
        batches = split(hosts, self.rules.batches)
        deadline = Deadline.after(self.rules.deadline_s, self.clock) if self.rules.deadline_s else None
        for number, batch in enumerate(batches, 1):
            if deadline is not None and deadline.passed:
                self.stopped = f"the rollout's {self.rules.deadline_s:.0f} s are over"
            if self.stopped:
                self.outcomes += self.not_begun(batch)
                continue
            if len(batches) > 1:
                self.say(f"batch {number} of {len(batches)}: {', '.join(batch)}")
            done = self.deploy(batch)
            more = number < len(batches)
            if more and not self._enough(done) and self.rules.soak_s and any(each.status.good for each in done):
                self.say(f"soaking for {self.rules.soak_s:.0f} s")
                done = self.soak(done, self.rules.soak_s)
            self.outcomes += done
            self.keep(self.outcomes)
            self.stopped = self._enough([]) if more else ""
        if self.stopped:
            self.say(f"stopped: {self.stopped}")
        return self.outcomes

    def _enough(self, also: Sequence[Outcome]) -> str:
        """Why not to go on; empty if nothing speaks against it."""
        seen = [*self.outcomes, *also]
        if self.check():
            return "interrupted"
        away = [each for each in seen if each.status is Status.UNREACHABLE]
        bad = [each for each in seen if not each.status.good and each.status is not Status.UNREACHABLE]
        if len(bad) > self.rules.max_failures:
            return f"{len(bad)} failed, {self.rules.max_failures} are allowed"
        hosts_away = {each.host for each in away}
        if len(hosts_away) > self.rules.max_unreachable:
            return f"no answer from {', '.join(sorted(hosts_away))}; {self.rules.max_unreachable} may be away"
        return ""
