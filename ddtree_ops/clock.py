"""The only place that reads the clock or sleeps; everything else takes a ``Clock``."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Protocol


class Clock(Protocol):
    """Monotonic seconds, wall-clock seconds since the epoch, and sleep."""

    def monotonic(self) -> float: ...
    def time(self) -> float: ...
    def sleep(self, seconds: float) -> None: ...


class SystemClock:
    """The machine's clock."""

    def monotonic(self) -> float:
        return time.monotonic()

    def time(self) -> float:
        return time.time()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


@dataclass
class FakeClock:
    """A clock for tests: sleeping moves it at once."""

    now: float = 0.0
    epoch: float = 1_700_000_000.0
    slept: list[float] = field(default_factory=list)

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.epoch + self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += max(seconds, 0.0)


@dataclass(frozen=True)
class Deadline:
    """A point in time that must not be passed, and what is left until then (seconds)."""

    at: float
    clock: Clock

    @classmethod
    def after(cls, seconds: float, clock: Clock) -> Deadline:
        return cls(clock.monotonic() + seconds, clock)

    @property
    def left(self) -> float:
        return max(0.0, self.at - self.clock.monotonic())

    @property
    def passed(self) -> bool:
        return self.clock.monotonic() >= self.at
