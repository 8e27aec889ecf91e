"""Put a load on an instance from the host itself, and keep what was measured there: the gates' measurements.

Measured here because a link to the operator's machine would be measured with it.
"""

from __future__ import annotations

import http.client
import json
import os
import queue
import threading
import time
from typing import Any

from . import files, observe
from .context import Context, Failure, Op, checked_digest

MAX_REPLY = 16 << 20


def load(ctx: Context, args: dict[str, Any]) -> dict[str, Any]:
    """{port, bind?, headers?, path, bodies, rounds?, concurrency, warmup?, timeout_s?} -> {wall_s, replies, ...}.

    Each body is posted ``rounds`` times by ``concurrency`` clients that never wait; ``warmup`` requests go before and
    do not count. A reply is {body, round, seconds, tokens, accept_length, gaps?} or {body, round, seconds, error}.
    """
    bodies, concurrency = args["bodies"], int(args["concurrency"])
    warmup = [(i % len(bodies), 0) for i in range(int(args.get("warmup", 0)))]
    run(ctx, args, warmup, concurrency)
    work = [(index, turn) for turn in range(int(args.get("rounds", 1))) for index in range(len(bodies))]
    began = time.monotonic()
    replies = run(ctx, args, work, concurrency)
    wall_s = time.monotonic() - began
    replies.sort(key=lambda reply: (reply["round"], reply["body"]))
    return {"concurrency": concurrency, "wall_s": wall_s, "replies": replies}


def run(ctx: Context, args: dict[str, Any], work: list[tuple[int, int]], concurrency: int) -> list[dict[str, Any]]:
    """Post every piece of work, ``concurrency`` at a time; ends early when a client finds the server gone."""
    waiting: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
    for piece in work:
        waiting.put(piece)
    replies: list[dict[str, Any]] = []
    count = min(concurrency, len(work))
    threads = [threading.Thread(target=client, args=(args, waiting, replies), daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive():
            thread.join(1.0)
            ctx.emit({"event": "progress", "done": len(replies), "of": len(work)}, must_arrive=True)
    return replies


def client(args: dict[str, Any], waiting: queue.SimpleQueue[tuple[int, int]], replies: list[dict[str, Any]]) -> None:
    """One client: takes work until there is none, on one connection."""
    connection = observe.connect(args, float(args.get("timeout_s", 300.0)))
    try:
        while True:
            try:
                body, turn = waiting.get_nowait()
            except queue.Empty:
                return
            began = time.monotonic()
            reply = post(connection, args, args["bodies"][body])
            reply.update(body=body, round=turn, seconds=time.monotonic() - began)
            replies.append(reply)
    finally:
        connection.close()


def post(connection: http.client.HTTPConnection, args: dict[str, Any], body: Any) -> dict[str, Any]:
    headers = dict(args.get("headers") or {}, **{"Content-Type": "application/json"})
    try:
        connection.request("POST", args["path"], body=json.dumps(body).encode(), headers=headers)
        response = connection.getresponse()
        text = response.read(MAX_REPLY).decode("utf-8", "replace")
        if response.status != 200:
            return {"error": f"HTTP {response.status}: {text[:200]}"}
        return read(json.loads(text))
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError, IndexError) as error:
        connection.close()  # the next request opens it again
        return {"error": f"{type(error).__name__}: {error}"}


def read(answer: dict[str, Any]) -> dict[str, Any]:
    """What a measurement needs of one ``/generate`` answer."""
    meta = answer["meta_info"]
    reply = {"tokens": answer["output_ids"], "accept_length": meta.get("spec_accept_length")}
    tops = meta.get("output_top_logprobs")
    if tops:
        reply["gaps"] = [round(best[0] - second[0], 4) for best, second in (top[:2] for top in tops)]
    return reply


def baseline(ctx: Context, args: dict[str, Any]) -> dict[str, Any]:
    """{key} -> {value}: a measurement that was kept on this host, or None."""
    return {"value": files.read_json(place(ctx, args["key"]))}


def keep_baseline(ctx: Context, args: dict[str, Any]) -> dict[str, Any]:
    """{key, value} -> {path}: keep a measurement for later releases to be compared with."""
    path = place(ctx, args["key"])
    if not isinstance(args["value"], dict):
        raise Failure("HelperError", "a measurement must be an object")
    files.make_dirs(os.path.dirname(path))
    files.write_json(path, args["value"])
    return {"path": path}


def place(ctx: Context, key: str) -> str:
    return ctx.path("baselines", checked_digest(key) + ".json")


OPS: dict[str, Op] = {"load": load, "baseline": baseline, "keep_baseline": keep_baseline}
