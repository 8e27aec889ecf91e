"""The doctor and the bootstrap on a real systemd host; the wheels are real ones, few and small."""

from __future__ import annotations

import json
from pathlib import Path

from ddtree_ops.lab.machine import Machine

from .conftest import Cli

WHEELS = ("--offline", "--no-deps", "--require", "sglang==0.5.17", "--require", "idna==3.10")


def elsewhere(cli: Cli, tmp_path: Path, **settings: str) -> Cli:
    """The lab's inventory with other settings for the first host's instance."""
    text = cli.inventory.read_text()
    for key, value in settings.items():
        lines = [line for line in text.splitlines() if not line.startswith(f"{key} =")]
        at = next(i for i, line in enumerate(lines) if line == "[defaults.instance]")
        text = "\n".join([*lines[: at + 1], f'{key} = "{value}"', *lines[at + 1 :]]) + "\n"
    path = tmp_path / "other.toml"
    path.write_text(text)
    return Cli(path, cli.home)


def test_doctor_of_a_lab_host(cli: Cli, host: Machine, tmp_path: Path) -> None:
    """Nothing is wrong with a host for the stand-in; for SGLang itself it lacks torch."""
    shown = json.loads(cli("doctor", host.name, "--json").stdout)
    assert not [f for f in shown["hosts"][0]["findings"] if f["level"] == "red"]
    assert shown["hosts"][0]["seconds"] < 5
    real = elsewhere(cli, tmp_path, launch_module="sglang.launch_server")
    shown = json.loads(real("doctor", host.name, "--json", expect=4).stdout)
    red = {f["id"] for f in shown["hosts"][0]["findings"] if f["level"] == "red"}
    assert "torch-absent" in red
    assert red <= {"torch-absent", "model-absent", "model-incomplete", "model-config", "model-unreadable"}


def test_bootstrap_of_a_bare_host(cli: Cli, host: Machine, tmp_path: Path) -> None:
    there = cli("bootstrap", host.name, "--dry-run", *WHEELS, expect=4)
    assert "was not made by ddtree-ops" in there.stderr, "the lab's own venv is somebody's"

    other = elsewhere(cli, tmp_path, venv="/srv/venv", user="llm")
    planned = other("bootstrap", host.name, "--dry-run", "--create-user", *WHEELS, timeout=600)
    assert "create user llm" in planned.stderr
    assert host.ssh("test -e /srv/venv").returncode != 0, "only said, not done"

    done = json.loads(other("bootstrap", host.name, "--create-user", "--json", *WHEELS, timeout=600).stdout)
    assert done["hosts"][0]["did"][0] == "created user llm"
    assert done["hosts"][0]["did"][-1] == "installed idna==3.10, sglang==0.5.17"
    found = host.ssh("/srv/venv/bin/python -c 'import idna, importlib.metadata as m; print(m.version(\"sglang\"))'")
    assert found.stdout.strip() == "0.5.17"
    assert host.ssh("id -u llm").returncode == 0

    again = json.loads(other("bootstrap", host.name, "--create-user", "--json", *WHEELS, timeout=600).stdout)
    assert again["hosts"][0] == {"host": host.name, "will": [], "did": []}, "the second time nothing is done"
