"""Drift of each kind on a real host: found, said with its repair, and gone once that repair was run as it stands."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import pytest

from ddtree_ops.lab.machine import Machine

UNIT = "sglang-ddtree-main.service"
ON_DISK = f"/etc/systemd/system/{UNIT}"
INSTANCE = "/opt/ddtree/instances/main"
SITE = "/opt/sglang/venv/lib/python3.11/site-packages"
EDITED = f"{SITE}/sglang/srt/utils/hf_transformers_utils.py"


class Cli(Protocol):
    inventory: Path

    def __call__(self, *words: str, expect: Any = 0, timeout: float = 120) -> Any: ...


def drift(cli: Cli, expect: int = 8) -> list[dict[str, str]]:
    return list(json.loads(cli("status", "lab1", "--drift", "--json", expect=expect).stdout)["differences"])


def repair(cli: Cli, host: Machine, command: str) -> None:
    """Run the repair as a person would who copies it: on the host what says so, else with ddtree-ops here."""
    if command.startswith(f"on {host.name}: "):
        host.inside("sh", "-c", command.partition(": ")[2])
    else:
        words = shlex.split(command)
        assert words[0] == "ddtree-ops", command
        cli(*words[1:])


# Kinds that do not hide one another are made at once: what is made, and the kinds of difference it must show as.
KINDS: dict[str, tuple[list[str], list[str]]] = {
    "edited": (
        [
            f"sed -i 's/^Restart=.*/Restart=no/' /etc/systemd/system/{UNIT}",
            f"mkdir /etc/systemd/system/{UNIT}.d",
            f"printf '[Service]\\nNice=5\\n' >/etc/systemd/system/{UNIT}.d/x.conf",
            f"systemctl daemon-reload && systemctl disable {UNIT}",
            f"echo ' ' >>{INSTANCE}/current/settings.json",
            "f=$(ls /opt/ddtree/engines/*/site/sglang/srt/models/qwen3_5.py) && cp $f /tmp/x && echo '#' >>/tmp/x"
            " && cp --remove-destination /tmp/x $f",
            "f=$(ls /opt/ddtree/engines/*/site/sglang_ddtree/algo.py) && echo '#' >>$f",
        ],
        ["unit", "drop-in", "unit", "release file", "engine file", "engine file"],
    ),
    "removed": ([f"rm /etc/systemd/system/{UNIT} && systemctl daemon-reload"], ["unit"]),
    "stopped": ([f"systemctl stop {UNIT}"], ["process"]),
    "of another release": (
        [
            f"cp {ON_DISK} /tmp/unit && sed -i 's/--weight-version [0-9a-f]*/--weight-version feed/' {ON_DISK}",
            f"systemctl daemon-reload && systemctl restart {UNIT} && cp /tmp/unit {ON_DISK} && systemctl daemon-reload",
        ],
        ["process"],
    ),
}


@pytest.fixture(scope="module")
def deployed(fleet: Callable[[int], list[Machine]]) -> Machine:
    return fleet(1)[0]


@pytest.fixture
def host(cli: Cli, deployed: Machine) -> Machine:
    """A host whose release was deployed and on which nothing was touched since."""
    cli("deploy", "lab1")
    assert drift(cli, expect=0) == []
    return deployed


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_is_found_and_its_repair_mends_it(cli: Cli, host: Machine, kind: str) -> None:
    lines, kinds = KINDS[kind]
    for line in lines:
        host.inside("sh", "-c", line)
    left = drift(cli)
    assert sorted(each["kind"] for each in left) == sorted(kinds), left
    if kind == "stopped":  # its repair is to read why; starting it again is for a person to decide
        assert left[0]["repair"] == "ddtree-ops logs lab1:main"
        cli("deploy", "lab1")
        left = drift(cli, expect=0)
    for _ in kinds:
        if left:
            repair(cli, host, left[0]["repair"])
            left = drift(cli, expect=(0, 8))  # type: ignore[arg-type]
    assert left == []


def test_a_venv_edited_in_place_is_told_apart_from_the_engines_copy_of_it(cli: Cli, host: Machine) -> None:
    original = host.inside("cat", EDITED).stdout
    host.inside("sh", "-c", f"echo '# by hand' >>{EDITED}")
    (only,) = drift(cli)
    assert only["kind"] == "venv file"
    assert "pip install --force-reinstall --no-deps sglang==0.5.17" in only["repair"]
    host.inside("sh", "-c", 'rm "$1" && printf %s "$2" >"$1"', "sh", EDITED, original)  # as pip does, without a network
    (only,) = drift(cli)
    assert only["kind"] == "engine file"
    repair(cli, host, only["repair"])
    assert drift(cli, expect=0) == []


def test_what_was_found_is_said_to_a_person(cli: Cli, host: Machine) -> None:
    host.inside("sed", "-i", "s/^Restart=.*/Restart=no/", f"/etc/systemd/system/{UNIT}")
    said = cli("status", "lab1", "--drift", expect=8).stdout
    assert "Restart=on-failure became Restart=no" in said
    assert "ddtree-ops rollback lab1:main --to " in said
    cli("deploy", "lab1")
    assert "no drift: everything is as it was deployed" in cli("status", "lab1", "--drift").stdout
