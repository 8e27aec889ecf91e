"""Start the CPU engine with SGLang's command line: `python -m sglang_ddtree.cpu.server --model-path DIR ...`.

The life of the server, with SGLang's log lines so that whoever watches one can watch the other. Set
DDTREE_CPU_DTYPE=float64 to decode in double precision; float32 otherwise.
"""

from __future__ import annotations

import os

# Read when NumPy is first imported. A request's matrices are small: more threads wait for each other than help.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from tokenizers import Tokenizer

from sglang_ddtree.cpu import NOTICE, args
from sglang_ddtree.cpu.decode import Pair
from sglang_ddtree.cpu.http import Server, State, serve
from sglang_ddtree.cpu.serving import Engine

DTYPES: dict[str, type[np.floating[Any]]] = {"float32": np.float32, "float64": np.float64}
DRAIN_S = 0.2


def log(text: str) -> None:
    print(time.strftime("[%Y-%m-%d %H:%M:%S] ") + text, flush=True)


def die(text: str) -> NoReturn:
    log(text)
    sys.stdout.flush()
    os._exit(1)


def load(launch: args.Launch) -> Engine:
    """Weights and tokenizer; SGLang's phases in the log."""
    dtype = DTYPES[os.environ.get("DDTREE_CPU_DTYPE", "float32")]
    log("Load weight begin. avail mem=0.00 GB")
    began = time.monotonic()
    pair = Pair(launch.target, launch.drafter, dtype=dtype)
    took = time.monotonic() - began
    name = (launch.model.get("architectures") or ["Model"])[0]
    log(f"Load weight end. elapsed={took:.2f} s, type={name}, avail mem=0.00 GB, mem usage=0.00 GB.")
    tokenizer = Tokenizer.from_file(str(Path(launch.args["tokenizer_path"]) / "tokenizer.json"))
    engine = Engine(launch, pair, tokenizer)
    engine.load_s = took
    return engine


def drain(state: State) -> None:
    """After SIGTERM: no longer healthy, wait for the running requests, then end."""
    state.life = "draining"
    log("SIGTERM received. signum=15 frame=None. Draining requests and shutting down...")
    while True:
        left = list(state.engine.running)
        log(
            f"Gracefully exiting... Remaining number of requests {len(left)}. Remaining requests remaining_rids={left}."
        )
        if not left:
            return
        time.sleep(DRAIN_S)


def listen(state: State) -> Server:
    host, port = str(state.args["host"]), int(state.args["port"])
    try:
        return serve(host, port, state)
    except OSError as error:
        why = (error.strerror or "").lower()
        die(f"ERROR:    [Errno {error.errno}] error while attempting to bind on address ('{host}', {port}): {why}")


def main(argv: list[str]) -> int:
    try:
        launch = args.resolve(argv)
        log(NOTICE)
        log(f"server_args=ServerArgs(model_path={launch.args['model_path']!r}, mode={launch.mode.name!r})")
        if launch.ddtree is not None:
            log(f"DDTREE settings: {launch.ddtree}")
        if launch.unused:
            log("Without effect on a CPU: " + ", ".join("--" + name.replace("_", "-") for name in launch.unused))
        engine = load(launch)
    except (args.Refusal, OSError, ValueError, KeyError) as error:
        die(f"Traceback (most recent call last):\n{type(error).__name__}: {error}")
    state = State(engine, [sys.executable, "-m", "sglang_ddtree.cpu.server", *argv])
    server = listen(state)
    log(f"INFO:     Uvicorn running on http://{state.args['host']}:{server.server_port} (Press CTRL+C to quit)")
    # A pipe that the interpreter itself writes into at a signal. An Event set by a handler may wait for ever for the
    # lock that this thread holds as it begins to wait.
    stopping, written = os.pipe()
    os.set_blocking(written, False)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(written, warn_on_full_buffer=False)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    state.life = "up"
    log("The server is fired up and ready to roll!")
    os.read(stopping, 1)
    drain(state)
    server.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
