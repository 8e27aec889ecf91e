"""Gates and secrets on real hosts: each gate fails for its own reason, and the release before it is back."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from waiting import LIMIT_S

from ddtree_ops.errors import ExitCode
from ddtree_ops.lab.machine import Machine

PLANTED = "planted-key-8c1f00d5"
GATES = """
[defaults.instance.gates]
concurrencies = [1, 4]
prompts = 8
tokens = 16
min_speedup = 1.05
"""
# A tree that is faster by more than a busy machine can hide; slower than the stand-in's own, so that it waits mostly.
SURELY = "TOK_S=linear=40,tree=100"


@pytest.fixture
def inventory(cli: Any, tmp_path: Path) -> Callable[[str], Any]:
    """``inventory(more)``: the lab's inventory with more tables, in a file of its own; returns the runner."""

    def make(more: str) -> Any:
        file = tmp_path / "fleet.toml"
        file.write_text(cli.inventory.read_text() + more)
        return type(cli)(file, cli.home)

    return make


def outcome(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    return dict(json.loads(done.stdout)["outcomes"][-1])


def gates_of(host: Machine, release: str | None = None) -> dict[str, Any]:
    """What is recorded beside a release."""
    name = release or host.ssh("readlink /opt/ddtree/instances/main/current").stdout.strip().rpartition("/")[2]
    text = host.ssh(f"cat /opt/ddtree/instances/main/releases/{name}/gates.json").stdout
    return dict(json.loads(text)["gates"])


def test_a_tree_is_measured_against_a_baseline_made_on_the_way(host: Machine, inventory: Any) -> None:
    run = inventory(GATES)
    host.set_faults([SURELY])
    done = run("deploy", host.name, "--mode", "tree", "--budget", "32", "--json", timeout=240)
    assert outcome(done)["status"] == "deployed"
    found = gates_of(host)
    assert {name: gate["verdict"] for name, gate in found.items()} == {
        "identity": "passed",
        "attest": "passed",
        "completion": "passed",
        "lossless": "passed",
        "throughput": "passed",
        "soak": "skipped",
    }
    runs = found["throughput"]["evidence"]["runs"]
    assert [one["concurrency"] for one in runs] == [1, 4]
    assert all(1.05 < one["lower"] <= one["speedup"] for one in runs)
    # the baseline stays: a second budget is measured once, against the same numbers
    again = run("deploy", host.name, "--mode", "tree", "--budget", "16", timeout=240)
    assert "linear is deployed and measured first" not in again.stderr
    assert len(host.ssh("ls /opt/ddtree/baselines").stdout.split()) == 1


FAULTS = {
    "attest": (["BUDGET=8", "ONLY=tree"], "budget: asked for 32, resolved 8"),
    "lossless": (["DIVERGE_AT=5", "ONLY=tree"], "answers to 8 of 8 prompts part from linear's"),
    "throughput": (["TOK_S=linear=40,tree=20"], "slower than linear"),
    "soak": ([SURELY, "ACCEPT=tree=1.0"], "accept length 1.00 is below the floor"),
}


@pytest.mark.parametrize("gate", FAULTS)
def test_each_gate_fails_for_its_own_reason(gate: str, host: Machine, inventory: Any) -> None:
    faults, reason = FAULTS[gate]
    run = inventory(GATES + "soak_s = 6\n" if gate == "soak" else GATES)
    host.set_faults([SURELY])
    run("deploy", host.name, timeout=240)  # linear: proven, and the baseline
    linear = host.ssh("readlink /opt/ddtree/instances/main/current").stdout
    host.set_faults(faults)
    done = run(
        "deploy", host.name, "--mode", "tree", "--budget", "32", "--json", timeout=240, expect=ExitCode.ROLLED_BACK
    )
    error = outcome(done)["error"]
    assert error["data"]["gate"] == gate
    assert reason in error["found"]
    assert host.ssh("readlink /opt/ddtree/instances/main/current").stdout == linear
    status = json.loads(run("status", host.name, "--json").stdout)
    assert json.dumps(status).count("healthy")


def test_a_tree_that_fails_as_a_tree_leaves_linear_of_its_engine(host: Machine, inventory: Any) -> None:
    second = f'[hosts.{host.name}.instances.second]\nmode = "tree"\ngpus = [1]\nport = 30001\n'
    run = inventory(GATES + second)
    host.set_faults(["TOK_S=linear=40,tree=20"])
    run("deploy", f"{host.name}:main", timeout=240)  # linear, and the baseline of both
    done = run("deploy", f"{host.name}:second", "--json", timeout=240, expect=ExitCode.ROLLED_BACK)
    assert outcome(done)["error"]["data"]["gate"] == "throughput"
    assert "demoted to linear: release " in outcome(done)["notes"][-1]
    status = json.loads(run("status", f"{host.name}:second", "--json", expect=(0, 8)).stdout)
    assert '"mode": "linear"' in json.dumps(status)
    history = run("history", f"{host.name}:second", "--json").stdout
    assert "slower than linear at 1 stream" in history


def test_an_interruption_in_the_middle_of_a_measurement_is_taken_back(host: Machine, inventory: Any) -> None:
    run = inventory(GATES)
    run("deploy", host.name, timeout=240)
    linear = host.ssh("readlink /opt/ddtree/instances/main/current").stdout
    host.set_faults(["TOK_S=tree=2"])  # 8 s an answer: a measurement of minutes
    with run.start("deploy", host.name, "--mode", "tree", "--budget", "32") as began:
        assert began.stdout is not None
        for line in began.stdout:
            if "measuring with 1 stream:" in line:
                break
        began.send_signal(signal.SIGINT)
        rest = began.stdout.read()
        assert began.wait(timeout=LIMIT_S) == ExitCode.INTERRUPTED, rest
    assert "measuring with 4 streams" not in rest  # it ended within the first part of the measurement
    assert host.ssh("readlink /opt/ddtree/instances/main/current").stdout == linear
    run("status", host.name)
    run("deploy", host.name)  # nobody holds the lock


def test_a_measurement_outlasts_the_dead_man_switch_while_the_client_lives(host: Machine, inventory: Any) -> None:
    run = inventory(GATES.replace("tokens = 16", "tokens = 48"))
    host.set_faults(["TOK_S=linear=40"])  # half a minute of measuring
    run("deploy", host.name, "--dead-man", "10", timeout=240)
    assert "taken-back" not in run("history", host.name, "--json").stdout
    run("status", host.name)


def test_a_gate_is_skipped_with_a_reason_that_stays(host: Machine, inventory: Any) -> None:
    run = inventory(GATES)
    run("deploy", host.name, "--skip-gate", "throughput", expect=ExitCode.USAGE)
    unknown = run("deploy", host.name, "--skip-gate", "thruput", "--reason", "x", expect=ExitCode.USAGE)
    assert "unknown gate 'thruput'. Did you mean 'throughput'?" in unknown.stderr
    words = ("--skip-gate", "throughput", "--skip-gate", "lossless", "--reason", "measured by hand")
    run("deploy", host.name, "--mode", "tree", *words, timeout=240)
    assert gates_of(host)["throughput"]["line"] == "skipped: measured by hand"
    assert "gate throughput skipped: measured by hand" in run("status", host.name, "--json", expect=(0, 8)).stdout


def test_a_planted_key_is_nowhere_but_in_its_files(
    host: Machine, inventory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLANTED", PLANTED)
    run = inventory(f'{GATES}[defaults.instance.secrets]\napi_key = {{env = "PLANTED"}}\nTOKEN = {{env = "PLANTED"}}\n')
    said = [run("plan", host.name), run("deploy", host.name, timeout=240), run("status", host.name)]
    said += [run("logs", host.name), run("history", host.name), run("render", host.name)]
    host.set_faults(["CRASH_AT_START=1", "ONLY=tree"])
    said.append(run("deploy", host.name, "--mode", "tree", timeout=240, expect=ExitCode.ROLLED_BACK))
    assert not [done.args for done in said if PLANTED in done.stdout + done.stderr]
    # the server has them: it refuses a request without the key
    ask = "curl -s -o /dev/null -w '%{http_code}' http://127.0.0.1:30000/server_info"
    if host.ssh("command -v curl").returncode == 0:
        assert host.ssh(ask).stdout == "401"
    main = "$(systemctl show -p MainPID --value sglang-ddtree-main)"
    assert PLANTED in host.ssh(f"tr '\\0' '\\n' < /proc/{main}/environ | grep ^TOKEN").stdout
    assert PLANTED not in host.ssh("cat /proc/[0-9]*/cmdline | tr '\\0' ' '").stdout
    # on the host: only below the instance's secrets, and there for root alone
    where = host.ssh(f"grep -rl {PLANTED} /opt /etc /var /root /home 2>/dev/null; true").stdout.split()
    assert {str(Path(path).parent) for path in where} == {"/opt/ddtree/instances/main/secrets"}
    assert host.ssh("stat -c %a /opt/ddtree/instances/main/secrets/*").stdout.split() == ["600"] * len(where)
    assert PLANTED not in host.ssh("journalctl --no-pager -o cat").stdout
    # on this machine: nothing, evidence archives included
    for path in run.home.rglob("*"):
        if path.is_file():
            data = subprocess.run(["zcat", "-f", str(path)], capture_output=True, check=True).stdout
            assert PLANTED.encode() not in data, path
    assert list(run.home.rglob("evidence-*.tar.gz"))


def test_a_missing_secret_touches_nothing(host: Machine, inventory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PLANTED", raising=False)
    run = inventory('[defaults.instance.secrets]\napi_key = {env = "PLANTED"}\n')
    done = run("deploy", host.name, expect=ExitCode.USAGE)
    assert "secret api_key: the variable PLANTED is not set" in done.stdout
    assert host.ssh("ls /opt/ddtree/instances").returncode != 0
