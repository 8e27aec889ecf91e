"""Stopping a server that people use: new requests stop coming, running ones finish up to a limit, then it ends.

With a router in front the instance is taken out there first and put back when it is proven; without one, SIGTERM's
own drain does it. Stopped means: no process of the unit is left and the memory of its GPUs is free. What the limit cut
off is counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ddtree_ops.clock import Deadline
from ddtree_ops.errors import DdtreeError, NotRolledBackError
from ddtree_ops.events import Kind
from ddtree_ops.facts.host import GpuUser, parse_facts
from ddtree_ops.facts.unit import Condition
from ddtree_ops.health import Before, Observation
from ddtree_ops.model import Settings
from ddtree_ops.plan import StepName
from ddtree_ops.router import Router
from ddtree_ops.steps import Work, systemctl, waiting

IDLE_LOOKS = 3
KILL_S = 30.0  # from SIGKILL to an empty unit
GPU_FREE_S = 20.0
PAUSE_S = 0.3
ENDED = (Condition.DOWN, Condition.ABSENT, Condition.FAILED)


@dataclass
class Drain:
    """Drains one instance; remembers what it did, so that it can be undone."""

    work: Work
    router: Router | None = None
    stopped: bool = False

    @property
    def settings(self) -> Settings:
        """Of the server that is stopped."""
        return self.work.there.settings or self.work.release.settings

    def do(self) -> str:
        """Out of the router, idle, stopped, GPUs free."""
        notes = []
        limit = Deadline.after(float(self.settings.drain_timeout_s), self.work.clock)
        if self.router is not None:
            notes.append(self.router.take_out())
            self._until_idle(limit)
        self.stopped = True
        cut = self.stop(limit)
        self._until_free()
        if self.router is not None and self.router.was_in:
            self.router.gone()
        self.work.cut_off = cut
        lost = f"{cut} request{'' if cut == 1 else 's'} cut off after {self.settings.drain_timeout_s} s"
        notes.append(lost if cut else "no request was cut off")
        if cut:
            self.work.note(lost)
        return "; ".join(notes)

    def undo(self) -> str:
        """The release that is current serves again, and requests reach it again."""
        work, note, back = self.work, "", self.work.plan.back or ""
        there = work.there.releases.get(back)
        ended = self.stopped and work.was_up and self._look().unit.condition in ENDED
        if ended and there is not None and there.settings is not None:
            systemctl(work, "start")
            self._wait(there.settings, back)
            note = "started again"
        if self.router is not None and self.router.was_in:
            note = self.router.put_in()
        return note

    def put_in(self) -> str:
        return self.router.put_in() if self.router is not None else ""

    def take_out(self) -> str:
        return self.router.take_out() if self.router is not None else ""

    # -- parts

    def _look(self) -> Observation:
        return self.work.probe(self.settings).observe(0.0, ("/metrics",))

    def _until_idle(self, limit: Deadline) -> None:
        """The worker itself says that nothing runs, several times: a router's counters do not tell."""
        idle = 0
        while idle < IDLE_LOOKS and not limit.passed:
            self.work.alive()
            busy = busy_of(self._look())
            idle = idle + 1 if not busy else 0
            self.work.tell(Kind.PROGRESS, StepName.DRAIN, f"{busy or 0} requests run", limit.left)
            self.work.clock.sleep(PAUSE_S)

    def stop(self, limit: Deadline) -> int:
        """SIGTERM, and SIGKILL at the limit; how many requests that cut off."""
        systemctl(self.work, "stop")
        seen, running, cut = self._look(), 0, 0
        killed: Deadline | None = None
        while seen.unit.condition not in ENDED or seen.processes:
            self.work.alive()
            busy = busy_of(seen)
            running = running if busy is None else busy  # a server that ends no longer answers: the last word counts
            self.work.tell(Kind.PROGRESS, StepName.DRAIN, f"{running} requests run", limit.left)
            if limit.passed and killed is None:
                killed, cut = Deadline.after(KILL_S, self.work.clock), running
                systemctl(self.work, "kill")
            if killed is not None and killed.passed:
                raise self._left([f"{name} (pid {pid})" for pid, name in seen.processes])
            self.work.clock.sleep(PAUSE_S)
            seen = self._look()
        return cut

    def _left(self, names: Sequence[str]) -> DdtreeError:
        return DdtreeError(
            f"{', '.join(names) or 'the unit'} did not end, not even by SIGKILL",
            host=self.work.target,
            why="a process that hangs in the kernel holds its GPU until the host is rebooted",
            next=f"ddtree-ops doctor {self.work.host.name}",
        )

    def _until_free(self) -> None:
        """The GPUs' memory comes back a little after the process is gone; who still holds some is named."""
        deadline = Deadline.after(GPU_FREE_S, self.work.clock)
        while holders := self._holders():
            if deadline.passed:
                names = ", ".join(f"{user.command or 'a process'} (pid {user.pid})" for user in holders)
                raise DdtreeError(
                    f"the server ended, but its GPU still holds memory of {names}",
                    host=self.work.target,
                    why="the next server would not fit beside it",
                    next=f"ddtree-ops doctor {self.work.host.name}",
                )
            self.work.alive()
            self.work.clock.sleep(PAUSE_S)

    def _holders(self) -> list[GpuUser]:
        answer = self.work.helper.call("facts", {"instances": [self.work.instance]}, deadline_s=60.0)
        gpus = parse_facts(self.work.host.name, answer).gpus or ()
        return [user for gpu in gpus if gpu.index in self.settings.gpus for user in gpu.users]

    def _wait(self, settings: Settings, release: str) -> None:
        try:
            wait = waiting(self.work, settings, release, self.work.keep)
            wait.until_healthy(float(settings.start_timeout_s), Before(self.work.there.unit.invocation))
        except DdtreeError as failure:
            raise NotRolledBackError(
                f"the server was stopped and does not come up again: {failure.found}", host=self.work.target
            ) from failure


def busy_of(seen: Observation) -> int | None:
    """How many requests run or wait; None if the server does not say (any more)."""
    if seen.served is None or seen.served.running is None:
        return None
    return seen.served.running + (seen.served.queued or 0)
