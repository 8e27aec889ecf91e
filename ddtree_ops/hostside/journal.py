"""The journal of an instance's unit, as plain records."""

from __future__ import annotations

import json
import select
import subprocess
from typing import Any

from .context import Context, Op

MOST = 1 << 14  # characters of a message; without --all journalctl leaves out those above 4096 bytes altogether
FIELDS = "MESSAGE,PRIORITY,_PID,SYSLOG_IDENTIFIER,INVOCATION_ID,_SYSTEMD_INVOCATION_ID"


def entries(
    ctx: Context, instance: str, *, last: int = 200, cursor: str | None = None, since: float | None = None,
    invocation: str | None = None,
) -> dict[str, Any]:  # fmt: skip
    """{lines: [{at, message, pid, priority, invocation}], cursor, error}: after ``cursor``, else the ``last`` ones."""
    flags = ["-u", ctx.unit(instance), "-o", "json", "--output-fields=" + FIELDS, "--all", "--no-pager", "-q"]
    if cursor:
        flags.append("--after-cursor=" + cursor)
    if since is not None:
        flags.append(f"--since=@{int(since)}")
    ran = ctx.run("journalctl", *flags, "-n", str(last), timeout_s=20.0)
    found = [entry for entry in map(parse, ran.out.split("\n")) if entry is not None]
    lines = [f for f in found if invocation is None or f["invocation"] in (None, invocation)]
    newest = found[-1]["cursor"] if found else cursor
    for line in lines:
        del line["cursor"]
    return {"lines": lines, "cursor": newest, "error": ran.err.strip() if ran.rc != 0 else ""}


def parse(line: str) -> dict[str, Any] | None:
    """One entry; None for what is none, such as the piece of a line that a journalctl which was ended left."""
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    if not isinstance(entry, dict):
        return None
    return {
        "at": number(entry.get("__REALTIME_TIMESTAMP"), 0) / 1e6,
        "message": text(entry.get("MESSAGE"))[:MOST],
        "pid": number(entry.get("_PID"), 0),
        "priority": number(entry.get("PRIORITY"), 6),
        "invocation": entry.get("INVOCATION_ID") or entry.get("_SYSTEMD_INVOCATION_ID"),
        "cursor": entry.get("__CURSOR"),
    }


def text(value: Any) -> str:
    """A field's text: journalctl gives bytes that are not UTF-8 as a list of numbers, a field given twice as a list."""
    if not isinstance(value, list):
        return "" if value is None else str(value)
    if all(isinstance(each, int) for each in value):
        return bytes(value).decode("utf-8", "replace")
    return "\n".join(map(text, value))


def number(value: Any, default: int) -> int:
    """A field's number; programs may log what they like."""
    try:
        return int(text(value).split("\n")[0])
    except ValueError:
        return default


def logs(ctx: Context, args: dict[str, Any]) -> dict[str, Any]:
    """{instance, last?, since?, follow?} -> {lines}; with ``follow`` each line is a progress event until the end."""
    instance = args["instance"]
    if not args.get("follow"):
        return entries(ctx, instance, last=int(args.get("last", 100)), since=args.get("since"))
    flags = ["-u", ctx.unit(instance), "-o", "json", "--output-fields=" + FIELDS, "--all", "--no-pager", "-q", "-f"]
    argv = ctx.command("journalctl", *flags, "-n", str(args.get("last", 10)))
    seen: list[int] = [0]
    child = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        assert child.stdout is not None
        buffered = b""
        while child.poll() is None:
            ready, _, _ = select.select([child.stdout], [], [], 5.0)
            if not ready:
                # Also how a client that went away is noticed: the line cannot be written.
                ctx.emit({"event": "progress", "alive": True}, must_arrive=True)
                continue
            block = child.stdout.read1(1 << 16)  # type: ignore[attr-defined]
            if not block:
                break
            *whole, buffered = (buffered + block).split(b"\n")
            for line in whole:
                entry = parse(line.decode("utf-8", "replace"))
                if entry is not None:
                    seen[0] += 1
                    ctx.emit({"event": "progress", "line": entry}, must_arrive=True)
    finally:
        child.kill()
        child.wait()
    return {"lines": [], "seen": seen[0]}


OPS: dict[str, Op] = {"logs": logs}
