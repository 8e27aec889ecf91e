"""Secrets: found on the operator's machine, delivered to files that only systemd and root read, shown nowhere.

``api_key`` and ``admin_api_key`` become a configuration file of SGLang (JSON is YAML), every other secret a line of
an environment file. The unit names the files; a release names the secrets; only this module and the helper's
``put_secrets`` ever hold a value.
"""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ddtree_ops.errors import UsageError
from ddtree_ops.inventory.checks import SERVER_SECRETS
from ddtree_ops.model import HostSpec, SecretSource, Settings

CONFIG_FILE = "server.yaml"
ENVIRONMENT_FILE = "environment"
COMMAND_S = 60.0


@dataclass(frozen=True)
class Secrets:
    """Values by name; printing one of these prints names only."""

    values: Mapping[str, str] = field(default_factory=dict, repr=False)

    def __repr__(self) -> str:
        return f"Secrets({', '.join(sorted(self.values))})"

    @property
    def headers(self) -> dict[str, str]:
        """What a request to the server needs."""
        key = self.values.get("api_key")
        return {"Authorization": f"Bearer {key}"} if key else {}

    def payload(self) -> bytes:
        """For the helper's ``put_secrets``: each value by name, so that it can be redacted, and the two files."""
        files = dict(self.values)
        server = {name.replace("_", "-"): value for name, value in self.values.items() if name in SERVER_SECRETS}
        if server:
            files[CONFIG_FILE] = json.dumps(server) + "\n"
        variables = {name: value for name, value in self.values.items() if name not in SERVER_SECRETS}
        if variables:
            files[ENVIRONMENT_FILE] = "".join(f"{name}={_quoted(value)}\n" for name, value in sorted(variables.items()))
        return json.dumps(files).encode()


def _quoted(value: str) -> str:
    """A value of an environment file (systemd.exec(5)): in double quotes, where four characters need a backslash."""
    return '"' + "".join("\\" + char if char in '"\\$`' else char for char in value) + '"'


Run = Callable[[Sequence[str]], tuple[int, bytes, bytes]]


def gather(host: HostSpec, settings: Settings, environ: Mapping[str, str], run: Run | None = None) -> Secrets:
    """The values of an instance's secrets. Raises UsageError that says where one was looked for, never what it is."""
    sources = host.secrets.get(settings.instance, {})
    target = f"{host.name}:{settings.instance}"
    for name in settings.secrets:
        if name not in sources:  # a release may name a secret that the inventory no longer has
            place = f"[hosts.{host.name}.instances.{settings.instance}.secrets]"
            raise _missing(target, name, "the inventory does not say where it is", f"add it to {place}")
    return Secrets({name: _value(target, name, sources[name], environ, run or _run) for name in settings.secrets})


class Keyring:
    """The secrets of one run: each is looked for once, however many hosts ask, since a command may ask a person."""

    def __init__(self, environ: Mapping[str, str], run: Run | None = None) -> None:
        self._environ, self._run = environ, run
        self._found: dict[tuple[str, str, tuple[str, ...]], Secrets] = {}
        self._lock = threading.Lock()

    def __call__(self, host: HostSpec, settings: Settings) -> Secrets:
        """The instance's secrets. Raises UsageError."""
        key = (host.name, settings.instance, settings.secrets)
        with self._lock:
            if key not in self._found:
                self._found[key] = gather(host, settings, self._environ, self._run)
            return self._found[key]

    def value(self, target: str, name: str, source: SecretSource) -> str:
        """One value that is no secret of the server itself, such as a router's key."""
        return _value(target, name, source, self._environ, self._run or _run)

    def headers(self, host: HostSpec, settings: Settings) -> Mapping[str, str]:
        """What a look at the server needs; without its key, it is looked at as far as that goes."""
        try:
            return self(host, settings).headers
        except UsageError:
            return {}


def _value(target: str, name: str, source: SecretSource, environ: Mapping[str, str], run: Run) -> str:
    if source.env is not None:
        if source.env not in environ:
            raise _missing(target, name, f"the variable {source.env} is not set", f"export {source.env}=...")
        place, value = f"the variable {source.env}", environ[source.env]
    elif source.file is not None:
        place, value = source.file, _read(target, name, source.file)
    else:
        command = source.command or ()
        place, value = " ".join(command), _output(target, name, command, run)
    value = value.removesuffix("\n").removesuffix("\r")
    if not value:
        raise _missing(target, name, f"{place} is empty", "put the value there")
    if not value.isprintable() or value.startswith("-"):
        fault = "begins with a dash" if value.startswith("-") else "has line breaks or control characters"
        raise _missing(target, name, f"the value of {place} {fault}", "a key is one line of printable characters")
    return value


def _read(target: str, name: str, path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise _missing(target, name, f"{path} cannot be read: {reason}", "check the path and its permissions") from None


def _output(target: str, name: str, command: Sequence[str], run: Run) -> str:
    rc, out, _ = run(command)
    if rc != 0:  # what it wrote stays unseen: it may hold the value
        raise _missing(target, name, f"{command[0]} ended with status {rc}", " ".join(command))
    return out.decode("utf-8", "replace")


def _run(command: Sequence[str]) -> tuple[int, bytes, bytes]:
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=COMMAND_S, check=False)
    except FileNotFoundError:
        return 127, b"", b""
    except subprocess.TimeoutExpired:
        return 124, b"", b""
    return done.returncode, done.stdout, done.stderr


def _missing(target: str, name: str, found: str, following: str) -> UsageError:
    return UsageError(
        f"secret {name}: {found}", host=target, why="the server would start without it, or not at all", next=following
    )
