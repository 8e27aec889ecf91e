"""The nouns: mode, settings, instance, host, fleet. All frozen; resolved values, no files and no I/O.

``Settings`` is what a release is made of, next to the engine digest: two instances with equal settings and
engine have the same release digest. Reading them from TOML is the business of ``inventory``.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

MAX_BUDGET = 255
MAX_TOPK_CAP = 16
"""The engine's own limits (``sglang_ddtree.config``), which refuses more at start; a test holds them equal."""
MAX_RECORDS_BUDGET = 64
"""Nodes of a tree whose recurrent states can be kept as records."""

States = Literal["snapshots", "records"]
"""How a hybrid target's trees keep recurrent states until acceptance."""

INSTANCE_NAME = r"^[a-z0-9][a-z0-9-]{0,47}$"
"""An instance's name is part of a unit's name and of paths, so it needs quoting in neither."""

PROGRAM_PATH = r"^/[^\x00-\x1f\x7f\"'\\$]*$"
"""In the path of a program systemd takes no quotes, backslashes or control characters, and expands no variable."""


class Frozen(BaseModel):
    """Base of all models: immutable, unknown keys are errors, no silent coercion."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Mode(StrEnum):
    """How an instance decodes. The same words in the CLI, inventory, files, logs and docs."""

    AR = "ar"
    LINEAR = "linear"
    SHADOW_LINEAR = "shadow-linear"
    TREE = "tree"
    AUTO = "auto"

    @property
    def speculates(self) -> bool:
        return self is not Mode.AR

    @property
    def builds_trees(self) -> bool:
        return self in (Mode.SHADOW_LINEAR, Mode.TREE, Mode.AUTO)

    @property
    def verifies_trees(self) -> bool:
        return self in (Mode.TREE, Mode.AUTO)


def most_nodes(topk_cap: int, block: int) -> int:
    """How many nodes besides the root a tree can hold: ``topk_cap`` children a node, ``block`` - 1 drafted depths."""
    nodes = level = topk_cap if block > 1 else 0
    for _ in range(block - 2):
        if nodes >= MAX_BUDGET:
            break
        level *= topk_cap
        nodes += level
    return min(nodes, MAX_BUDGET)


class Address(Frozen):
    """Where SSH finds a host. ``host`` may be a name, an ``~/.ssh/config`` alias, IPv4 or IPv6 (no brackets)."""

    host: str
    user: str | None = None
    port: Annotated[int, Field(ge=1, le=65535)] | None = None

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.user + '@' if self.user else ''}{host}{f':{self.port}' if self.port else ''}"


class Settings(Frozen):
    """Everything that decides how one SGLang server is started; part of the release digest.

    Times are seconds. ``budget`` counts tree nodes without the root, ``widths`` those of the trees that mode auto
    chooses among; ``topk_cap`` is per depth. ``states`` unset is the engine's choice: records wherever they are written
    for (``keeping``). ``gpus`` are indices in PCI order, as nvidia-smi counts; empty pins none.
    ``max_running_requests`` is always rendered: left to itself, SGLang picks 48 for speculation and lets graph capture
    run out of memory. ``secrets`` are names only: what the server is given; the values are no part of a release.
    """

    instance: Annotated[str, Field(pattern=INSTANCE_NAME)]
    mode: Mode
    gpus: tuple[Annotated[int, Field(ge=0)], ...]
    port: Annotated[int, Field(ge=1, le=65535)]
    model: str
    drafter: str | None = None
    budget: Annotated[int, Field(ge=1, le=MAX_BUDGET)] = 16
    widths: Annotated[tuple[Annotated[int, Field(ge=1, le=MAX_BUDGET)], ...], Field(min_length=1)] = (8, 16, 32)
    topk_cap: Annotated[int, Field(ge=1, le=MAX_TOPK_CAP)] = 8
    states: States | None = None
    allow_hybrid_unsafe: bool = False
    unsafe_reason: str | None = None
    bind: str = "127.0.0.1"
    served_model_name: str | None = None
    venv: Annotated[str, Field(pattern=PROGRAM_PATH)] = "/opt/sglang/venv"
    launch_module: Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*$")] = "sglang.launch_server"
    user: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_.-]*\$?$")] | None = None
    context_length: Annotated[int, Field(ge=1)] | None = None
    max_running_requests: Annotated[int, Field(ge=1)] = 16
    mem_fraction_static: Annotated[float, Field(gt=0, lt=1)] | None = None
    extra_args: tuple[str, ...] = ()
    env: dict[str, str] = Field(default_factory=dict)
    secrets: tuple[str, ...] = ()
    start_timeout_s: Annotated[int, Field(ge=1)] = 900
    drain_timeout_s: Annotated[int, Field(ge=0)] = 60

    @property
    def nodes(self) -> int:
        """Nodes of the widest tree that a round may verify or watch."""
        return max(self.widths) if self.mode is Mode.AUTO else self.budget


class GateSettings(Frozen):
    """What an instance must show before its release is proven, besides identity, attest and completion.

    concurrencies: streams at which it is measured.  prompts, tokens: how many are asked for how much, ``rounds`` times.
    min_speedup: least ratio to linear that its throughput must have, with 95 % confidence.
    soak_s: how long it must stay healthy.  accept_floor: least accept length meanwhile; modes without one ignore it.
    """

    concurrencies: tuple[Annotated[int, Field(ge=1, le=256)], ...] = (1,)
    prompts: Annotated[int, Field(ge=8, le=64)] = 16
    tokens: Annotated[int, Field(ge=16, le=4096)] = 128
    rounds: Annotated[int, Field(ge=2, le=20)] = 2
    min_speedup: Annotated[float, Field(gt=0)] = 1.0
    soak_s: Annotated[int, Field(ge=0)] = 0
    accept_floor: Annotated[float, Field(ge=1)] = 1.1


class SecretSource(Frozen):
    """Where a secret's value is found on the operator's machine: a variable, a file, or what a command prints."""

    env: str | None = None
    file: str | None = None
    command: tuple[str, ...] | None = None


class RouterSettings(Frozen):
    """The router that sends requests to an instance, and is told before the instance stops.

    url: the router's own address.  worker_url: the instance as the router knows it.  metrics_url: the router's metrics,
    where its circuit breakers show.  others: how many other healthy workers must remain.  settle_s: how long the router
    may take to take a worker out or in.
    """

    url: str
    worker_url: str | None = None
    metrics_url: str | None = None
    api_key: SecretSource | None = None
    others: Annotated[int, Field(ge=0)] = 1
    settle_s: Annotated[float, Field(gt=0)] = 15.0


class HostSpec(Frozen):
    """One machine of the inventory. ``scope`` user means the caller's own systemd, without sudo.

    ``gpus`` is how many the machine has; 0 means not stated, and then no index is out of range. ``gates``,
    ``secrets`` and ``routers`` hold, by instance, what its releases must show, where its secrets are found and who
    sends it requests: no part of a release.
    """

    name: str
    address: Address
    transport: Literal["ssh", "local"] = "ssh"
    scope: Literal["system", "user"] = "system"
    root: str = "/opt/ddtree"
    gpus: Annotated[int, Field(ge=0)] = 0
    sudo: bool = True
    jump: str | None = None
    identity: tuple[str, ...] = ()
    known_hosts: str | None = None
    default_instance: str | None = None
    unit_template: str | None = None
    instances: dict[str, Settings] = Field(default_factory=dict)
    gates: dict[str, GateSettings] = Field(default_factory=dict)
    secrets: dict[str, dict[str, SecretSource]] = Field(default_factory=dict)
    routers: dict[str, RouterSettings] = Field(default_factory=dict)

    def unit_dir(self, home: str = "~") -> str:
        """Where this host's units lie; ``home`` is the remote home, for scope user."""
        return "/etc/systemd/system" if self.scope == "system" else f"{home}/.config/systemd/user"


class Fleet(Frozen):
    """The whole inventory, resolved: every instance has its full settings.

    ``groups`` hold HOST and HOST:INSTANCE only (groups of groups are resolved). ``notices`` are what the reader
    changed and a person should know, such as a capped value.
    """

    path: str
    hosts: dict[str, HostSpec]
    groups: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    notices: tuple[str, ...] = ()


def unit_name(instance: str) -> str:
    """The systemd unit of an instance."""
    return f"sglang-ddtree-{instance}.service"
