"""A host in memory that answers the helper's operations: the layout, systemd and one server, under a fake clock.

It keeps the invariants' subject matter, not files: which release is ``current``, whose unit is on disk and loaded,
what runs. A test breaks it with ``fail`` (an operation that ends with an error) and ``hook`` (something that happens
as an operation begins), or by the behaviour of a release (``faults``).
"""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ddtree_ops.clock import FakeClock
from ddtree_ops.connection import Connection
from ddtree_ops.deploy import Deploy, Engine
from ddtree_ops.errors import LockedError, RolledBackError, UnreachableError
from ddtree_ops.events import Event
from ddtree_ops.interrupt import Token
from ddtree_ops.model import Address, HostSpec, Mode, Settings

ENGINE = "e" * 64
# Operations that need the host's lock; the host itself may have taken it over meanwhile.
CHANGES = {"stage_release", "switch", "write_unit", "systemctl", "record", "take_back", "arm", "confirm", "renew"}


def settings(instance: str = "a", **changes: Any) -> Settings:
    wanted: dict[str, Any] = {
        "instance": instance,
        "mode": Mode.LINEAR,
        "gpus": (0,),
        "port": 30000,
        "model": "/m",
        "drafter": "/d",
        "start_timeout_s": 60,
    }
    return Settings(**{**wanted, **changes})


def host_of(*instances: Settings, name: str = "h1", **changes: Any) -> HostSpec:
    return HostSpec(name=name, address=Address(host=name), instances={s.instance: s for s in instances}, **changes)


def render(host: HostSpec, settings: Settings, *, release: str, engine_dir: str, systemd_version: int) -> str:
    """A unit that depends on everything a real one does."""
    top = f"# {host.scope} {systemd_version} {engine_dir} {settings.model_dump_json()}"
    return f"[Service]\n{top}\nExecStart={settings.mode} {release}\n"


def release_of(unit: str | None) -> str | None:
    """Which release the fake unit starts."""
    return unit.rsplit(" ", 1)[1].strip() if unit else None


@dataclass
class Server:
    """One start of the unit."""

    release: str
    started: float
    invocation: str
    fault: str = ""
    load_s: float = 5.0


@dataclass
class FakeHost:
    """``faults``: what a release does, by settings.mode: crash, hang, hung-completion, wrong-release, dies-after:N."""

    name: str = "h1"
    clock: FakeClock = field(default_factory=FakeClock)
    faults: dict[str, str] = field(default_factory=dict)
    fail: dict[str, Exception] = field(default_factory=dict)
    hook: Callable[[str], None] = lambda _op: None
    ops: list[str] = field(default_factory=list)
    reachable: bool = True
    systemd: int = 252
    free: int = 10 << 30
    engines: set[str] = field(default_factory=set)
    releases: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    current: dict[str, str | None] = field(default_factory=dict)
    states: dict[str, dict[str, Any]] = field(default_factory=dict)
    units: dict[str, str] = field(default_factory=dict)
    loaded: dict[str, str] = field(default_factory=dict)
    enabled: set[str] = field(default_factory=set)
    server: dict[str, Server | None] = field(default_factory=dict)
    failed: set[str] = field(default_factory=set)
    history: list[dict[str, Any]] = field(default_factory=list)
    held: dict[str, Any] | None = None
    strangers: dict[int, str] = field(default_factory=dict)
    token: str | None = None
    armed: dict[str, dict[str, Any]] = field(default_factory=dict)
    seized: bool = False
    busy: int = 0  # requests that run
    drains: bool = True  # whether SIGTERM ends the server
    dies: bool = True  # whether SIGKILL does
    strays: dict[int, str] = field(default_factory=dict)  # who holds memory of which GPU, of no unit
    starts: int = 0

    # -- the seam: what ``Connection`` calls

    def call(
        self,
        op: str,
        args: dict[str, Any] | None = None,
        payload: Any = None,
        *,
        deadline_s: float,
        on_event: Any = None,
    ) -> dict[str, Any]:
        assert deadline_s > 0
        assert on_event is None or callable(on_event)
        self.ops.append(op if op != "systemctl" else f"systemctl {(args or {})['verb']}")
        self.hook(self.ops[-1])
        if not self.reachable:
            raise UnreachableError("no answer", self.name)
        if (error := self.fail.get(self.ops[-1])) is not None:
            raise error
        if op in CHANGES and self.seized:
            raise RolledBackError("a was not confirmed in time; the host took it back by itself", self.name)
        return dict(getattr(self, f"op_{op}")(args or {}, payload))

    @contextmanager
    def locked(self, purpose: str) -> Iterator[dict[str, Any]]:
        self.ops.append("lock")
        self.hook("lock")
        if self.held:
            raise LockedError(f"locked by {self.held['owner']} for: {self.held['purpose']}", self.name)
        self.held, self.token = {"owner": "me", "purpose": purpose}, "t"
        try:
            yield {"took_over": None}
        finally:
            self.ops.append("unlock")
            self.held = self.token = None

    # -- operations

    def op_facts(self, args: dict[str, Any], _payload: Any) -> dict[str, Any]:
        names = sorted(set(self.states) | set(args["instances"]))
        version = {"rc": 0, "out": f"systemd {self.systemd} (252)\n", "err": "", "argv": []}
        ports = [self._listener(port) for port in args.get("ports", [])]
        return {
            "at": self.clock.time(),
            "host": {
                "systemd": version,
                "system_state": "running",
                "python": "3.11.2",
                "root_state": {"exists": True, "nearest": "/opt", "writable": True, "read_only": False},
            },
            "disk": {"free": self.free},
            "lock": {**self.held, "pid": 1, "since": 0, "expires": 1, "live": True} if self.held else None,
            "gpus": self._gpus(),
            "listeners": [port for port in ports if port],
            "venvs": {path: {"python": f"{path}/bin/python", "sglang": ["0.5.17"]} for path in args.get("venvs", [])},
            "engines": sorted(self.engines),
            "instances": {name: self._instance(name) for name in names},
        }

    def _gpus(self) -> dict[str, Any]:
        """No nvidia-smi, until something is left on a GPU (which it is from the first stop on)."""
        if not self.strays or "systemctl stop" not in self.ops:
            return {"query": {"rc": 127, "out": ""}, "apps": None, "owners": {}}
        query = "\n".join(f"{gpu}, GPU-{gpu}, Fake, 97887, 2000" for gpu in self.strays)
        apps = "\n".join(f"GPU-{gpu}, {66 + gpu}, {name}, 1000" for gpu, name in self.strays.items())
        return {"query": {"rc": 0, "out": query}, "apps": {"rc": 0, "out": apps}, "owners": {}}

    def _instance(self, name: str) -> dict[str, Any]:
        server = self._server(name)
        return {
            "current": self.current.get(name),
            "current_kind": "link" if self.current.get(name) else "absent",
            "state": self._state(name),
            "armed": self.armed.get(name),
            "releases": self.releases.get(name, {}),
            "unit_text": self.units.get(name),
            "show": self._show(name),
            "processes": [self._process(name, server)] if server else [],
        }

    def _state(self, name: str) -> dict[str, Any]:
        return self.states.setdefault(name, {"previous": None, "proven": None, "taken_back": {}})

    def op_stage_release(self, args: dict[str, Any], payload: bytes) -> dict[str, Any]:
        with tarfile.open(fileobj=io.BytesIO(payload)) as tar:
            files = {member.name: tar.extractfile(member).read().decode() for member in tar}  # type: ignore[union-attr]
        there = self.releases.setdefault(args["instance"], {})
        if args["release"] in there:
            return {"staged": False}
        there[args["release"]] = {
            "manifest": json.loads(files["manifest.json"]),
            "settings": json.loads(files["settings.json"]),
            "unit": files["unit"],
            "gates": None,
            "damage": [],
            "staged": self.clock.time(),
        }
        return {"staged": True}

    def op_switch(self, args: dict[str, Any], _payload: Any) -> dict[str, Any]:
        assert self.held, "a change needs the lock"
        release = self.releases[args["instance"]][args["release"]]
        assert release["manifest"]["engine"] in self.engines
        self._point(args["instance"], args["release"])
        return {"was": None, "changed": True}

    def _point(self, name: str, release: str | None) -> None:
        state = self._state(name)
        if self.current.get(name) not in (None, release):
            state["previous"] = self.current[name]
        self.current[name] = release

    def op_write_unit(self, args: dict[str, Any], _payload: Any) -> dict[str, Any]:
        name = args["instance"]
        text = self.releases[name][str(self.current[name])]["unit"]
        changed = self.units.get(name) != text
        self.units[name] = text
        return {"changed": changed}

    def op_systemctl(self, args: dict[str, Any], _payload: Any) -> dict[str, Any]:
        name, verb = args["instance"], args["verb"]
        if verb == "daemon-reload":
            self.loaded = dict(self.units)
        elif verb == "enable":
            self.enabled.add(name)
        elif verb == "reset-failed":
            self.failed.discard(name)
        elif (verb == "stop" and self.drains) or (verb == "kill" and self.dies):
            self.server[name] = None
        elif verb == "start" or verb == "restart":
            self._start(name)
        return {"ok": True, "rc": 0, "out": "", "err": ""}

    def _start(self, name: str) -> None:
        self.starts += 1
        release = str(release_of(self.loaded.get(name)))
        mode = self.releases[name][release]["settings"]["mode"]
        self.failed.discard(name)
        fault = self.faults.get(mode, "")
        self.server[name] = Server(release, self.clock.monotonic(), f"i{self.starts}", fault)

    def _server(self, name: str) -> Server | None:
        """The server as it is by now: a fault may have ended it."""
        server = self.server.get(name)
        if server is None:
            return None
        age = self.clock.monotonic() - server.started
        dies = float(server.fault.partition(":")[2] or 0) if server.fault.startswith("dies-after") else None
        if server.fault == "crash" or (dies is not None and age >= dies):
            self.failed.add(name)
            return None
        return server

    def _process(self, name: str, server: Server) -> dict[str, Any]:
        argv = ["python", "-m", "sglang.launch_server", "--weight-version", server.release]
        return {"pid": 100 + self.starts, "argv": argv, "unit": f"sglang-ddtree-{name}.service"}

    def _show(self, name: str) -> str:
        server = self._server(name)
        last = self.server.get(name)
        active = "active" if server else "failed" if name in self.failed else "inactive"
        return "\n".join(
            [
                f"LoadState={'loaded' if name in self.loaded else 'not-found'}",
                f"ActiveState={active}",
                f"SubState={'running' if server else active}",
                f"MainPID={100 + self.starts if server else 0}",
                f"InvocationID={last.invocation if last else ''}",
                f"NeedDaemonReload={'yes' if self.loaded.get(name) != self.units.get(name) else 'no'}",
                f"UnitFileState={'enabled' if name in self.enabled else 'disabled'}",
                f"Result={'exit-code' if active == 'failed' else 'success'}",
                f"ExecMainStatus={1 if active == 'failed' else 0}",
                "NRestarts=0",
            ]
        )

    def _ready(self, name: str) -> Server | None:
        server = self._server(name)
        if server is None or server.fault == "hang" or self.clock.monotonic() - server.started < server.load_s:
            return None
        return server

    def _listener(self, port: int) -> dict[str, Any] | None:
        if port in self.strangers:
            process = {"pid": 7, "argv": [self.strangers[port]], "unit": ""}
            return {"port": port, "address": "127.0.0.1", "processes": [process]}
        for name, releases in self.releases.items():
            server = self._ready(name)
            if server and releases[server.release]["settings"]["port"] == port:
                return {"port": port, "address": "127.0.0.1", "processes": [self._process(name, server)]}
        return None

    def op_observe(self, args: dict[str, Any], _payload: Any) -> dict[str, Any]:
        name = args["instance"]
        server, listening = self._ready(name), self._listener(args["port"])
        says = "f" * 64 if server and server.fault == "wrong-release" else server.release if server else None
        answers = [
            {"path": "/ready", "status": 200},
            {"path": "/model_info", "body": f'{{"weight_version": "{says}"}}'},
        ]
        busy = f"sglang:num_running_reqs {self.busy}\n"
        if "/metrics" in args["paths"]:
            answers.append({"path": "/metrics", "status": 200, "body": busy})
        line = {"message": "Load weight begin. avail mem=90 GB", "invocation": None}
        raised = {"message": "ValueError: the budget is not for this GPU", "invocation": None}
        lines = [line, raised] if name in self.failed else [line]
        return {
            "show": self._show(name),
            "listeners": [listening] if listening else [],
            "processes": [self._process(name, running)] if (running := self._server(name)) else [],
            "http": answers if server else [],
            "journal": {"lines": lines, "cursor": "c"},
        }

    def op_complete(self, args: dict[str, Any], _payload: Any) -> dict[str, Any]:
        name = next(name for name in self.releases if self._ready(name))
        server = self._ready(name)
        assert server is not None
        if server.fault == "hung-completion":
            self.clock.sleep(args["timeout_s"])
            return {"error": "TimeoutError: timed out", "ms": args["timeout_s"] * 1000}
        tokens = args["body"]["sampling_params"]["max_new_tokens"]
        body = {"meta_info": {"completion_tokens": tokens, "weight_version": server.release}}
        return {"status": 200, "body": json.dumps(body), "ms": 20.0}

    def op_renew(self, args: dict[str, Any], _payload: Any) -> dict[str, Any]:
        assert args["token"] == self.token
        return {}

    def op_record(self, args: dict[str, Any], _payload: Any) -> dict[str, Any]:
        state, release = self._state(args["instance"]), args["release"]
        if args["outcome"] == "taken-back":
            state["taken_back"][release] = {"at": 0, "reason": args["details"]["reason"]}
        else:
            self.releases[args["instance"]][release]["gates"] = args["gates"]
            state["proven"] = release
            state["taken_back"].pop(release, None)
        self.history.append({"what": args["outcome"], "release": release})
        return {}

    def op_take_back(self, args: dict[str, Any], _payload: Any) -> dict[str, Any]:
        name, to = args["instance"], args["to"]
        left = self.current.get(name)
        if args["mark"] and left:
            self._state(name)["taken_back"][left] = {"at": 0, "reason": args["reason"]}
        self.history.append({"what": "taken-back", "release": left, "to": to})
        if to == "none":
            self._point(name, None)
            self.units.pop(name, None)
            self.loaded.pop(name, None)
            self.server[name] = None
            self.failed.discard(name)
            return {"restarted": False, "stopped": True}
        self._point(name, to)
        self.op_write_unit(args, None)
        self.loaded = dict(self.units)
        server = self._server(name)
        if server and server.invocation == args["invocation"]:
            return {"restarted": False}
        self._start(name)
        return {"restarted": True}

    def op_arm(self, args: dict[str, Any], _payload: Any) -> dict[str, Any]:
        to = self.armed.get(args["instance"], args)["to"]
        self.armed[args["instance"]] = {"to": to, "deadline": self.clock.time() + args["within_s"]}
        return dict(self.armed[args["instance"]])

    def op_confirm(self, args: dict[str, Any], _payload: Any) -> dict[str, Any]:
        return {"was_armed": self.armed.pop(args["instance"], None) is not None}

    def expire(self, name: str) -> None:
        """What the host's own timer does at the deadline, whether or not anybody reaches the host."""
        armed = self.armed.pop(name)
        assert self.clock.time() >= armed["deadline"]
        self.op_take_back({"instance": name, "to": armed["to"], "mark": True, "reason": "", "invocation": None}, None)
        self.seized = True

    def op_evidence(self, args: dict[str, Any], _payload: Any) -> dict[str, Any]:
        return {"name": f"evidence-{args['instance']}.tar.gz", "archive_b64": "ZXZpZGVuY2U=", "files": []}

    # -- what tests look at

    def runs(self, name: str = "a") -> str | None:
        server = self._server(name)
        return server.release if server else None

    def invariants(self) -> None:
        """What must hold at every instant (DESIGN: ``current`` is complete or absent, the unit is some release's)."""
        for name, release in self.current.items():
            assert release is None or release in self.releases[name], (name, release)
        for name, text in self.units.items():
            assert text in {there["unit"] for there in self.releases[name].values()}, name


def deployer(
    *fakes: FakeHost, tmp: Any, events: list[Event] | None = None, token: Token | None = None, **options: Any
) -> Deploy:
    """A ``Deploy`` whose hosts are in memory; the first one's clock is the run's clock."""
    by_name = {fake.name: fake for fake in fakes}
    clock = fakes[0].clock

    def connect(host: HostSpec) -> Connection:
        fake = by_name[host.name]

        def read(path: str) -> bytes:
            *_, instance, _releases, release, _unit = path.split("/")
            return str(fake.releases[instance][release]["unit"]).encode()

        return Connection(host, fake, clock, read=read)

    def stage(connection: Connection, _settings: Settings) -> str:
        by_name[connection.host.name].ops.append("stage_engine")
        by_name[connection.host.name].hook("stage_engine")
        by_name[connection.host.name].engines.add(ENGINE)
        return ""

    engine = Engine(ENGINE, "0.5.17", lambda _connection, _settings: 1000, stage)
    sink = events.append if events is not None else lambda _event: None
    return Deploy(engine, render, connect, clock, token or Token(), sink, tmp, **options)
