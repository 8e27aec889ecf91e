"""The self-test pair on lab hosts, in place of a stand-in's made-up tokens: real weights, real trees, no GPU.

What it needs goes the way that real hosts without an index are served: wheels resolved and fetched here for the host's
Python, sent, and installed into a venv of their own by the bootstrap.
"""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ddtree_ops.bootstrap import Wish, carry_out, look
from ddtree_ops.bundle.wheel import SGLANG_VERSION
from ddtree_ops.connection import Connection
from ddtree_ops.errors import RefusedError, UnreachableError
from ddtree_ops.inventory.load import load_fleet
from ddtree_ops.lab.inventory import PAIR_MODELS, PAIR_PORT, PAIR_VENV, inventory_text
from ddtree_ops.lab.lab import Lab
from ddtree_ops.lab.machine import Machine
from ddtree_ops.lab.names import DEFAULT_LAB
from ddtree_ops.lab.system import THIS_MACHINE
from ddtree_ops.model import HostSpec
from ddtree_ops.selftest_pair import packed
from ddtree_ops.wiring import connect

# SGLang's own sources are what the engine is laid over; of its dependencies the CPU engine needs none.
REQUIREMENTS = (f"sglang=={SGLANG_VERSION}", "numpy>=2.2,<2.4", "safetensors>=0.5,<1", "tokenizers>=0.21,<1")
COPY_S = 120.0
# lab hosts have no curl
POST = """\
import sys, urllib.request as u
r = u.Request("http://127.0.0.1:%s/generate" % sys.argv[1], sys.argv[2].encode(), {"Content-Type": "application/json"})
sys.stdout.write(u.urlopen(r, timeout=100).read().decode())
"""
Connect = Callable[[HostSpec], Connection]


def install(lab: Lab, only: Sequence[Machine] = (), connect: Connect = connect) -> dict[str, list[str]]:
    """Weights and venv on every host of the lab, or on some; what was done on each. What is there already stays."""
    machines = lab.machines()
    if not machines:
        raise RefusedError("the lab has no hosts", THIS_MACHINE, next="ddtree-ops lab up")
    write_inventory(lab, machines)
    fleet = load_fleet(lab.names.pair_inventory)
    did = {}
    for machine in only or machines:
        lab.say(f"{machine.name}: the pair's weights")
        copy_weights(machine)
        connection = connect(fleet.hosts[machine.name])
        try:
            did[machine.name] = ["copied the pair's weights", *install_venv(connection, lab)]
        finally:
            connection.close()
    return did


def write_inventory(lab: Lab, machines: list[Machine]) -> None:
    names = lab.names
    text = inventory_text(
        [(machine.name, machine.address) for machine in machines],
        path=str(names.pair_inventory),
        identity=str(names.identity),
        known_hosts=str(names.known_hosts),
        lab="" if names.lab == DEFAULT_LAB else names.lab,
        pair=True,
    )
    partial = names.pair_inventory.with_suffix(".partial")
    partial.write_text(text)
    partial.replace(names.pair_inventory)


def install_venv(connection: Connection, lab: Lab) -> list[str]:
    host = connection.host.name
    wish = Wish(venv=PAIR_VENV, requirements=REQUIREMENTS, offline=True, deps=False)
    prospect = look(connection, wish)
    if prospect.complete:
        return []
    for line in prospect.lines():
        lab.say(f"{host}: {line}")
    with connection.locked(f"bootstrap {PAIR_VENV}", 0.0, lab.say, lambda: None):
        return carry_out(connection, prospect, lambda line: lab.say(f"{host}: {line}"))


def copy_weights(machine: Machine) -> None:
    line = f"mkdir -p {PAIR_MODELS} && tar -x -C {PAIR_MODELS}"
    data = packed().data
    done = subprocess.run(machine.ssh_argv(line), input=data, capture_output=True, timeout=COPY_S, check=False)
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip()
        raise UnreachableError(f"the weights could not be copied: {said}", machine.name, next="ddtree-ops lab status")


@dataclass(frozen=True)
class Said:
    """What the pair wrote, and what it took."""

    text: str
    tokens: int
    rounds: int | None  # None without speculation

    @property
    def line(self) -> str:
        if not self.rounds:
            return f"[{self.tokens} tokens, one by one]"
        return f"[{self.tokens} tokens in {self.rounds} rounds, {self.tokens / self.rounds:.2f} a round]"

    def data(self) -> dict[str, Any]:
        return {"text": self.text, "tokens": self.tokens, "rounds": self.rounds}


def complete(machine: Machine, prompt: str, tokens: int) -> Said:
    """Ask the pair's server on this host, greedily."""
    body = {"text": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}}
    line = f"python3 -c {shlex.quote(POST)} {PAIR_PORT} {shlex.quote(json.dumps(body))}"
    done = machine.ssh(line, timeout=COPY_S)
    if done.returncode != 0:
        raise UnreachableError(
            f"the pair does not answer: {(done.stderr.strip().splitlines() or ['no word'])[-1]}",
            machine.name,
            "it must be deployed there first",
            f"ddtree-ops -i {machine.names.lab.pair_inventory} deploy {machine.name}",
        )
    answer = json.loads(done.stdout)
    meta = answer["meta_info"]
    return Said(answer["text"], meta["completion_tokens"], meta.get("spec_verify_ct"))
