"""``selftest``: prove a host's own GPU on the self-test pair, with the engine that a deploy would run there.

The suite itself is the engine's (``python -m sglang_ddtree.selftest``) and runs as well by hand, without ddtree-ops. It
leaves its record where the engine looks when a hybrid target is to be verified in trees: then no unsafe flag is needed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ddtree_ops.backends import parse_flags
from ddtree_ops.connection import Connection
from ddtree_ops.deploy import Engine
from ddtree_ops.errors import RefusedError
from ddtree_ops.facts.host import Gpu, HostFacts
from ddtree_ops.keeping import dtypes, kept
from ddtree_ops.model import Mode, Settings, States
from ddtree_ops.proofs import PROOFS
from ddtree_ops.release import engine_dir
from ddtree_ops.remote import Completed, Remote
from ddtree_ops.render.environment import server_environment
from ddtree_ops.selftest_pair import PackedPair
from ddtree_ops.shapes import parse_model

LIMIT_S = 300
RUN_S = LIMIT_S + 120.0
SEND_S = 300.0
QUICK_S = 20.0
LEASE_S = RUN_S + SEND_S
PAIR_GPUS = 2
BUSY = 0.1  # of a GPU's memory: the arms of the suite need most of it

Say = Callable[[str], None]


@dataclass(frozen=True)
class Proof:
    """What the suite found on one GPU."""

    target: str
    path: str
    record: Mapping[str, Any]

    @property
    def line(self) -> str:
        found = self.record
        what = f"{found['architecture']} on {found['backend']}, compute capability {found['compute_capability']}"
        what += f", {found['tp']} GPUs to a model" if found.get("tp", 1) > 1 else ""
        kept = f", states kept as {found['states']}" if "states" in found else ""
        auto = ", and mode auto" if "auto" in found else ""
        shown = found.get("prefix_cache", {}).items()
        cached = "".join(f"; with the prefix cache ({name}) up to {widest} nodes" for name, widest in shown)
        trees = f"trees up to {found['max_budget']} nodes{auto}{kept}{cached or '; not with the prefix cache'}"
        return f"proven: {what}, {trees} ({found['suite']['seconds']:.0f} s)"


def prove(
    connection: Connection, remote: Remote, settings: Settings, engine: Engine, pair: PackedPair, say: Say
) -> Proof:
    """Stage what is needed, run the suite, read its record. RefusedError if it proved nothing."""
    host = connection.host
    target, sudo = f"{host.name}:{settings.instance}", host.sudo and host.scope == "system"
    require_pair_fits(settings, target)
    facts = connection.facts([settings])
    for index in settings.gpus or (0,):
        require_free(facts, index, target)
    with connection.locked(f"selftest {settings.instance}", 0.0, say, lambda: None):
        connection.renew(LEASE_S)
        say(f"{target}: {engine.stage(connection, settings)}")
        folder = send_pair(remote, f"{host.root}/selftest-pair", pair, sudo)
        say(f"{target}: the suite starts, about two minutes")
        argv = command(settings, engine_dir(host.root, engine.digest), folder, states_of(remote, settings, sudo))
        done = remote.run(argv, deadline_s=RUN_S, sudo=sudo, on_line=lambda line: say(f"{target}: {line}"))
        return read_proof(remote, done, target, sudo)


def require_pair_fits(settings: Settings, target: str) -> None:
    """What shares a model is proven sharing one, and the pair's recurrent layers have two heads to share."""
    if len(settings.gpus) > PAIR_GPUS:
        raise RefusedError(
            f"the instance has {len(settings.gpus)} GPUs and the self-test pair is shared by {PAIR_GPUS} at most",
            target,
            "a proof is about the number of GPUs that share a model",
            f"ddtree-ops deploy {target} --mode linear     # or prove it there by hand: docs/engine.md",
        )


def require_free(facts: HostFacts, wanted: int, target: str) -> Gpu:
    """A GPU to prove: it must be there, and its memory must not be taken."""
    gpu = next((each for each in facts.gpus or () if each.index == wanted), None)
    if gpu is None:
        raise RefusedError(
            f"there is no GPU {wanted}", target, "the suite runs on the GPU", f"ddtree-ops doctor {facts.host}"
        )
    if gpu.memory_used > BUSY * gpu.memory_total:
        users = ", ".join(user.unit or user.command or str(user.pid) for user in gpu.users) or "unknown"
        raise RefusedError(
            f"GPU {wanted} holds {gpu.memory_used} of {gpu.memory_total} MiB (by {users})",
            target,
            "the suite needs a GPU to itself",
            f"ddtree-ops selftest {target} --gpu G     # another, of the same kind",
        )
    return gpu


def send_pair(remote: Remote, root: str, pair: PackedPair, sudo: bool) -> str:
    """The pair's folder on the host; sent once for its contents."""
    folder = f"{root}/{pair.digest}"
    mark = f"{folder}.complete"
    if remote.run(["test", "-f", mark], deadline_s=QUICK_S, sudo=sudo).rc == 0:
        return folder
    for argv, data in ((["mkdir", "-p", folder], None), (["tar", "-x", "-C", folder], pair.data)):
        done = remote.run(argv, deadline_s=SEND_S, sudo=sudo, stdin=data)
        if done.rc != 0:
            raise RefusedError(
                f"the pair could not be unpacked in {folder}: {done.err_text.strip()}",
                remote.name,
                "the suite runs on it",
                f"ddtree-ops doctor {remote.name}",
            )
    remote.put(b"", mark, deadline_s=QUICK_S, sudo=sudo)
    return folder


def states_of(remote: Remote, settings: Settings, sudo: bool) -> States:
    """How this instance's trees keep states, which is what is to be proven: as its settings say, else as the engine
    decides for its target. A target that is no folder here, or cannot be read, is taken for one that records are for.
    """
    if settings.states is not None:
        return settings.states
    done = remote.run(["cat", f"{settings.model}/config.json"], deadline_s=QUICK_S, sudo=sudo)
    try:
        target = parse_model(done.text, f"{settings.model}/config.json") if done.rc == 0 else None
    except RefusedError:
        target = None
    if target is None:
        return "records"
    nodes = settings.nodes if settings.mode.verifies_trees else 1
    types = dtypes(target, parse_flags(settings.extra_args), settings.env)
    return kept(None, Mode.TREE, target, nodes, types).states


def command(settings: Settings, engine: str, pair: str, states: States) -> list[str]:
    """The suite in the engine's environment, on the instance's GPUs."""
    environment = [f"{name}={value}" for name, value in server_environment(settings, engine_dir=engine).items()]
    python = f"{settings.venv}/bin/python"
    return [
        "env", *environment, python, "-m", "sglang_ddtree.selftest", "--pair", pair, "--proofs-dir", PROOFS,
        "--limit-s", str(LIMIT_S), "--states", states, "--tp", str(max(1, len(settings.gpus))),
    ]  # fmt: skip


def read_proof(remote: Remote, done: Completed, target: str, sudo: bool) -> Proof:
    """The record that the suite says it wrote; a suite that failed or did not run is refused with its own words."""
    said = [line for line in done.text.splitlines() if line.strip()]
    recorded = said[-1].rpartition("recorded in ") if said else ("", "", "")
    if done.rc not in (0, 1) or not recorded[1]:
        wrong = (done.err_text.strip().splitlines() or said or ["no word"])[-1]
        raise RefusedError(
            f"the suite did not run: {wrong}",
            target,
            "nothing is proven or withdrawn",
            f"ddtree-ops doctor {target.partition(':')[0]}",
        )
    path = recorded[2].strip()
    record = json.loads(remote.get(path, deadline_s=QUICK_S, sudo=sudo))
    if not record["passed"]:
        reasons = record["suite"]["unproven"]
        raise RefusedError(
            f"this GPU is not proven: {reasons[0]}" + (f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else ""),
            target,
            f"trees may not be exact here; the whole record is {path}",
            f"ddtree-ops deploy {target} --mode linear",
        )
    return Proof(target, path, record)
