"""Start the servers of an arms file, wait until all are healthy, stop them whatever happens.

    launch = ["python3", "-m", "sglang.launch_server"]     # the command of every arm
    common = ["--model-path", "..."]                       # flags of every arm
    speculation = ["--speculative-algorithm", "DDTREE"]    # flags of every arm that speculates
    env = { CUDA_VISIBLE_DEVICES = "0" }                   # optional

    [[arm]]
    name = "tree-16"
    port = 31230
    speculation = ["--speculative-ddtree-mode", "tree", "--speculative-ddtree-budget", "16"]   # absent: plain decoding

All run at once, so their order can alternate. Where two do not fit on the GPU, start them by other means and use `run`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.engine.client import Client, ServerError
from benchmarks.engine.measure import Arm

START_S = 600.0


def require_free(port: int) -> None:
    """Else another server would answer in this arm's name."""
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", port)) == 0:
            raise SystemExit(f"port {port} is in use; stop what listens there")


def command(table: Mapping[str, Any], entry: Mapping[str, Any]) -> list[str]:
    argv = [*table["launch"], *table.get("common", []), "--port", str(entry["port"])]
    if "speculation" in entry:
        argv += [*table.get("speculation", []), *entry["speculation"]]
    return argv


@contextlib.contextmanager
def servers(file: Path, say: Callable[[str], None]) -> Iterator[list[Arm]]:
    table = tomllib.loads(file.read_text())
    running: list[subprocess.Popen[bytes]] = []
    arms: list[Arm] = []
    folder = tempfile.TemporaryDirectory(prefix="ddtree-bench-")
    logs = Path(folder.name)
    try:
        for entry in table["arm"]:
            require_free(int(entry["port"]))
            log = (logs / f"{entry['name']}.log").open("wb")
            argv = command(table, entry)
            environment = {**os.environ, **table.get("env", {})}
            # a session of its own: a killed launcher would leave its scheduler behind
            running.append(
                subprocess.Popen(argv, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True)
            )
            arms.append(Arm(entry["name"], f"http://127.0.0.1:{entry['port']}"))
        for arm, process in zip(arms, running, strict=True):
            wait(arm, process, logs)
            say(f"{arm.name} is up")
        yield arms
    finally:
        for process in running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        folder.cleanup()


def wait(arm: Arm, process: subprocess.Popen[bytes], logs: Path) -> None:
    until = time.monotonic() + START_S
    while time.monotonic() < until:
        if process.poll() is not None:
            break
        client = Client(arm.url, timeout_s=5)
        with contextlib.suppress(ServerError):
            client._send("GET", "/health", None).read()
            return
        client.close()
        time.sleep(0.5)
    tail = (logs / f"{arm.name}.log").read_text(errors="replace")[-2000:]
    raise SystemExit(f"arm {arm.name} did not become healthy:\n{tail}")
