"""What ``doctor`` and the planner look at, as it was found, in one round trip. Reads only; judges nothing.

Slow questions are not asked: torch is read from its version file rather than imported, weights from the headers of
their files. What a driver that hangs would never answer is cut off after some seconds, and that is an answer too.
"""

from __future__ import annotations

import glob
import json
import os
import pwd
import re
import shutil
import struct
import threading
import time
from typing import Any

from . import facts, files, procs
from .context import Context, Op

GPU_QUERY = (
    "index,uuid,name,memory.total,memory.used,compute_cap,driver_version,mig.mode.current,persistence_mode,"
    "ecc.mode.current,ecc.errors.uncorrected.volatile.total,temperature.gpu,pci.bus_id"
)
CSV = "--format=csv,noheader,nounits"
XID = "NVRM: Xid|NVRM: The NVIDIA GPU|fallen off the bus"
DISTS = ("sglang", "torch", "triton", "flashinfer_python", "sglang_kernel", "sgl_kernel", "transformers")
HEADER_LIMIT = 64 << 20
MEMORY = "Load weight end|(?:Mamba|KV) Cache is allocated|records of recurrent states|max_total_num_tokens="
ANSWER_S = 4.0
SMI_S = 15.0  # without persistence mode the driver wakes every GPU first


def doctor(ctx: Context, args: dict[str, Any]) -> dict[str, Any]:
    """{ports, venvs, models: {path: user}, caches, path, units, users, proofs} -> raw answers for ``doctor.machine``.

    ``path`` is the PATH of the units, ``models`` the model and drafter folders with the user that must read them.
    """
    answers: dict[str, Any] = {}
    jobs = {
        "gpus": lambda: gpus(ctx),
        "kernel_log": lambda: ctx.run(
            "journalctl", "-k", "-b", "-o", "short-iso", "-n", "50", "--no-pager", "-g", XID, timeout_s=ANSWER_S
        ).raw(),
        "clock": lambda: ctx.run("timedatectl", "show", timeout_s=ANSWER_S).raw(),
        "nvcc": lambda: tool(ctx, args.get("path") or os.defpath, "nvcc", "--version"),
        "containers": lambda: containers(ctx),
        "memory_logs": lambda: {unit: memory_log(ctx, unit) for unit in args.get("units") or []},
        "venvs": lambda: {path: venv(path) for path in args.get("venvs") or []},
        "models": lambda: {path: model(path, user) for path, user in (args.get("models") or {}).items()},
    }
    threads = [threading.Thread(target=ask, args=(answers, name, job), daemon=True) for name, job in jobs.items()]
    for thread in threads:
        thread.start()
    answers.update(
        at=time.time(),
        host=facts.host(ctx),
        disk=facts.disk(ctx.root),
        tools={name: shutil.which(name, path=args.get("path")) for name in ("ninja", "nvcc", "gcc", "g++", "c++")},
        caches={path: place(path) for path in args.get("caches") or []},
        listeners=procs.listeners({int(p) for p in args.get("ports") or []}),
        users={user: known(user) for user in args.get("users") or []},
        proofs={path: files.read_json(path) for path in sorted(glob.glob(os.path.join(args["proofs"], "*.json")))}
        if args.get("proofs")
        else {},
        port_range=procs.text("/proc/sys/net/ipv4/ip_local_port_range"),
        reserved_ports=procs.text("/proc/sys/net/ipv4/ip_local_reserved_ports"),
    )
    for thread in threads:
        thread.join(timeout=max(0.1, ctx.left_s - 1.0))
    return {name: answers.get(name) for name in (*answers, *jobs)}


def ask(answers: dict[str, Any], name: str, job: Any) -> None:
    """One question; an answer that could not be had is its error, for the person to read."""
    try:
        answers[name] = job()
    except Exception as error:  # noqa: BLE001  one question that fails must not hide the others' answers
        answers[name] = {"error": f"{type(error).__name__}: {error}"}


def gpus(ctx: Context) -> dict[str, Any]:
    """nvidia-smi's own words about the GPUs and who uses them."""
    query = ctx.run("nvidia-smi", "--query-gpu=" + GPU_QUERY, CSV, timeout_s=SMI_S)
    pci = [entry for entry in glob.glob("/sys/bus/pci/devices/*/vendor") if procs.text(entry).strip() == "0x10de"]
    classes = [procs.text(os.path.join(os.path.dirname(entry), "class")).strip() for entry in pci]
    found = {"query": query.raw(), "on_bus": sum(1 for kind in classes if kind.startswith("0x03")), "apps": None}
    found["module"] = os.path.isdir("/sys/module/nvidia")
    if query.rc == 127:
        return found
    apps = ctx.run("nvidia-smi", "--query-compute-apps=" + facts.APP_QUERY, CSV, timeout_s=SMI_S)
    pids = {int(pid) for pid in re.findall(r"^[^,]+, *(\d+),", apps.out, re.M)}
    owners = {str(pid): dict(procs.about(pid), cgroup=procs.text(f"/proc/{pid}/cgroup")) for pid in pids}
    return dict(found, apps=apps.raw(), owners=owners)


def tool(ctx: Context, path: str, name: str, *args: str) -> dict[str, Any] | None:
    """What a program on the units' PATH says; None if it is not on it."""
    program = shutil.which(name, path=path)
    return ctx.run(program, *args, timeout_s=ANSWER_S).raw() if program else None


def memory_log(ctx: Context, unit: str) -> dict[str, Any] | None:
    """What the server that runs (or ran last) said about its memory; None if it never ran."""
    invocation = ctx.run("systemctl", "show", "-p", "InvocationID", "--value", unit, timeout_s=ANSWER_S).out.strip()
    if not re.match(r"^[0-9a-f]{32}$", invocation):
        return None
    only = f"_SYSTEMD_INVOCATION_ID={invocation}"
    return ctx.run("journalctl", only, "-o", "cat", "-n", "50", "--no-pager", "-g", MEMORY, timeout_s=ANSWER_S).raw()


def containers(ctx: Context) -> dict[str, Any] | None:
    """Running containers, and how the container engine manages devices; None without docker."""
    if shutil.which("docker") is None:
        return None
    shown = "{{json .ID}} {{json .Name}} {{json .HostConfig.DeviceRequests}} {{json .HostConfig.Runtime}}"
    listed = ctx.run("docker", "ps", "-q", "--no-trunc", timeout_s=ANSWER_S)
    ids = listed.out.split()
    inspected = ctx.run("docker", "inspect", "--format", shown, *ids, timeout_s=ANSWER_S).raw() if ids else None
    driver = ctx.run("docker", "info", "--format", "{{.CgroupDriver}}", timeout_s=ANSWER_S)
    return {"ps": listed.raw(), "inspect": inspected, "driver": driver.raw()}


def venv(path: str) -> dict[str, Any]:
    """A virtual environment by its files: Python, the distributions that matter, torch's CUDA."""
    sites = glob.glob(os.path.join(path, "lib", "python3*", "site-packages"))
    found: dict[str, list[str]] = {}
    for site in sites:
        for name in DISTS:
            infos = glob.glob(os.path.join(site, name + "-*.dist-info"))
            found.setdefault(name, []).extend(os.path.basename(i)[len(name) + 1 : -len(".dist-info")] for i in infos)
    return {
        "exists": os.path.isdir(path),
        "runs": os.access(os.path.join(path, "bin", "python"), os.X_OK),
        "cfg": procs.text(os.path.join(path, "pyvenv.cfg")),
        "dists": {name: versions for name, versions in found.items() if versions},
        "torch_version": "".join(procs.text(os.path.join(site, "torch", "version.py")) for site in sites),
        "ninja": os.access(os.path.join(path, "bin", "ninja"), os.X_OK),
    }


def model(path: str, user: str | None) -> dict[str, Any]:
    """A model folder: its configuration, its weights by the headers of their files, whether ``user`` can read it."""
    names = sorted(os.listdir(path)) if os.path.isdir(path) else []
    weights = [name for name in names if name.endswith(".safetensors")]
    total: dict[str, dict[str, int]] = {}
    whole = {name: tensors(os.path.join(path, name), total) for name in weights}
    return {
        "exists": os.path.isdir(path),
        "readable": may_read(os.path.join(path, "config.json"), user) if names else False,
        "config": procs.text(os.path.join(path, "config.json")),
        "index": sorted(set((index(path).get("weight_map") or {}).values())),
        "files": {name: os.path.getsize(os.path.join(path, name)) for name in weights},
        "weights": total,
        "damaged": sorted(name for name in weights if not whole[name]),
    }


def index(path: str) -> dict[str, Any]:
    try:
        found = json.loads(procs.text(os.path.join(path, "model.safetensors.index.json")) or "{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def tensors(path: str, total: dict[str, dict[str, int]]) -> bool:
    """Add the bytes of a file's weights, by the first parts of their names and by dtype; whether the file is whole."""
    with open(path, "rb") as src:
        head = src.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else HEADER_LIMIT
        try:
            header = json.loads(src.read(length).decode("utf-8")) if length < HEADER_LIMIT else None
        except ValueError:
            header = None
    if not isinstance(header, dict):
        return False
    last = 0
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            part = total.setdefault(".".join(name.split(".")[:2]), {})
            part[entry["dtype"]] = part.get(entry["dtype"], 0) + end - begin
            last = max(last, end)
    return os.path.getsize(path) >= 8 + length + last


def may_read(path: str, user: str | None) -> bool:
    """Whether ``user`` (or we) may read ``path``; asked of the kernel in a child that becomes that user.

    Who that is, is looked up before: another thread may be in the middle of such a look when we fork, and the child
    would wait for it for ever. The child makes system calls only.
    """
    if user is None or os.getuid() != 0:
        return os.access(path, os.R_OK)
    try:
        entry = pwd.getpwnam(user)
        groups = os.getgrouplist(user, entry.pw_gid)
    except (KeyError, OSError):
        return False
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.setgroups(groups)
            os.setgid(entry.pw_gid)
            os.setuid(entry.pw_uid)
            os.close(os.open(path, os.O_RDONLY))
            status = 0
        finally:
            os._exit(status)
    return os.waitpid(child, 0)[1] == 0


def known(user: str) -> bool:
    """Whether this host has such a user."""
    try:
        pwd.getpwnam(user)
    except KeyError:
        return False
    return True


def place(path: str) -> dict[str, Any]:
    """The file system that holds a folder (or will): its type and where it is mounted."""
    here = path
    while not os.path.isdir(here) and here != "/":
        here = os.path.dirname(here)
    device = os.stat(here).st_dev
    best = ("", "")
    for line in procs.text("/proc/self/mountinfo").splitlines():
        parts = line.split()
        rest = parts[parts.index("-") + 1 :]
        if parts[2] == f"{os.major(device)}:{os.minor(device)}":
            best = (parts[4], rest[0])
    return {"exists": here == path, "mount": best[0], "type": best[1]}


OPS: dict[str, Op] = {"doctor": doctor}
