"""The lab itself: its hosts are real, its faults do what they say, and nothing of it stays."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from waiting import until

from ddtree_ops.errors import RefusedError
from ddtree_ops.lab.lab import Lab
from ddtree_ops.lab.machine import Machine
from ddtree_ops.lab.names import LabNames
from ddtree_ops.lab.system import cgroup2, run

Hosts = Callable[[int], list[Machine]]
SITE = "/opt/sglang/venv/lib/python3.11/site-packages"


def said(machine: Machine, line: str, user: str = "root") -> str:
    """The output of a shell line in the host, which must succeed."""
    done = machine.ssh(line, user=user)
    assert done.returncode == 0, f"{line}: {done.returncode} {done.stdout}{done.stderr}"
    return done.stdout.strip()


def footprint(names: LabNames) -> dict[str, list[str]]:
    """Everything a lab adds to this machine, kinds of which there is nothing left out."""
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    loops = run("losetup", "--list", "--noheadings", "--output", "BACK-FILE").stdout.split()
    commands = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            commands.append(Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " "))
    found = {
        "links": [name for name in os.listdir("/sys/class/net") if name.startswith(f"dd{names.tag}")],
        "namespaces": [path.name for path in Path("/run/netns").glob(f"ddtree-{names.lab}-*")],
        "mounts": [line for line in mounts if f"{names.dir}/" in line],
        "loops": [file for file in loops if file.startswith(f"{names.dir}/")],
        "groups": [path.name for path in cgroup2().glob(names.cgroup)],
        "processes": [command for command in commands if f"{names.dir}/" in command],
        "files": [str(names.dir)] if names.dir.exists() else [],
    }
    return {kind: things for kind, things in found.items() if things}


@pytest.fixture
def other(lab: Lab) -> Iterator[Lab]:
    """A second lab beside the session's, not yet up."""
    made = Lab(LabNames(f"{lab.names.lab}-other"))
    yield made
    made.down()


# ---- hosts are real


def test_a_host_is_a_running_systemd_with_its_own_name_and_boot(hosts: Hosts) -> None:
    first, second = hosts(2)
    assert said(first, "systemctl is-system-running") == "running"
    assert said(first, "hostname") == "lab1"
    for path in ("/etc/machine-id", "/proc/sys/kernel/random/boot_id", "/etc/ssh/ssh_host_ed25519_key.pub"):
        assert said(first, f"cat {path}") != said(second, f"cat {path}")
    assert said(first, "stat -c '%U %a' /root / /etc").split("\n") == ["root 700", "root 755", "root 755"]
    assert f"inet {second.address}/24" in said(second, "ip -4 addr show eth0")
    assert said(first, f"ssh-keyscan -t ed25519 {second.address} 2>/dev/null").split()[2] in second.host_key()


def test_units_restart_fail_and_keep_a_journal(host: Machine) -> None:
    unit = "[Service]\nExecStart=/bin/sh -c 'echo from-the-unit; exit 3'\n"
    host.inside("sh", "-c", 'printf %s "$1" >/etc/systemd/system/x.service', "sh", unit)
    said(host, "systemctl daemon-reload")
    said(host, "systemctl start x")
    until(lambda: "=failed" in said(host, "systemctl show x -p ActiveState"), "it has ended")
    shown = said(host, "systemctl show x -p Result -p ExecMainStatus")
    assert set(shown.splitlines()) == {"Result=exit-code", "ExecMainStatus=3"}
    until(lambda: "from-the-unit" in said(host, "journalctl -u x -o cat"), "the journal has what it said")


def test_users_with_and_without_sudo(host: Machine) -> None:
    assert said(host, "sudo -n id -u", user="ops") == "0"
    assert host.ssh("sudo -n true", user="visitor").returncode == 1
    assert host.ssh("true", user="nobody").returncode == 255


def test_hosts_hold_sglang_s_own_sources(host: Machine) -> None:
    program = "import importlib.metadata as m; print(m.version('sglang'))"
    assert said(host, f'/opt/sglang/venv/bin/python -c "{program}"') == "0.5.17"
    record = said(host, f"grep ^sglang/srt/server_args.py, {SITE}/sglang-0.5.17.dist-info/RECORD").split(",")[1]
    digest = said(host, f"sha256sum {SITE}/sglang/srt/server_args.py").split()[0]
    assert record == "sha256=" + base64.urlsafe_b64encode(bytes.fromhex(digest)).decode().rstrip("=")


def test_an_engine_is_staged_by_hard_links_not_copies(host: Machine) -> None:
    """The venv and /opt/ddtree share one file system: 75 MB of sources cost a few kilobytes of directory."""
    before = host.free_bytes()
    said(host, f"mkdir -p /opt/ddtree/engines/x && cp -al {SITE}/sglang /opt/ddtree/engines/x/")
    files = f"{SITE}/sglang/version.py /opt/ddtree/engines/x/sglang/version.py"
    one, two = said(host, f"stat -c %i:%h {files}").split()
    assert one == two
    assert one.endswith(":2")
    assert before - host.free_bytes() < 8 << 20


def test_nvidia_smi_shows_two_gpus(host: Machine) -> None:
    fields = "index,uuid,name,memory.total,memory.used,compute_cap"
    rows = said(host, f"nvidia-smi --query-gpu={fields} --format=csv,noheader,nounits").splitlines()
    assert [row.split(", ")[0] for row in rows] == ["0", "1"]
    assert {row.split(", ")[5] for row in rows} == {"12.0"}
    assert len({row.split(", ")[1] for row in rows}) == 2
    assert said(host, "nvidia-smi --query-compute-apps=pid,gpu_uuid,used_memory --format=csv,noheader") == ""
    assert host.ssh("nvidia-smi --query-gpu=nonsense --format=csv").returncode == 2


# ---- the stand-in, with SGLang's real sources beside it


def start_standin(machine: Machine, *flags: str, env: str = "") -> None:
    base = ["--model-path", "/models/Qwen3.6-27B", "--port", "30000"]
    words = " ".join(["/opt/sglang/venv/bin/python", "-m", "ddtree_standin", *base, *flags])
    unit = f"[Service]\nType=exec\nKillMode=mixed\nTimeoutStopSec=5\n{env}\nExecStart={words}\n"
    machine.inside("sh", "-c", 'printf %s "$1" >/etc/systemd/system/s.service', "sh", unit)
    said(machine, "systemctl daemon-reload && systemctl start s")


def ask(machine: Machine, path: str) -> tuple[int, dict[str, object]]:
    """GET from inside the host."""
    script = """
import sys, urllib.error, urllib.request
try:
    with urllib.request.urlopen("http://127.0.0.1:30000" + sys.argv[1], timeout=5) as answer:
        print(answer.status, answer.read().decode() or "{}")
except urllib.error.HTTPError as error:
    print(error.code, "{}")
except OSError:
    print(0, "{}")
"""
    status, _, body = machine.inside("python3", "-c", script, path).stdout.partition(" ")
    return int(status), json.loads(body)


def wait_healthy(machine: Machine) -> None:
    until(lambda: ask(machine, "/health")[0] == 200, "it is healthy")


def gpu_memory(machine: Machine) -> int:
    rows = said(machine, "nvidia-smi --query-compute-apps=used_memory --format=csv,noheader,nounits")
    return sum(int(row) for row in rows.split())


def test_the_stand_in_serves_under_systemd_and_frees_its_gpu(host: Machine) -> None:
    start_standin(host, "--enable-metrics", "--weight-version", "r1", "--speculative-algorithm", "DFLASH",
                  "--speculative-draft-model-path", "/models/Qwen3.6-27B-DFlash")  # fmt: skip
    wait_healthy(host)
    info = ask(host, "/server_info")[1]
    assert (info["version"], info["weight_version"], info["speculative_num_draft_tokens"]) == ("0.5.17", "r1", 16)
    assert "stand-in" in str(info["stand_in"])
    assert len(info) > 400  # all of SGLang's settings, from its real sources
    assert ask(host, "/ready")[0] == 404  # 0.5.17 has none
    assert gpu_memory(host) == 81920
    said(host, "systemctl stop s")
    assert "Result=success" in said(host, "systemctl show s -p Result")
    assert gpu_memory(host) == 0


@pytest.mark.parametrize("flags", ["--no-such-flag", "--speculative-ddtree-budget 8"])
def test_the_stand_in_refuses_flags_that_sglang_does_not_know(host: Machine, flags: str) -> None:
    done = host.ssh(f"/opt/sglang/venv/bin/python -m ddtree_standin --model-path /models/x {flags}")
    assert done.returncode == 2
    assert "unrecognized arguments" in done.stderr


def test_a_fault_file_breaks_the_next_start_only(host: Machine) -> None:
    host.set_faults(["CRASH_AT_START=1"])
    start_standin(host)
    until(lambda: said(host, "systemctl show s -p Result") == "Result=exit-code", "it has ended")
    assert "CUDA out of memory" in said(host, "journalctl -u s -o cat")
    host.set_faults([])
    start_standin(host)
    wait_healthy(host)


def test_a_stray_child_holds_the_gpu_until_systemd_kills_the_group(host: Machine) -> None:
    start_standin(host, env="Environment=STANDIN_STRAY_CHILD=1")
    wait_healthy(host)
    assert gpu_memory(host) == 81920 + 40960
    said(host, "systemctl stop s")
    assert gpu_memory(host) == 0


# ---- faults


def test_cut_and_heal(host: Machine) -> None:
    host.cut()
    assert host.ssh("true").returncode == 255
    assert host.inside("hostname").stdout.strip() == "lab1"  # it lives; only its cable is out
    host.heal()
    assert said(host, "hostname") == "lab1"


def test_freeze_and_thaw(host: Machine) -> None:
    host.freeze()
    assert host.state()["power"] == "frozen"
    assert host.ssh("true").returncode == 255
    host.thaw()
    assert said(host, "hostname") == "lab1"


def test_kill_resets_connections_and_keeps_the_disk(lab: Lab, host: Machine) -> None:
    said(host, "echo kept >/root/file && sync /root/file /root")
    waiting = subprocess.Popen(host.ssh_argv("sleep", "6000"), stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until(lambda: "sleep 6000" in host.inside("ps", "-eo", "args").stdout, "the command runs")
        host.kill()
        assert waiting.wait(120) == 255
    finally:
        waiting.kill()
        waiting.wait()
    refused = host.ssh("true")
    assert (refused.returncode, "refused" in refused.stderr) == (255, True)
    lab.power_on(host)
    assert said(host, "cat /root/file") == "kept"


def test_powercut_loses_what_was_not_synced(lab: Lab, host: Machine) -> None:
    said(host, "echo kept >/root/synced && sync /root/synced /root && echo gone >/root/unsynced")
    boot = said(host, "cat /proc/sys/kernel/random/boot_id")
    host.powercut()
    assert host.state() == {"name": "lab1", "address": host.address, "power": "off", "cable": "cut"}
    lab.power_on(host)
    assert said(host, "cat /root/synced") == "kept"
    assert host.ssh("test -e /root/unsynced").returncode == 1
    assert said(host, "cat /proc/sys/kernel/random/boot_id") != boot


def test_reboot_from_inside(host: Machine) -> None:
    boot = said(host, "cat /proc/sys/kernel/random/boot_id")
    assert host.ssh("systemctl reboot").returncode in (0, 255)
    until(
        lambda: host.ssh("cat /proc/sys/kernel/random/boot_id").stdout.strip() not in ("", boot), "it has booted anew"
    )
    host.wait()


def test_fill_and_empty(host: Machine) -> None:
    host.fill(leave_mib=1)
    assert host.free_bytes() <= 1 << 20
    full = host.ssh("dd if=/dev/zero of=/root/big bs=1M count=4")
    assert (full.returncode, "No space left on device" in full.stderr) == (1, True)
    host.empty()
    said(host, "dd if=/dev/zero of=/root/big bs=1M count=4")


def test_a_host_that_is_off_says_so(lab: Lab, host: Machine) -> None:
    host.kill()
    for action in (host.freeze, host.fill, host.leader):
        with pytest.raises(RefusedError, match="the host is off"):
            action()
    lab.power_on(host)


# ---- the command line


def command(lab: Lab, *words: str, expect: int = 0) -> dict[str, Any]:
    """Run `ddtree-ops lab ... --json` as a person would and return its document."""
    argv = [sys.executable, "-m", "ddtree_ops", "lab", *words, "--lab", lab.names.lab, "--json"]
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == expect, done.stdout + done.stderr
    document = json.loads(done.stdout)
    assert isinstance(document, dict)
    return document


def test_every_action_has_its_command(lab: Lab, host: Machine) -> None:
    states = {
        "cut": ("on", "cut"), "heal": ("on", "plugged"), "freeze": ("frozen", "plugged"), "thaw": ("on", "plugged"),
        "kill": ("off", "plugged"),
    }  # fmt: skip
    for action, (power, cable) in states.items():
        state = command(lab, action, "lab1")
        assert (state["power"], state["cable"]) == (power, cable), action
    assert [row["power"] for row in command(lab, "up", "-n", "1")["hosts"]][:1] == ["on"]
    assert command(lab, "powercut", "lab1")["power"] == "off"
    assert command(lab, "renew", "lab1") == {"name": "lab1", "address": host.address, "power": "on", "cable": "plugged"}
    assert command(lab, "fill", "lab1", "--leave", "1")["free_bytes"] <= 1 << 20
    assert command(lab, "fill", "lab1", "--empty")["free_bytes"] > 1 << 30
    assert command(lab, "fault", "lab1", "HANG_LOADING=1")["faults"] == {"HANG_LOADING": "1"}
    assert command(lab, "fault", "lab1", "--clear")["faults"] == {}
    ssh = [sys.executable, "-m", "ddtree_ops", "lab", "ssh", "--lab", lab.names.lab, "lab1", "id", "-un"]
    assert subprocess.run(ssh, capture_output=True, text=True, timeout=30, check=True).stdout == "root\n"


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (("cut", "lab9"), "no host lab9"),
        (("cut", "web1"), "no lab host called 'web1'"),
        (("fault", "lab1", "CRASH=1"), "no such fault: STANDIN_CRASH"),
        (("fault", "lab1", "CRASH_AT_START"), "NAME=VALUE"),
    ],
)
def test_wrong_words_are_usage_errors(lab: Lab, words: tuple[str, ...], found: str) -> None:
    assert found in command(lab, *words, expect=2)["error"]["found"]


# ---- up and down


def test_up_again_changes_nothing(lab: Lab, hosts: Hosts) -> None:
    machines = hosts(2)
    boots = [said(machine, "cat /proc/sys/kernel/random/boot_id") for machine in machines]
    lab.up(2)
    assert [said(machine, "cat /proc/sys/kernel/random/boot_id") for machine in machines] == boots


def test_up_boots_a_host_that_is_off_with_its_disk(lab: Lab, host: Machine) -> None:
    said(host, "echo kept >/root/file && sync /root/file /root")
    host.powercut()
    lab.up(1)
    assert said(host, "cat /root/file") == "kept"


def test_two_labs_share_nothing_and_the_second_leaves_nothing(host: Machine, other: Lab) -> None:
    (second,) = other.up(1, disk_mib=256)
    assert set(footprint(other.names)) == {"links", "namespaces", "loops", "groups", "processes", "files"}
    assert second.address.rpartition(".")[0] != host.address.rpartition(".")[0]
    assert said(second, "hostname") == said(host, "hostname") == "lab1"
    assert other.down()
    assert footprint(other.names) == {}
    assert not other.down()


def test_an_up_that_fails_leaves_nothing(other: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Machine) -> None:
        raise RefusedError(f"{self.name} must not boot")

    monkeypatch.setattr(Machine, "wait", fail)
    with pytest.raises(RefusedError, match="must not boot"):
        other.up(2, disk_mib=256)
    assert footprint(other.names) == {}


def test_a_killed_up_is_taken_down_by_name(other: Lab) -> None:
    """kill -9 in the middle of `lab up`; `lab down` then finds all of it, also without the lab's own record."""
    command = [sys.executable, "-m", "ddtree_ops", "lab", "up", "--lab", other.names.lab, "--disk", "256"]
    started = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until(lambda: "processes" in footprint(other.names), "a host boots", 300, every_s=0.0)
    finally:
        started.send_signal(signal.SIGKILL)
        started.wait()
    (other.names.dir / "lab.json").unlink()
    assert other.down()
    # a command that the killed one had just started may still end
    until(lambda: not footprint(other.names), "nothing of it is left")
