"""TOML to a ``Fleet``. Every error names the file, the line, the key and the repair; all errors come at once."""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from ddtree_ops.errors import InventoryError
from ddtree_ops.inventory import checks
from ddtree_ops.inventory.address import parse_address
from ddtree_ops.inventory.checks import Problem
from ddtree_ops.inventory.where import KeyPath, dotted, line_of
from ddtree_ops.model import Fleet, GateSettings, HostSpec, RouterSettings, SecretSource, Settings

TOP_KEYS = ("defaults", "groups", "hosts")
DEFAULTS_KEYS = ("host", "instance")
# tables of an instance that are about it but no part of what it runs
ASIDE_KEYS = ("gates", "secrets", "router")
SETTINGS_KEYS = (*(key for key in Settings.model_fields if key not in ("instance", *ASIDE_KEYS)), *ASIDE_KEYS)
_OF_ONE_HOST = ("address", "default_instance", "defaults", "instances")
_MADE = ("name", "instances", "gates", "secrets", "routers")
HOST_KEYS = (*(key for key in HostSpec.model_fields if key not in _MADE), "defaults", "instances")
# keys that make sense for every host, and the user of addresses that name none
HOST_DEFAULT_KEYS = (*(key for key in HOST_KEYS if key not in _OF_ONE_HOST), "user")

_HOST_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_ROOT = re.compile(r"/[A-Za-z0-9._/+@,-]*")
RESERVED = ("all",)

Table = Mapping[str, Any]
Layers = dict[KeyPath, Table]
_Model = TypeVar("_Model", HostSpec, Settings, GateSettings, SecretSource, RouterSettings)


def load_fleet(path: Path) -> Fleet:
    """Read and check one inventory file. Raises InventoryError."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InventoryError(
            f"the inventory {path} does not exist",
            why="it says which hosts and instances there are",
            next="write one (docs/inventory.md), or name another with --inventory FILE",
        ) from None
    except UnicodeDecodeError as error:
        raise InventoryError(
            f"the inventory {path} is not a text: byte {error.start} is not UTF-8",
            why="TOML is UTF-8",
            next=f"iconv -f ISO-8859-1 -t UTF-8 {path}",
        ) from error
    except OSError as error:
        raise InventoryError(
            f"the inventory {path} cannot be read: {error.strerror}", next="check the path and its permissions"
        ) from error
    return parse_fleet(text, str(path))


def parse_fleet(text: str, path: str) -> Fleet:
    """Check TOML text and resolve it; ``path`` is for messages and for ``Fleet.path``. Raises InventoryError."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InventoryError(
            f"{path} is not valid TOML: {error}",
            why="nothing of it can be trusted until it parses",
            next=f"repair that line of {path}",
        ) from None
    return _Reader(text, path).read(document)


class _Reader:
    """Walks the document once and collects problems; the first pass ends either in a Fleet or in one error."""

    def __init__(self, text: str, path: str) -> None:
        self.text = text
        self.path = path
        self.problems: list[tuple[KeyPath, Problem]] = []
        self.notices: list[str] = []

    def read(self, document: Table) -> Fleet:
        self._known((), document, TOP_KEYS)
        defaults = self._table(document, "defaults", ())
        self._known(("defaults",), defaults, DEFAULTS_KEYS)
        host_defaults = self._table(defaults, "host", ("defaults",))
        self._known(("defaults", "host"), host_defaults, HOST_DEFAULT_KEYS)
        instance_defaults = self._table(defaults, "instance", ("defaults",))
        self._known(("defaults", "instance"), instance_defaults, SETTINGS_KEYS)
        hosts: dict[str, HostSpec] = {}
        tables = self._table(document, "hosts", ())
        for name in tables:
            host = self._host(name, self._table(tables, name, ("hosts",)), host_defaults, instance_defaults)
            if host is not None:
                hosts[name] = host
        if not tables:
            self._problem(
                (), Problem("hosts", "no host is defined", "", "add a table [hosts.NAME] (docs/inventory.md)")
            )
        groups = self._groups(self._table(document, "groups", ()), tables)
        self._raise()
        return Fleet(path=self.path, hosts=hosts, groups=groups, notices=tuple(self.notices))

    # -- hosts and instances

    def _host(self, name: str, table: Table, defaults: Table, instance_defaults: Table) -> HostSpec | None:
        at = ("hosts", name)
        self._known(at, table, HOST_KEYS)
        self._name(at, name)
        own_defaults = self._table(table, "defaults", at)
        self._known((*at, "defaults"), own_defaults, SETTINGS_KEYS)
        merged = {**defaults, **table}
        fields = {key: value for key, value in merged.items() if key in HostSpec.model_fields and key not in _MADE}
        local = fields.get("transport") == "local"
        address = self._address(at, fields.get("address", "localhost" if local else None), merged.get("user"))
        if isinstance(fields.get("jump"), str):
            for hop in fields["jump"].split(","):
                self._parse_address((*at, "jump"), hop.strip())
        self._expand_paths(fields, local)
        layers = {("defaults", "instance"): instance_defaults, (*at, "defaults"): own_defaults}
        tables = self._table(table, "instances", at)
        parts = self._instances(at, tables, layers)
        fields |= {"name": name, "address": address}
        host = self._model(HostSpec, at, fields, {at: table, ("defaults", "host"): defaults})
        if host is None:
            return None
        host = host.model_copy(update=parts)
        self._check_host(at, host, tables)
        return host

    def _instances(self, at: KeyPath, tables: Table, layers: Layers) -> dict[str, Any]:
        """The fields of a host that hold something for each of its instances."""
        found: dict[str, dict[str, Any]] = {"instances": {}, "gates": {}, "secrets": {}, "routers": {}}
        for name in tables:
            where = (*at, "instances", name)
            own = {**layers, where: self._table(tables, name, where[:-1])}
            secrets = self._secrets(own)
            settings = self._instance(where, name, own, tuple(sorted(secrets)))
            made = {
                "instances": settings,
                "gates": self._aside(GateSettings, "gates", where, own),
                "secrets": secrets,
                "routers": self._aside(RouterSettings, "router", where, own),
            }
            for kind, value in made.items():
                if value:
                    found[kind][name] = value
        return found

    def _instance(self, at: KeyPath, name: str, layers: Layers, secrets: tuple[str, ...]) -> Settings | None:
        self._known(at, layers[at], SETTINGS_KEYS)
        merged: dict[str, Any] = {}
        for table in layers.values():
            merged |= {key: value for key, value in table.items() if key in SETTINGS_KEYS and key not in ASIDE_KEYS}
        if isinstance(merged.get("env"), dict):  # variables add up, every other key is replaced by the nearer table
            merged["env"] = _added_up("env", layers)
        stated = "topk_cap" in merged
        merged |= {"instance": name, "secrets": list(secrets)}
        nearest = dict(reversed(layers.items()))
        settings = self._model(Settings, at, merged, nearest)
        if settings is None:
            return None
        for problem in checks.settings_problems(settings):
            self._problem(_origin(problem, at, nearest), problem)
        settings, notice = checks.cap_topk(settings, stated=stated)
        if notice:
            self.notices.append(f"{at[1]}:{notice}")
        return settings

    def _aside(self, model: type[_Model], key: str, at: KeyPath, layers: Layers) -> _Model | None:
        """A table beside the settings. None where no layer has one; an empty table declares the defaults."""
        if not any(key in table for table in layers.values()):
            return None
        tables: Layers = {}
        merged: dict[str, Any] = {}
        outside: KeyPath
        for outside, outer in layers.items():
            table = self._table(outer, key, outside)
            self._known((*outside, key), table, model.model_fields)
            tables[(*outside, key)] = table
            merged |= table
        return self._model(model, (*at, key), merged, dict(reversed(tables.items())))

    def _secrets(self, layers: Layers) -> dict[str, SecretSource]:
        found: dict[str, SecretSource] = {}
        for layer, table in layers.items():
            for name, source in self._table(table, "secrets", layer).items():
                where = (*layer, "secrets", name)
                for problem in checks.secret_problems(name, source):
                    self._problem(where[:-1], problem)
                if not checks.secret_problems(name, source):
                    read = self._model(SecretSource, where, source, {where: source})
                    if read is not None:
                        file = os.path.expanduser(read.file) if read.file else None
                        found[name] = read.model_copy(update={"file": file})
        return found

    def _check_host(self, at: KeyPath, host: HostSpec, tables: Table) -> None:
        seen: dict[str, Settings] = {}
        for name, settings in host.instances.items():
            where = (*at, "instances", name)
            for problem in (checks.gpu_problem(settings, host.gpus), checks.conflict(settings, seen)):
                if problem:
                    self._problem(where, problem)
            seen[name] = settings
        default = host.default_instance
        if default is not None and default not in tables:
            self._problem(
                at,
                Problem(
                    "default_instance",
                    f"default_instance {default!r} is not an instance of {host.name}."
                    + checks.did_you_mean(default, tables),
                    "",
                    f"name one of {', '.join(tables) or 'its instances (it has none)'}",
                ),
            )
        if not _ROOT.fullmatch(host.root):
            found = f"root {host.root!r} is not an absolute path of plain characters"
            why = "it is part of units and of PYTHONPATH, where blanks, colons and the like end a word"
            self._problem(at, Problem("root", found, why, 'use a path such as "/opt/ddtree"'))

    def _expand_paths(self, fields: dict[str, Any], local: bool) -> None:
        """``~`` in files of this machine; in ``root`` only when the host is this machine, whose home is known here."""
        for key in ("known_hosts", "unit_template", *(("root",) if local else ())):
            if isinstance(fields.get(key), str):
                fields[key] = os.path.expanduser(fields[key])
        if isinstance(fields.get("identity"), list):
            fields["identity"] = [os.path.expanduser(str(file)) for file in fields["identity"]]
        if isinstance(fields.get("unit_template"), str):  # relative to the inventory, not to where one stands
            fields["unit_template"] = str(Path(self.path).parent / fields["unit_template"])

    def _address(self, at: KeyPath, text: object, user: object) -> Any:
        if text is None:
            self._problem(
                at,
                Problem("address", f"host {at[-1]} has no address", "", f'add address = "root@{at[-1]}"'),
            )
            return {"host": "missing"}
        if not isinstance(text, str):
            self._problem(
                at,
                Problem(
                    "address",
                    f"address {text!r} must be a text in quotes",
                    "",
                    'write it like address = "root@ct200:22"',
                ),
            )
            return {"host": "missing"}
        address = self._parse_address((*at, "address"), text)
        if address.get("user") is None and isinstance(user, str):
            address["user"] = user
        return address

    def _parse_address(self, where: KeyPath, text: str) -> dict[str, Any]:
        try:
            return parse_address(text).model_dump()
        except ValueError as error:
            self._problem(
                where[:-1],
                Problem(where[-1], f"{where[-1]} {text!r}: {error}", "", "write it as user@host:port or [IPv6]:port"),
            )
            return {"host": "missing"}

    # -- groups

    def _groups(self, tables: Table, named: Table) -> dict[str, tuple[str, ...]]:
        groups: dict[str, tuple[str, ...]] = {}
        for name, members in tables.items():
            self._name(("groups", name), name)
            if name in named:
                self._problem(("groups",), Problem(name, f"{name!r} is a host and a group", "", "rename the group"))
            if not isinstance(members, list) or not all(isinstance(member, str) for member in members):
                self._problem(
                    ("groups",), Problem(name, f"group {name} must be a list of names", "", f'{name} = ["HOST", ...]')
                )
        for name in tables:
            groups[name] = tuple(dict.fromkeys(self._members(name, tables, named, ())))
        return groups

    def _members(self, name: str, tables: Table, named: Table, above: tuple[str, ...]) -> Iterable[str]:
        if name in above:
            chain = " -> ".join((*above, name))
            self._problem(("groups",), Problem(name, f"groups contain each other: {chain}", "", "break the circle"))
            return
        members = tables[name] if isinstance(tables[name], list) else []
        for member in members:
            host, colon, instance = str(member).partition(":")
            if not colon and member in tables:
                yield from self._members(member, tables, named, (*above, name))
            elif host not in named:
                hint = checks.did_you_mean(host, (*named, *tables))
                self._problem(
                    ("groups",), Problem(name, f"group {name}: {member!r} is not a host.{hint}", "", f"repair {name}")
                )
            elif colon and instance not in (instances := self._instance_names(named, host)):
                hint = checks.did_you_mean(instance, instances)
                self._problem(
                    ("groups",),
                    Problem(name, f"group {name}: {host} has no instance {instance!r}.{hint}", "", f"repair {name}"),
                )
            else:
                yield member

    @staticmethod
    def _instance_names(named: Table, host: str) -> Iterable[str]:
        """As written, valid or not: one mistake in an instance must not be reported twice."""
        table = named[host]
        return table["instances"] if isinstance(table, dict) and isinstance(table.get("instances"), dict) else ()

    # -- small parts

    def _name(self, at: KeyPath, name: str) -> None:
        if name in RESERVED or not _HOST_NAME.fullmatch(name):
            what = f"{name!r} cannot be the name of a host or group"
            fix = "use letters, digits, dots and dashes"
            self._problem(at[:-1], Problem(name, what, "'all' means every host", fix))

    def _table(self, parent: Table, key: str, at: KeyPath) -> Table:
        value = parent.get(key, {})
        if isinstance(value, dict):
            return value
        self._problem(at, Problem(key, f"{key} must be a table", "", f"write it as [{dotted((*at, key))}]"))
        return {}

    def _known(self, at: KeyPath, table: Table, known: Iterable[str]) -> None:
        known = tuple(known)
        for key in table:
            if key not in known:
                hint = checks.did_you_mean(key, known)
                fix = f"remove it, or use one of: {', '.join(sorted(known))}" if not hint else f"rename {key}"
                self._problem(at, Problem(key, f"unknown key {key!r}.{hint}", "a misspelt key would be ignored", fix))

    def _model(
        self, kind: type[_Model], at: KeyPath, fields: dict[str, Any], layers: Mapping[KeyPath, Table]
    ) -> _Model | None:
        """Validate; a problem is placed in the table that set the key."""
        try:
            # JSON, because strict models then take lists for tuples and texts for enums, and nothing else
            return kind.model_validate_json(json.dumps(fields, default=str))
        except ValidationError as error:
            for problem in checks.explain_validation(error, fields):
                self._problem(_origin(problem, at, layers), problem)
            return None

    def _problem(self, at: KeyPath, problem: Problem) -> None:
        if (at, problem) not in self.problems:
            self.problems.append((at, problem))

    def _raise(self) -> None:
        if not self.problems:
            return
        lines = [self._say(at, problem) for at, problem in self.problems]
        _, first = self.problems[0]
        more = f" (and {len(lines) - 1} more)" if len(lines) > 1 else ""
        raise InventoryError(
            lines[0] + more,
            why=first.why or "the inventory must be right as a whole before anything is done",
            next=first.fix,
            data={"file": self.path, "problems": lines},
        )

    def _say(self, at: KeyPath, problem: Problem) -> str:
        path = (*at, *problem.key.split(".")) if problem.key else at
        line = line_of(self.text, path)
        place = f"{self.path}:{line}" if line else self.path
        return f"{place}: {dotted(path)}: {problem.found}"


def _added_up(key: str, layers: Layers) -> dict[str, Any]:
    """A table's entries from every layer, the nearer one winning entry by entry."""
    found: dict[str, Any] = {}
    for table in layers.values():
        found |= table[key] if isinstance(table.get(key), dict) else {}
    return found


def _origin(problem: Problem, at: KeyPath, layers: Mapping[KeyPath, Table]) -> KeyPath:
    """The table, nearest first, that set the key a problem hangs on."""
    first, *rest = problem.key.split(".")
    for layer, table in layers.items():
        if first in table and (not rest or rest[0] in table[first]):
            return layer
    return at
