"""Two instances behind a real router are restarted one after the other under clients that never pause."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from fleet import Cli, outcomes
from ports import reserved_port
from waiting import until

from ddtree_ops.lab.lab import Lab
from ddtree_ops.lab.machine import Machine

CLIENTS = 8
TOKENS = 96  # about a second of the stand-in


@dataclass
class Router:
    """The real thing, on this machine, in front of the lab's hosts."""

    port: int
    metrics: int
    process: subprocess.Popen[bytes]

    def get(self, path: str) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request("GET", path)
            reply = connection.getresponse()
            body = reply.read()
            return reply.status, json.loads(body) if body[:1] in b"[{" else body
        finally:
            connection.close()

    def healthy(self) -> int:
        return sum(bool(worker["is_healthy"]) for worker in self.get("/workers")[1]["workers"])


@pytest.fixture
def behind(
    lab: Lab, cli_for: Any, hosts: Callable[[int], list[Machine]], tmp_path: Path
) -> Iterator[tuple[Router, Cli]]:
    """Two hosts whose instances are deployed, a router that knows both, an inventory that knows the router."""
    pytest.importorskip("smg", reason="the router has no wheel for this machine")
    machines = hosts(2)
    claims = ExitStack()
    port, metrics = claims.enter_context(reserved_port()), claims.enter_context(reserved_port())
    text = lab.names.inventory.read_text().replace("[groups]", '[groups]\nboth = ["lab1", "lab2"]')
    text = text.replace("drain_timeout_s = 10", 'drain_timeout_s = 20\nbind = "0.0.0.0"')
    more = f'[defaults.instance.router]\nurl = "http://127.0.0.1:{port}"\nmetrics_url = "http://127.0.0.1:{metrics}/metrics"\n'
    inventory = tmp_path / "fleet.toml"
    inventory.write_text(text)
    cli: Cli = cli_for(inventory, tmp_path)
    cli("deploy", "both")  # not yet behind a router
    inventory.write_text(text.replace("[groups]", f"{more}\n[groups]"))
    urls = [f"http://{machine.address}:30000" for machine in machines]
    words = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-host", "127.0.0.1", "--prometheus-port"]
    words += [str(metrics), "--policy", "round_robin", "--disable-tokenizer-autoload"]
    words += ["--health-check-interval-secs", "1", "--worker-urls", *urls]
    smg = Path(sys.executable).with_name("smg")
    log = (tmp_path / "router.log").open("wb")
    process = subprocess.Popen([str(smg), "launch", *words], stdout=log, stderr=subprocess.STDOUT, cwd=tmp_path)
    router = Router(port, metrics, process)
    try:
        wait_for(lambda: router.get("/readiness")[0] == 200 and router.healthy() == 2, tmp_path / "router.log")
        yield router, cli
    finally:
        process.terminate()
        try:
            process.wait(60)
        finally:
            process.kill()
            process.wait()
            log.close()
            claims.close()


def wait_for(true: Callable[[], bool], log: Path, seconds: float = 240) -> None:
    end = time.monotonic() + seconds
    while True:
        try:
            if true():
                return
        except (OSError, http.client.HTTPException, ValueError):
            pass
        assert time.monotonic() < end, log.read_text(errors="replace")[-3000:]
        time.sleep(0.2)


@dataclass
class Clients:
    """Closed-loop clients; every other request is a stream. A stream that does not end with [DONE] was cut."""

    port: int
    done: int = 0
    streams: int = 0
    failed: list[str] = field(default_factory=list)
    stop: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self, number: int) -> None:
        turn = number
        while not self.stop.is_set():
            turn += 1
            stream = turn % 2 == 0
            try:
                wrong = self.ask(stream)
            except (OSError, http.client.HTTPException) as error:
                wrong = f"{type(error).__name__}: {error}"
            with self.lock:
                self.done += 1
                self.streams += stream
                if wrong:
                    self.failed.append(f"{'stream' if stream else 'plain'}: {wrong}")

    def ask(self, stream: bool) -> str:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        body = {"model": "qwen3.6-27b", "prompt": "hello", "max_tokens": TOKENS, "stream": stream}
        try:
            headers = {"Content-Type": "application/json"}
            connection.request("POST", "/v1/completions", json.dumps(body), headers)
            reply = connection.getresponse()
            text = reply.read().decode()
        finally:
            connection.close()
        if reply.status != 200:
            return f"HTTP {reply.status} {text[:200]}"
        if stream:
            return "" if "[DONE]" in text else f"cut: {text[-200:]}"
        return "" if json.loads(text)["usage"]["completion_tokens"] == TOKENS else text[:200]


def test_rolling_restart_loses_no_request_and_cuts_no_stream(behind: tuple[Router, Cli]) -> None:
    router, cli = behind
    clients = Clients(router.port)
    threads = [threading.Thread(target=clients.run, args=(number,)) for number in range(CLIENTS)]
    for thread in threads:
        thread.start()
    try:
        until(lambda: clients.done >= CLIENTS, "every client is at work")
        before = clients.done
        found = outcomes(cli, "deploy", "both", "--restart", "--parallel", "1")
        during = clients.done - before
        until(lambda: clients.done >= before + during + CLIENTS, "they go on")
    finally:
        clients.stop.set()
        for thread in threads:
            thread.join()
    assert {target: each["status"] for target, each in found.items()} == {
        "lab1:main": "deployed",
        "lab2:main": "deployed",
    }
    assert clients.failed == []
    assert during > CLIENTS  # also those that did not run already when it began
    assert clients.streams > CLIENTS
    assert router.healthy() == 2


def test_the_last_worker_is_not_taken_out(behind: tuple[Router, Cli], lab: Lab) -> None:
    router, cli = behind
    lab.machine("lab2").inside("systemctl", "stop", "sglang-ddtree-main")
    wait_for(lambda: router.healthy() == 1, Path("/dev/null"))
    refused = outcomes(cli, "deploy", "lab1", "--restart", expect=4)["lab1:main"]
    assert "0 healthy workers without it, 1 must remain" in refused["error"]["found"]
    assert router.healthy() == 1
