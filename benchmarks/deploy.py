#!/usr/bin/env python3
"""How long a deploy takes beside a plain scp + ssh script that does the same steps, on lab hosts. Needs root.

    python benchmarks/deploy.py [--rounds 5] [--hosts 1,2,4]      writes benchmarks/results/deploy.{json,md}

Three cases: a first deploy on hosts that have never seen the tool, a deploy that changes nothing, and a mode change.
The script stages the same overlay (hard links and the same changed files), switches the same link, writes the same
unit, reloads, restarts, waits for health and asks for one completion; it proves nothing, locks nothing and takes
nothing back. Both wait for the same stand-in server, so its load time is in both. They take turns; medians.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from ddtree_ops.bundle.build import build_bundle  # noqa: E402
from ddtree_ops.bundle.manifest import EngineManifest  # noqa: E402
from ddtree_ops.inventory import load_fleet  # noqa: E402
from ddtree_ops.lab.lab import Lab  # noqa: E402
from ddtree_ops.lab.machine import Machine  # noqa: E402
from ddtree_ops.lab.names import LabNames  # noqa: E402
from ddtree_ops.model import Mode, Settings  # noqa: E402
from ddtree_ops.render import render_target  # noqa: E402

LAB = "bench"
CASES = ("first", "no-op", "mode change")
UNIT = "sglang-ddtree-main.service"
SCRIPT_ROOT = "/opt/script"
WAIT = """\
import json, sys, time, urllib.request
body = json.dumps({"text": "hi", "sampling_params": {"max_new_tokens": 8, "temperature": 0}}).encode()
end = time.time() + 60
while True:
    try:
        urllib.request.urlopen("http://127.0.0.1:30000/health", timeout=30).read()
        break
    except OSError:
        if time.time() > end:
            sys.exit("not healthy")
        time.sleep(0.2)
request = urllib.request.Request("http://127.0.0.1:30000/generate", body, {"Content-Type": "application/json"})
assert json.loads(urllib.request.urlopen(request, timeout=30).read())["meta_info"]["completion_tokens"] == 8
"""
OVERLAY = f"""\
set -e
mkdir -p {SCRIPT_ROOT}/engine/site {SCRIPT_ROOT}/releases
cp -al /opt/sglang/venv/lib/python3.11/site-packages/sglang {SCRIPT_ROOT}/engine/site/
cd {SCRIPT_ROOT}/engine/site
tar tf /tmp/engine.tar | xargs rm -f
tar xf /tmp/engine.tar
"""
START = f"""\
set -e
mkdir -p {SCRIPT_ROOT}/releases/$1
mv /tmp/unit {SCRIPT_ROOT}/releases/$1/unit
ln -sfn releases/$1 {SCRIPT_ROOT}/current.new && mv -T {SCRIPT_ROOT}/current.new {SCRIPT_ROOT}/current
cp {SCRIPT_ROOT}/current/unit /etc/systemd/system/{UNIT}
systemctl daemon-reload
systemctl enable -q {UNIT}
systemctl reset-failed {UNIT} || true
systemctl restart {UNIT}
python3 /tmp/wait.py
"""
SAME = f"cmp /tmp/unit {SCRIPT_ROOT}/current/unit && systemctl is-active -q {UNIT} && python3 /tmp/wait.py"


@dataclass
class Script:
    """The plain script: files by scp, commands by ssh, hosts side by side."""

    folder: Path
    manifest: EngineManifest
    settings: Settings

    def ssh(self, machine: Machine, line: str, *words: str) -> None:
        argv = machine.ssh_argv("bash", "-s", "--", *words)
        subprocess.run(argv, input=line.encode(), check=True, capture_output=True)

    def scp(self, machine: Machine, *names: str) -> None:
        ssh = machine.ssh_argv("true")
        options = ssh[1 : next(i for i, word in enumerate(ssh) if "@" in word)]
        files = [str(self.folder / name) for name in names]
        subprocess.run(
            ["scp", "-q", *options, *files, f"root@{machine.address}:/tmp/"], check=True, capture_output=True
        )

    def write(self, mode: Mode) -> None:
        settings = self.settings.model_copy(update={"mode": mode, "budget": 32})
        host = load_fleet(Lab(LabNames(LAB)).names.inventory).hosts["lab1"]
        place = f"{SCRIPT_ROOT}/engine"
        text = render_target(host, settings, release=str(mode) * 8, engine_dir=place, systemd_version=252)
        (self.folder / "unit").write_text(text)
        (self.folder / "wait.py").write_text(WAIT)

    def first(self, machine: Machine) -> None:
        self.scp(machine, "engine.tar", "unit", "wait.py")
        self.ssh(machine, OVERLAY)
        self.ssh(machine, START, "linear")

    def noop(self, machine: Machine) -> None:
        self.scp(machine, "unit", "wait.py")
        self.ssh(machine, SAME)

    def change(self, machine: Machine) -> None:
        self.scp(machine, "unit", "wait.py")
        self.ssh(machine, START, "tree")


@dataclass
class Samples:
    """Seconds of one case on N hosts, each way; the tool's round trips a host."""

    tool: list[float] = field(default_factory=list)
    script: list[float] = field(default_factory=list)
    trips: list[int] = field(default_factory=list)


def timed(do: Callable[[], Any]) -> tuple[float, Any]:
    began = time.perf_counter()
    value = do()
    return time.perf_counter() - began, value


def tool(inventory: Path, *words: str) -> list[dict[str, Any]]:
    """One command of ddtree-ops as a person runs it: a process of its own."""
    argv = [sys.executable, "-m", "ddtree_ops", "-i", str(inventory), "deploy", *words, "--json"]
    done = subprocess.run(
        argv, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(words)}: {done.returncode}\n{done.stdout}{done.stderr}")
    found: list[dict[str, Any]] = json.loads(done.stdout)["outcomes"]
    return found


def each(machines: Sequence[Machine], do: Callable[[Machine], None]) -> None:
    with ThreadPoolExecutor(max_workers=len(machines)) as pool:
        list(pool.map(do, machines))


def one_round(lab: Lab, machines: list[Machine], script: Script, samples: dict[str, Samples]) -> None:
    """Fresh disks; the tool's three cases, then, on fresh disks again, the script's."""
    names = [machine.name for machine in machines]
    for machine in machines:
        lab.renew(machine)
    tree = ("--mode", "tree", "--budget", "32")
    for case, words in (("first", ()), ("no-op", ()), ("mode change", tree)):
        seconds, found = timed(lambda words=words: tool(lab.names.inventory, *names, *words))
        samples[case].tool.append(seconds)
        samples[case].trips += [outcome["round_trips"] for outcome in found]
    for machine in machines:
        lab.renew(machine)
    script.write(Mode.LINEAR)
    samples["first"].script.append(timed(lambda: each(machines, script.first))[0])
    samples["no-op"].script.append(timed(lambda: each(machines, script.noop))[0])
    script.write(Mode.TREE)
    samples["mode change"].script.append(timed(lambda: each(machines, script.change))[0])


def ssh_itself(machine: Machine) -> float:
    """What SSH itself needs: connect, run nothing, end."""
    return statistics.median(
        timed(lambda: subprocess.run(machine.ssh_argv("true"), check=True, capture_output=True))[0] for _ in range(5)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--hosts", default="1,2,4")
    given = parser.parse_args()
    counts = [int(part) for part in given.hosts.split(",")]
    bundle = build_bundle()
    folder = Path(tempfile.mkdtemp(prefix="ddtree-bench-"))
    lab = Lab(LabNames(LAB))
    rows: list[dict[str, Any]] = []
    try:
        machines = lab.up(max(counts))
        settings = load_fleet(lab.names.inventory).hosts["lab1"].instances["main"]
        script = Script(folder, bundle.manifest, settings)
        engine_tar(bundle.pack(), bundle.manifest, folder)
        bare = ssh_itself(machines[0])
        for count in counts:
            samples = {case: Samples() for case in CASES}
            for number in range(given.rounds):
                print(f"{count} hosts, round {number + 1} of {given.rounds}", file=sys.stderr)
                one_round(lab, machines[:count], script, samples)
            rows += [row(case, count, samples[case]) for case in CASES]
    finally:
        lab.down()
        shutil.rmtree(folder)
    write(rows, bare, given.rounds)


def engine_tar(packed: bytes, manifest: EngineManifest, folder: Path) -> None:
    """The same changed files that the tool sends, by their paths, as a script would pack them."""
    blobs = folder / "blobs"
    blobs.mkdir()
    subprocess.run(["tar", "xf", "-", "-C", str(blobs)], input=packed, check=True)
    tree = folder / "tree"
    for path, file in manifest.files.items():
        place = tree / path
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(blobs / file.sha256, place)
    subprocess.run(["tar", "cf", str(folder / "engine.tar"), "-C", str(tree), *sorted(manifest.files)], check=True)


def row(case: str, hosts: int, samples: Samples) -> dict[str, Any]:
    return {
        "case": case,
        "hosts": hosts,
        "tool_s": round(statistics.median(samples.tool), 3),
        "script_s": round(statistics.median(samples.script), 3),
        "ratio": round(statistics.median(samples.tool) / statistics.median(samples.script), 2),
        "round_trips": statistics.median(samples.trips),
        "tool_all_s": [round(each_, 3) for each_ in samples.tool],
        "script_all_s": [round(each_, 3) for each_ in samples.script],
    }


def write(rows: list[dict[str, Any]], bare: float, rounds: int) -> None:
    folder = ROOT / "benchmarks/results"
    machine = {"cpus": os.cpu_count(), "kernel": platform.release(), "python": platform.python_version()}
    load = os.getloadavg()[0]
    value = {"command": f"python benchmarks/deploy.py --rounds {rounds}", "machine": machine, "load": round(load, 1)}
    value |= {"ssh_true_s": round(bare, 3), "rows": rows}
    (folder / "deploy.json").write_text(json.dumps(value, indent=1) + "\n")
    noop = max(each_["tool_s"] for each_ in rows if each_["case"] == "no-op" and each_["hosts"] == 1)
    lines = [
        "# Deploy: the tool beside a plain scp + ssh script",
        "",
        f"`{value['command']}`, medians of {rounds}, on one machine with {machine['cpus']} cores that runs all hosts,",
        f"both clients and other work (load {load:.0f} at the end), Linux {machine['kernel']}. The stand-in",
        "server loads for 1.3 s, in every figure but the no-op's. The script locks, proves and takes back nothing.",
        "",
        "| case | hosts | ddtree-ops | script | ratio | round trips a host |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {r['case']} | {r['hosts']} | {r['tool_s']:.2f} s | {r['script_s']:.2f} s | {r['ratio']:.2f} "
        f"| {r['round_trips']:g} |"
        for r in rows
    ]
    lines += [
        "",
        f"`ssh HOST true` takes {bare:.2f} s here; a no-op deploy of one host takes {noop - bare:.2f} s more.",
    ]
    (folder / "deploy.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
