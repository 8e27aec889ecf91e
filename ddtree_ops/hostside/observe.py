"""How an instance is doing right now: systemd, processes, port, HTTP, journal; and one real completion.

Everything is returned as it was found; what it means is decided on the operator's side, by pure functions.
"""

from __future__ import annotations

import http.client
import json
import time
from typing import Any

from . import journal, procs, state, units
from .context import Context, Op

MAX_BODY = 1 << 20


def observe(ctx: Context, args: dict[str, Any]) -> dict[str, Any]:
    """{instance, port, bind?, paths?, cursor?, last?, headers?, timeout_s?, watch_s?, every_s?} -> one observation.

    With ``watch_s`` it looks again every ``every_s`` and ends early once the first of ``paths`` answers 200 or 404, or
    the unit is failed; each look is a progress event ``{"observation": ...}``: one round trip for a whole start.
    """
    end = time.monotonic() + float(args.get("watch_s", 0))
    cursor = args.get("cursor")
    while True:
        seen = look(ctx, args, cursor)
        cursor = seen["journal"]["cursor"]
        first = (seen["http"] or [{}])[0]
        # 404: the server has no such path, and looking again will not change that
        over = first.get("status") in (200, 404) or "ActiveState=failed" in seen["show"]
        if over or time.monotonic() >= end:
            return seen
        ctx.emit({"event": "progress", "observation": seen}, must_arrive=True)
        time.sleep(min(float(args.get("every_s", 1.0)), max(0.0, end - time.monotonic())))


def look(ctx: Context, args: dict[str, Any], cursor: str | None) -> dict[str, Any]:
    instance, port = args["instance"], int(args["port"])
    show = units.show(ctx, instance)
    processes = procs.of_unit(ctx.unit(instance), units.parsed(show).get("ControlGroup", ""))
    timeout = float(args.get("timeout_s", 5.0))
    paths = args.get("paths", ["/ready"])
    listening = procs.listeners({port}, [process["pid"] for process in processes])
    return {
        "at": time.time(),
        "current": state.current(ctx, instance),
        "show": show,
        "processes": processes,
        "listeners": listening,
        "http": [ask(args, "GET", path, timeout) for path in paths] if listening else [],
        "journal": journal.entries(ctx, instance, last=int(args.get("last", 200)), cursor=cursor),
    }


def complete(_ctx: Context, args: dict[str, Any]) -> dict[str, Any]:
    """{port, bind?, path, body, headers?, timeout_s?} -> {status, body, ms} or {error, ms}: one real request."""
    return ask(args, "POST", args.get("path", "/generate"), float(args.get("timeout_s", 60.0)), args["body"])


def ask(args: dict[str, Any], method: str, path: str, timeout_s: float, body: Any = None) -> dict[str, Any]:
    """One HTTP request to the instance, from the host itself."""
    began = time.monotonic()
    answer: dict[str, Any] = {"path": path}
    connection = connect(args, timeout_s)
    headers = dict(args.get("headers") or {})
    try:
        data = None
        if body is not None:
            data = json.dumps(body).encode()
            headers["Content-Type"] = "application/json"
        connection.request(method, path, body=data, headers=headers)
        response = connection.getresponse()
        answer.update(status=response.status, body=response.read(MAX_BODY).decode("utf-8", "replace"))
    except (OSError, http.client.HTTPException) as error:
        answer["error"] = f"{type(error).__name__}: {error}"
    finally:
        connection.close()
    answer["ms"] = round((time.monotonic() - began) * 1000, 1)
    return answer


def connect(args: dict[str, Any], timeout_s: float) -> http.client.HTTPConnection:
    """A connection to the instance (made with the first request): to the address that it binds."""
    bind = args.get("bind") or "127.0.0.1"
    address = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(bind, bind)
    return http.client.HTTPConnection(address, int(args["port"]), timeout=timeout_s)


OPS: dict[str, Op] = {"observe": observe, "complete": complete}
