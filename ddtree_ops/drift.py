"""What differs on a host from what was put there and recorded, each with the command that mends it.

``find`` asks the helper (one round trip a host); ``judge`` is pure.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ddtree_ops.connection import Connection
from ddtree_ops.facts.host import weight_version_of
from ddtree_ops.facts.unit import Condition, UnitState, parse_show
from ddtree_ops.model import Settings, unit_name
from ddtree_ops.release import short

DRIFT_S = 120.0


@dataclass(frozen=True)
class Difference:
    """One thing that is not as it was put there: its kind, where, what was found, and the command that mends it."""

    target: str
    kind: str
    where: str
    found: str
    repair: str

    def __str__(self) -> str:
        return f"{self.where}: {self.found}"


def find(connection: Connection, instances: Sequence[Settings]) -> list[Difference]:
    """Every difference of these instances, the venv and the engines they use."""
    asked = {"instances": [settings.instance for settings in instances]}
    return judge(connection.host.name, connection.call("drift", asked, deadline_s=DRIFT_S))


def judge(host: str, raw: Mapping[str, Any]) -> list[Difference]:
    """Read the helper's ``drift`` answer."""
    found = []
    for name, there in raw["instances"].items():
        found += _instance(host, name, there)
        target = f"{host}:{name}"
        if there["engine"] is not None:
            found += _engine(target, there["engine"], raw["engines"][there["engine"]])
        if there["venv"] is not None:
            made_for = raw["engines"].get(there["engine"], {}).get("sglang")
            found += _venv(target, host, there["venv"], raw["venvs"][there["venv"]], made_for)
    return found


def _instance(host: str, name: str, there: Mapping[str, Any]) -> list[Difference]:
    target, unit = f"{host}:{name}", parse_show(there["show"])
    deploy = f"ddtree-ops deploy {target}"
    again = f"{deploy} --restart"

    def one(kind: str, where: str, what: str, repair: str = deploy) -> Difference:
        return Difference(target, kind, where, what, repair)

    found = []
    if there["current_kind"] == "folder":
        place = "current"
        found.append(one("current", place, "is a real folder, not a link to a release", f"on {host}: mv it away"))
    if there["current"] != there["recorded"]:
        said = f"is {short(there['current'])}, recorded is {short(there['recorded'])}"
        found.append(one("record", "current", said, again))
    for release, wrong in sorted(there["damage"].items()):
        found += [one("release file", f"release {short(release)}", line, again) for line in wrong]
    if there["taking_back"] is not None:
        found.append(
            one("record", "state.json", "a take-back was begun and not ended", f"ddtree-ops rollback {target}")
        )
    if there["current"] is None:
        if there["unit_text"] is not None:
            found.append(one("unit", there["unit_path"], "there is a unit, but no release"))
        return found
    return found + _unit(target, host, there, unit) + _process(target, there, unit)


def _unit(target: str, host: str, there: Mapping[str, Any], unit: UnitState) -> list[Difference]:
    """The unit's file, what systemd loaded of it, and what else changes it."""
    path, name = there["unit_path"], unit_name(target.partition(":")[2])
    # not deploy: the inventory may want another release by now
    again = f"ddtree-ops rollback {target} --to {short(there['current'])}"
    found = []
    if there["unit_masked"]:
        found.append(Difference(target, "unit", path, "is masked", f"on {host}: systemctl unmask {name}"))
    elif there["unit_text"] is None:
        found.append(Difference(target, "unit", path, "is missing", again))
    elif there["unit_text"] != there["unit_wanted"]:
        said = f"is not the unit of the current release ({changes(there['unit_wanted'], there['unit_text'])})"
        found.append(Difference(target, "unit", path, said, again))
    if unit.needs_reload:
        said = "systemd runs an older text than the file's"
        found.append(Difference(target, "unit loaded", name, said, f"on {host}: systemctl daemon-reload"))
    found += [
        Difference(target, "drop-in", each, f"changes the unit: {oneline(text)}", f"on {host}: systemctl revert {name}")
        for each, text in sorted(there["drop_ins"].items())
    ]
    if unit.file_state == "disabled":
        found.append(Difference(target, "unit", name, "does not start at boot", f"on {host}: systemctl enable {name}"))
    return found


def _process(target: str, there: Mapping[str, Any], unit: UnitState) -> list[Difference]:
    """What runs: the release on its own command line, its age, its engine."""
    restart = f"ddtree-ops deploy {target} --restart"
    main = there["main"]
    where = unit_name(target.partition(":")[2])
    if main is None:
        if unit.condition in (Condition.FAILED, Condition.DOWN, Condition.ABSENT):
            why = f" ({unit.why_ended})" if unit.why_ended else ""
            return [Difference(target, "process", where, f"does not run{why}", f"ddtree-ops logs {target}")]
        return []
    where, found = f"process {main['pid']}", []
    version = weight_version_of(main["argv"])
    if version not in (None, there["current"]):
        said = f"runs release {short(version)}, current is {short(there['current'])}"
        found.append(Difference(target, "process", where, said, restart))
    elif version is None and main["started"] and there["switched"] and main["started"] < there["switched"] - 1:
        # Times count only where the process does not say what it runs: a server that a failed deploy left in peace is
        # older than the link that came back to it, and a clock that was set moves one of the two.
        found.append(Difference(target, "process", where, "began before its release became current", restart))
    if there["engine"] and main["python_path"] is not None and there["engine"] not in main["python_path"]:
        found.append(Difference(target, "process", where, f"does not use engine {short(there['engine'])}", restart))
    if main["program"].endswith(" (deleted)"):
        found.append(Difference(target, "process", where, "its Python was replaced since it began", restart))
    return found


def _engine(target: str, digest: str, there: Mapping[str, Any]) -> list[Difference]:
    where, deploy = f"engine {short(digest)}", f"ddtree-ops deploy {target} --restart"
    if not there["present"]:
        return [Difference(target, "engine", where, "is not on the host", deploy)]
    return [Difference(target, "engine file", where, line, deploy) for line in there["damage"]]


def _venv(target: str, host: str, path: str, there: Mapping[str, Any], made_for: str | None) -> list[Difference]:
    """The SGLang that pip installed, and the engine's linked copy of it: an edit in place changes both."""
    if not there["present"]:
        return [Difference(target, "venv", path, "has no SGLang", f"ddtree-ops bootstrap {host}")]
    version = made_for or there["versions"][0]
    mend = f"on {host}: {path}/bin/pip install --force-reinstall --no-deps sglang=={version}"
    if made_for is not None and there["versions"] != [made_for]:
        said = f"has SGLang {', '.join(there['versions'])}, the engine is made for {made_for}"
        return [Difference(target, "venv", path, said, mend)]
    found = [Difference(target, "venv file", path, line, mend) for line in there["damage"]]
    for line in there["linked"]:
        if line in there["damage"]:
            continue  # the copy is a hard link: mending the venv comes first, and shows whether the copy is left
        name = line.partition(" ")[0]
        copy = f"cp --remove-destination {there['site']}/{name} {there['engine_site']}/{name}"
        found.append(Difference(target, "engine file", there["engine_site"], line, f"on {host}: {copy}"))
    return found


def changes(before: str, after: str) -> str:
    """How much of a text is another: ``+2 -1 lines``, or the one line that was changed."""
    lines = list(difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=0))[2:]
    added = [line[1:] for line in lines if line.startswith("+")]
    gone = [line[1:] for line in lines if line.startswith("-")]
    if len(added) <= 1 and len(gone) <= 1:
        return f"{oneline(gone[0]) if gone else 'nothing'} became {oneline(added[0]) if added else 'nothing'}"
    return f"+{len(added)} -{len(gone)} lines"


def oneline(text: str, most: int = 100) -> str:
    words = " ".join(text.split())
    return words if len(words) <= most else words[: most - 3] + "..."
