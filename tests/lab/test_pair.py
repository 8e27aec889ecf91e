"""The self-test pair on a real host: wheels by the offline way, real text, a chain and a tree that say the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ddtree_ops.errors import UnreachableError
from ddtree_ops.lab.lab import Lab
from ddtree_ops.lab.machine import Machine
from ddtree_ops.lab.pair import complete, install

from .conftest import Cli

PROMPT = "def read_config(path):\n"


def test_real_text_and_real_trees(lab: Lab, host: Machine, tmp_path: Path) -> None:
    did = install(lab, [host])
    assert did[host.name][0] == "copied the pair's weights"
    assert did[host.name][-1].startswith("installed ")
    assert install(lab, [host])[host.name] == ["copied the pair's weights"], "the second time the venv stays"

    with pytest.raises(UnreachableError, match="the pair does not answer"):
        complete(host, PROMPT, 4)

    cli = Cli(lab.names.pair_inventory, tmp_path)
    said = {}
    for mode in (("linear",), ("tree", "--budget", "16")):
        cli("deploy", host.name, "--mode", *mode, timeout=300)
        said[mode[0]] = complete(host, PROMPT, 40)
    chain, tree = said["linear"], said["tree"]
    assert tree.text == chain.text
    assert len(tree.text.split()) > 5
    assert chain.rounds is not None
    assert tree.rounds is not None
    assert tree.rounds < chain.rounds < 40

    shown = json.loads(cli("status", host.name, "--json", expect=(0, 8)).stdout)
    assert '"accept_length": ' in json.dumps(shown)
    lengths = [value for value in _values(shown, "accept_length") if value is not None]
    assert lengths
    assert lengths[0] > 1.5, "a tree's rounds give more than the target's own token"


def _values(data: object, key: str) -> list[float | None]:
    """Every value of ``key``, however deep."""
    if isinstance(data, dict):
        found = [value for name, value in data.items() if name == key]
        return found + [value for part in data.values() for value in _values(part, key)]
    return [value for part in data for value in _values(part, key)] if isinstance(data, list) else []


def test_a_host_without_a_gpu_proves_nothing(cli: Cli, host: Machine) -> None:
    """The lab's GPUs are made up: the suite is sent and started, finds no SGLang that runs, and says so."""
    done = cli("selftest", f"{host.name}:main", expect=4, timeout=300)
    assert "the suite did not run" in done.stderr
    assert host.ssh("test -e /opt/ddtree/proofs").returncode != 0
    assert host.ssh("ls /opt/ddtree/selftest-pair/*/target/model.safetensors").returncode == 0
