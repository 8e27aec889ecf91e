"""What systemd says about one unit: ``systemctl show`` read into a ``UnitState``, and told apart in plain words."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Condition(StrEnum):
    """What the unit is doing, as a person would say it."""

    ABSENT = "absent"
    DOWN = "down"
    ACTIVATING = "activating"
    RESTARTING = "restarting"
    ACTIVE = "active"
    STOPPING = "stopping"
    FAILED = "failed"


@dataclass(frozen=True)
class UnitState:
    """One unit as systemd has it loaded."""

    load: str = "not-found"
    active: str = "inactive"
    sub: str = "dead"
    file_state: str = ""
    result: str = ""
    main_pid: int = 0
    restarts: int = 0
    exit_code: int = 0
    exit_status: int = 0
    invocation: str = ""
    needs_reload: bool = False
    fragment: str = ""
    drop_ins: tuple[str, ...] = ()
    cgroup: str = ""
    since: str = ""

    @property
    def condition(self) -> Condition:
        """``auto-restart`` reads as activating in ``is-active``; it is a crash loop, and is told apart here."""
        if self.active == "failed":
            return Condition.FAILED
        if self.active in ("active", "reloading", "refreshing"):
            return Condition.ACTIVE
        if self.active == "activating":
            return Condition.RESTARTING if self.sub.startswith("auto-restart") else Condition.ACTIVATING
        if self.active == "deactivating":
            return Condition.STOPPING
        return Condition.ABSENT if self.load in ("not-found", "") else Condition.DOWN

    @property
    def why_ended(self) -> str:
        """How the main process ended, in words; empty if it has not."""
        if self.result in ("", "success"):
            return ""
        named = {
            "exit-code": f"the process exited with status {self.exit_status}{_EXIT_NAMES.get(self.exit_status, '')}",
            "signal": f"the process was killed by signal {self.exit_status}",
            "core-dump": f"the process dumped core on signal {self.exit_status}",
            "timeout": "systemd gave up waiting for it",
            "oom-kill": "the kernel killed it for memory",
            "watchdog": "it missed its watchdog",
            "start-limit-hit": "it was restarted too often and systemd stopped trying",
            "resources": "systemd could not set up its resources",
            "protocol": "it broke the start protocol",
        }
        return named.get(self.result, f"systemd says {self.result}")


# systemd's own exit statuses that a deploy meets (systemd.exec(5), "Process Exit Codes").
_EXIT_NAMES = {
    200: " (CHDIR: its working directory is missing)",
    203: " (EXEC: the program could not be run)",
    217: " (USER: its user does not exist)",
    226: " (NAMESPACE: its mount namespace could not be set up)",
    239: " (CACHE_DIRECTORY: its cache directory could not be made)",
    243: " (CREDENTIALS: a credential could not be read)",
}


def parse_show(text: str) -> UnitState:
    """Read ``systemctl show -p ... UNIT``: KEY=VALUE lines, any order, absent keys at their defaults."""
    values = dict(line.partition("=")[::2] for line in text.splitlines() if "=" in line)

    def number(key: str) -> int:
        value = values.get(key, "")
        return int(value) if value.isdigit() else 0

    return UnitState(
        load=values.get("LoadState", "not-found"),
        active=values.get("ActiveState", "inactive"),
        sub=values.get("SubState", "dead"),
        file_state=values.get("UnitFileState", ""),
        result=values.get("Result", ""),
        main_pid=number("MainPID"),
        restarts=number("NRestarts"),
        exit_code=number("ExecMainCode"),
        exit_status=number("ExecMainStatus"),
        invocation=values.get("InvocationID", ""),
        needs_reload=values.get("NeedDaemonReload", "no") == "yes",
        fragment=values.get("FragmentPath", ""),
        drop_ins=tuple(values.get("DropInPaths", "").split()),
        cgroup=values.get("ControlGroup", ""),
        since=values.get("StateChangeTimestamp", ""),
    )
