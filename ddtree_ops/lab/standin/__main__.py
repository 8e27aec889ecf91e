"""The stand-in's life: parse, load, warm up, serve, drain. Log lines are SGLang's, so that phases read alike."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from typing import NoReturn

from . import NOTICE, faults, flags, processes, settings
from .decoding import Engine
from .server import State, serve


def log(text: str) -> None:
    sys.stdout.write(time.strftime("[%Y-%m-%d %H:%M:%S] ") + text + "\n")
    sys.stdout.flush()


def die(text: str, status: int = 1) -> NoReturn:
    log(text)
    os._exit(status)


def main(argv: list[str]) -> int:
    sglang = flags.package_dir("sglang")
    if sglang is None:
        sys.stderr.write("ModuleNotFoundError: No module named 'sglang'\n")
        return 1
    args = flags.build_parser(sglang, flags.package_dir("sglang_ddtree")).parse_args(flags.with_config(argv))
    log(NOTICE)
    wrong = faults.read(faults.variables({**faults.from_file(), **os.environ}), settings.asked(args))
    try:
        resolved = settings.resolve(args, wrong)
    except settings.Refusal as refusal:
        die(f"Traceback (most recent call last):\n{refusal}")
    log(f"server_args=ServerArgs(model_path={args.model_path!r}, mode={resolved.mode!r}, port={args.port})")
    for line in settings.warnings(args, resolved):
        log("WARNING: " + line)
    if resolved.ddtree is not None:
        log(f"DDTREE settings: {resolved.ddtree}")
    gpus = processes.visible_gpus()
    if wrong.stray_child:  # before the scheduler is there: the stray must not hold the pipe that ends it
        processes.leave_stray(gpus)
    processes.fork_scheduler(gpus)
    load(resolved, wrong)
    paths = ("/ready",) if has_route(sglang, "/ready") else ()
    state = State(Engine(resolved, wrong), version_of(sglang), [sys.executable, "-m", "ddtree_standin", *argv], paths)
    try:
        server = serve(args.host, args.port, state)
    except OSError as error:
        why = (error.strerror or "").lower()
        where = f"('{args.host}', {args.port})"
        die(f"ERROR:    [Errno {error.errno}] error while attempting to bind on address {where}: {why}")
    log(f"INFO:     Uvicorn running on http://{args.host}:{args.port} (Press CTRL+C to quit)")
    life = threading.Thread(target=live, args=(state, wrong), daemon=True)
    stopping = told_to_stop()
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    life.start()
    os.read(stopping, 1)
    drain(state, wrong)
    return 0


def told_to_stop() -> int:
    """A pipe that can be read from once SIGTERM or SIGINT came.

    The interpreter writes into it as the signal comes. An Event set by a handler in Python may wait for ever for the
    lock that the main thread holds as it begins to wait.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    return reading


def load(resolved: settings.Settings, wrong: faults.Faults) -> None:
    """The loading phase; faults of it end here or never."""
    log("Init torch distributed begin.")
    log("Init torch distributed ends. elapsed=0.00 s, mem usage=0.00 GB")
    log("Load weight begin. avail mem=94.10 GB")
    if wrong.hang_loading:
        signal.pause()
    time.sleep(wrong.load_s * 0.6)
    if wrong.crash_at_start:
        die(
            "Scheduler hit an exception: Traceback (most recent call last):\n"
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.25 GiB. GPU 0 has a total capacity of "
            "94.97 GiB of which 811.00 MiB is free. (stand-in fault CRASH_AT_START)"
        )
    name = (resolved.model.get("architectures") or ["Model"])[0]
    log(f"Load weight end. elapsed={wrong.load_s * 0.6:.2f} s, type={name}, avail mem=42.31 GB, mem usage=51.79 GB.")
    log("KV Cache is allocated. dtype: torch.bfloat16, #tokens: 262144, K size: 8.00 GB, V size: 8.00 GB")
    log("Memory pool end. avail mem=11.02 GB")
    what = "target verify" if resolved.block_size else "target decode"
    log(
        f"Capture {what} CUDA graph begin. backend=full, num_tokens_per_req={max(resolved.rows, 1)}, "
        "bs=[1, 2, 4, 8], avail mem=11.02 GB"
    )
    time.sleep(wrong.load_s * 0.4)
    log(f"Capture {what} CUDA graph end. elapsed={wrong.load_s * 0.4:.2f} s, mem usage=0.61 GB, avail mem=10.41 GB.")
    log("max_total_num_tokens=262144, chunked_prefill_size=8192, max_prefill_tokens=16384, max_running_requests={}, "
        "context_len=262144, available_gpu_mem=10.41 GB".format(resolved.args.get("max_running_requests")))  # fmt: skip


def live(state: State, wrong: faults.Faults) -> None:
    """From the open port to healthy, and to the fault that ends it."""
    time.sleep(wrong.warm_s)
    if state.life == "starting":
        state.life = "up"
        log("The server is fired up and ready to roll!")
    if wrong.crash_after_s is not None:
        time.sleep(wrong.crash_after_s)
        die("SIGQUIT received. signum=3, frame=None. It usually means one child failed. (stand-in fault CRASH_AFTER_S)")


def drain(state: State, wrong: faults.Faults) -> None:
    """After SIGTERM: no longer healthy, wait for the running requests, then end."""
    state.life = "draining"
    log("SIGTERM received. signum=15 frame=None. Draining requests and shutting down...")
    until = time.monotonic() + wrong.slow_stop_s
    while True:
        remaining = list(state.engine.running)
        log(
            f"Gracefully exiting... Remaining number of requests {len(remaining)}. "
            f"Remaining requests remaining_rids={remaining}."
        )
        if not remaining and time.monotonic() >= until:
            return
        time.sleep(wrong.drain_s)


def version_of(sglang: str) -> str:
    """The version that the sources on the path say they are."""
    for name in ("_version.py", "version.py"):
        path = os.path.join(sglang, name)
        if os.path.exists(path):
            with open(path) as source:
                for line in source:
                    words = line.replace("__version__ = version = ", "__version__ = ").split(" = ")
                    if words[0] == "__version__" and words[-1].strip().strip("'\"").startswith("0."):
                        return words[-1].strip().strip("'\"")
    return "unknown"


def has_route(sglang: str, path: str) -> bool:
    """Whether these sources' HTTP server answers a path."""
    file = os.path.join(sglang, "srt", "entrypoints", "http_server.py")
    if not os.path.exists(file):
        return False
    with open(file, encoding="utf-8") as source:
        return f'@app.get("{path}"' in source.read()


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(status)
