"""Read one request, run its operation, answer in JSON lines."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import sys
from typing import Any, NoReturn

from . import files, lock
from .context import Context, Failure, Op

# Which module holds an operation, and whether it changes the host (then the caller must hold the lock). Modules are
# imported by need: most of the time of a call is Python reading source out of the zip.
OPERATIONS: dict[str, tuple[str, bool]] = {
    "facts": ("facts", False),
    "doctor": ("doctor", False),
    "lock": ("lock", False),
    "unlock": ("lock", False),
    "renew": ("lock", False),
    "missing": ("staging", False),
    "stage_release": ("staging", True),
    "bootstrap_facts": ("bootstrap", False),
    "stage_wheels": ("bootstrap", True),
    "bootstrap": ("bootstrap", True),
    "engine_missing": ("engine", False),
    "stage_engine": ("engine", True),
    "switch": ("switch", True),
    "write_unit": ("switch", True),
    "systemctl": ("units", True),
    "observe": ("observe", False),
    "complete": ("observe", False),
    "record": ("state", True),
    "history": ("state", False),
    "take_back": ("take_back", True),
    "arm": ("deadman", True),
    "confirm": ("deadman", True),
    "disarm": ("deadman", True),
    "expire": ("deadman", False),
    "at_boot": ("deadman", False),
    "drift": ("drift", False),
    "evidence": ("evidence", False),
    "prune": ("prune", True),
    "logs": ("journal", False),
    "load": ("load", False),
    "baseline": ("load", False),
    "keep_baseline": ("load", True),
    "put_secrets": ("secrets", True),
}
# These wait for a payload that may never come, so they do not keep others out while they do; see ``lock.alone``.
RECEIVING = ("stage_release", "stage_engine", "stage_wheels", "put_secrets")


class Deadline(BaseException):
    """The alarm: not an Exception, so that nothing on the way mistakes it for a failed step."""


def ring(_signal: int, _frame: Any) -> NoReturn:
    raise Deadline


def main() -> int:
    os.umask(0o022)  # a hardened host's 077 would keep the server's user out of its engine; secrets have modes
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints must not end up among the answers
    answers.write(b"\n")  # nor a greeting of the login shell that does not end its line
    request: dict[str, Any] = {}
    error: Failure | None = None
    try:
        # A timer gives the request as a file, the operator's side on standard input.
        source = open(sys.argv[1], "rb") if len(sys.argv) > 1 else sys.stdin.buffer  # noqa: SIM115
        request = json.loads((source.read() if len(sys.argv) > 1 else source.readline()).decode("utf-8"))
        ctx = Context(request, source, answers)
    except (ValueError, KeyError, TypeError) as bad:
        answers.write(json.dumps(failed(Failure("HelperError", f"the request is not JSON: {bad}"), "")).encode())
        answers.write(b"\n")
        return 1
    seconds = float(request.get("deadline_s") or 600.0)
    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        value = on_full_disk(ctx, request, seconds)
        signal.setitimer(signal.ITIMER_REAL, 0)
    except Failure as failure:
        error = failure
    except Deadline:
        error = Failure("DeadlineError", "{} took longer than {:.0f} s".format(request.get("op"), seconds))
    except OSError as oserror:
        known = files.explain(oserror)
        error = Failure("RefusedError", **known) if known else bug(oserror)
    except Exception as unexpected:  # noqa: BLE001  the boundary: a bug becomes an answer with its traceback
        error = bug(unexpected)
    if error is not None:
        ctx.emit(failed(error, ctx.host))
        return 1
    ctx.emit({"event": "result", "ok": True, "value": value})
    return 0


def dispatch(ctx: Context, request: dict[str, Any], seconds: float) -> dict[str, Any]:
    op = request.get("op", "")
    if op not in OPERATIONS:
        raise Failure("HelperError", f"this helper knows no operation {op!r}")
    module, changes = OPERATIONS[op]
    package = __name__.rpartition(".")[0]
    ops: dict[str, Op]
    ops = importlib.import_module(f"{package}.{module}").OPS
    with lock.alone(ctx) if changes and op not in RECEIVING else contextlib.nullcontext():
        if changes or (ctx.lock and module != "lock"):
            # The lease outlives the operation, so nobody can take the lock over while it runs; looking also renews it.
            lock.require(ctx, ctx.lock, max(lock.LEASE_S, seconds + 10.0))
        return ops[op](ctx, request.get("args") or {})


def on_full_disk(ctx: Context, request: dict[str, Any], seconds: float) -> dict[str, Any]:
    """The operation; on a full disk once more with the space that was kept for that. All may be asked for twice."""
    try:
        return dispatch(ctx, request, seconds)
    except OSError as error:
        if error.errno not in files.FULL or request.get("op") in RECEIVING or not files.use_reserve(ctx.root):
            raise
        return dispatch(ctx, request, seconds)


def bug(error: Exception) -> Failure:
    import traceback  # rarely needed, and slow to import

    trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return Failure("HelperError", f"{type(error).__name__}: {error}", traceback=trace)


def failed(error: Failure, host: str) -> dict[str, Any]:
    said = {"kind": error.kind, "found": error.found, "why": error.why, "data": error.data}
    return {"event": "result", "ok": False, "error": dict(said, next=error.next.replace("{host}", host))}


if __name__ == "__main__":
    sys.exit(main())
