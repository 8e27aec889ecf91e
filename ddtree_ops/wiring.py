"""Where the parts are put together: real hosts, the real engine, the real clock. Nothing else knows them all."""

from __future__ import annotations

import getpass
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import platformdirs

from ddtree_ops import __version__
from ddtree_ops.agent import Agent
from ddtree_ops.audit import Audit
from ddtree_ops.bundle.build import Bundle, build_bundle
from ddtree_ops.bundle.stage import check_engine, stage_engine
from ddtree_ops.clock import SystemClock
from ddtree_ops.connection import PATIENCE_S, QUICK_S, Connection
from ddtree_ops.deploy import Engine
from ddtree_ops.drain import Drain
from ddtree_ops.http import request
from ddtree_ops.model import HostSpec, Settings
from ddtree_ops.remote import open_remote
from ddtree_ops.router import Router
from ddtree_ops.secret import Keyring
from ddtree_ops.steps import Work

CLOCK = SystemClock()
KEYRING = Keyring(os.environ)


def connect(host: HostSpec, patience_s: float = PATIENCE_S) -> Connection:
    """The host, over SSH or on this machine. Nothing is sent before the first call."""
    remote = open_remote(host, CLOCK)
    agent = Agent(remote, host)

    def read(path: str) -> bytes:
        return remote.get(path, deadline_s=QUICK_S, sudo=agent.sudo)

    def headers(settings: Settings) -> Mapping[str, str]:
        return KEYRING.headers(host, settings)

    return Connection(
        host,
        agent,
        CLOCK,
        headers=headers,
        read=read,
        close=remote.close,
        round_trips=lambda: remote.round_trips,
        patience_s=patience_s,
    )


def engine() -> Engine:
    """The engine of this ddtree-ops, built once on this machine."""
    return of_bundle(build_bundle())


def of_bundle(bundle: Bundle) -> Engine:
    def check(connection: Connection, settings: Settings) -> int:
        blobs = set(check_engine(connection, bundle, settings.venv).blobs)
        return sum(file.size for file in bundle.manifest.files.values() if file.sha256 in blobs)

    def stage(connection: Connection, settings: Settings) -> str:
        return str(stage_engine(connection, bundle, settings.venv))

    return Engine(bundle.digest, bundle.manifest.sglang, check, stage)


def who() -> dict[str, Any]:
    """Who does it and from where, for the host's history."""
    return {"by": getpass.getuser(), "client": platform.node(), "ddtree_ops": __version__}


def audit() -> Audit:
    """The operator's own log."""
    return Audit(platformdirs.user_state_path("ddtree-ops") / "audit.jsonl", CLOCK, who())


def draining(work: Work) -> Drain:
    """How this instance is stopped: through its router, if it has one."""
    host, settings = work.host, work.release.settings
    router = host.routers.get(settings.instance)
    if router is None:
        return Drain(work)
    key = KEYRING.value(work.target, "the router's api_key", router.api_key) if router.api_key is not None else None
    worker = router.worker_url or f"http://{host.address.host}:{settings.port}"
    made = Router(router, worker, work.target, request, CLOCK, work.alive, key, work.secrets.values.get("api_key"))
    return Drain(work, made)


def evidence_dir() -> Path:
    """Where evidence of failures is kept on this machine."""
    return platformdirs.user_state_path("ddtree-ops") / "evidence"
