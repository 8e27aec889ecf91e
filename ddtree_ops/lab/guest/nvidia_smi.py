#!/usr/bin/python3
"""A stand-in for nvidia-smi on a lab host: two GPUs of the kind the fleet has, and the memory of their processes.

It answers the queries that a deploy asks, in the real tool's formats: ``-L``, ``--query-gpu=F,F --format=csv[,noheader]
[,nounits]``, ``--query-compute-apps=...`` and the version table. A process "uses" a GPU by writing
``/run/ddtree-lab/gpu/<pid>.json`` with ``{"uuid": ..., "mib": ...}``; the claim ends when the process does.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any, Dict, Iterator, Sequence

Row = Dict[str, Any]

DRIVER, CUDA = "580.95.05", "13.0"
NAME, TOTAL_MIB, RESERVED_MIB = "NVIDIA RTX PRO 6000 Blackwell Server Edition", 97887, 633
UUIDS = ("GPU-5f1d7c2e-0b6a-4f0e-9d3b-6a1c00000000", "GPU-5f1d7c2e-0b6a-4f0e-9d3b-6a1c00000001")
CLAIMS = "/run/ddtree-lab/gpu"
UNITS = {"memory": "MiB", "utilization": "%", "power": "W", "clocks": "MHz"}


def claims() -> list[tuple[int, str, int]]:
    """(pid, uuid, MiB) of every living process that holds GPU memory."""
    found = []
    for entry in sorted(os.listdir(CLAIMS)) if os.path.isdir(CLAIMS) else ():
        pid = entry.partition(".")[0]
        try:
            with open(f"/proc/{pid}/stat") as stat:
                alive = stat.read().rpartition(")")[2].split()[0] not in ("Z", "X")
            with open(os.path.join(CLAIMS, entry)) as claim:
                data = json.load(claim)
        except (OSError, ValueError):
            continue
        if alive:
            found.append((int(pid), data["uuid"], int(data["mib"])))
    return found


def gpu(index: int) -> Row:
    used = RESERVED_MIB + sum(mib for _, uuid, mib in claims() if uuid == UUIDS[index])
    busy = used > RESERVED_MIB
    return {
        "index": index, "uuid": UUIDS[index], "gpu_uuid": UUIDS[index], "name": NAME, "gpu_name": NAME,
        "pci.bus_id": f"00000000:{0x16 + index:02X}:00.0", "driver_version": DRIVER, "compute_cap": "12.0",
        "memory.total": TOTAL_MIB, "memory.used": used, "memory.free": TOTAL_MIB - used,
        "memory.reserved": RESERVED_MIB,
        "utilization.gpu": 37 if busy else 0, "utilization.memory": 9 if busy else 0,
        "temperature.gpu": 41 if busy else 28,
        "power.draw": "212.40" if busy else "31.07", "power.limit": "600.00", "clocks.sm": 2430 if busy else 180,
        "clocks.max.sm": 2430, "persistence_mode": "Enabled", "mig.mode.current": "Disabled", "compute_mode": "Default",
        "ecc.mode.current": "Enabled", "ecc.errors.uncorrected.volatile.total": 0, "pstate": "P0" if busy else "P8",
        "count": len(UUIDS), "display_active": "Disabled",
    }  # fmt: skip


def apps() -> Iterator[Row]:
    for pid, uuid, mib in claims():
        try:
            with open(f"/proc/{pid}/comm") as comm:
                name = comm.read().strip()
        except OSError:
            continue
        yield {"pid": pid, "process_name": name, "name": name, "gpu_uuid": uuid, "gpu_name": NAME,
               "used_memory": mib, "used_gpu_memory": mib}  # fmt: skip


def table(fields: Sequence[str], rows: Sequence[Row], formats: Sequence[str]) -> None:
    """Print rows as nvidia-smi's csv: a header with units unless told not to, fields apart by comma and blank."""

    def unit(field: str) -> str:
        return "MiB" if field.startswith("used_") else UNITS.get(field.partition(".")[0], "")

    if "noheader" not in formats:
        heads = [f"{field} [{unit(field)}]" if unit(field) else field for field in fields]
        sys.stdout.write(", ".join(heads) + "\n")
    for row in rows:
        cells = [str(row[field]) for field in fields]
        if "nounits" not in formats:
            cells = [f"{cell} {unit(field)}" if unit(field) else cell for cell, field in zip(cells, fields)]
        sys.stdout.write(", ".join(cells) + "\n")


def chosen(identity: str | None) -> Iterator[int]:
    for index, uuid in enumerate(UUIDS):
        if identity in (None, str(index), uuid):
            yield index
    if identity not in (None, *UUIDS, *map(str, range(len(UUIDS)))):
        print("No devices were found")
        sys.exit(6)


def query(fields: Sequence[str], rows: Sequence[Row], known: Sequence[str], formats: Sequence[str]) -> None:
    for field in fields:
        if field not in known:
            print(f'Field "{field}" is not a valid field to query.\n')
            sys.exit(2)
    if "csv" not in formats:
        print('"--format=" switch is missing. Please run "nvidia-smi -h" for help.')
        sys.exit(1)
    table(fields, rows, formats)


def main(argv: list[str]) -> int:
    options: dict[str, str] = {}
    identity: str | None = None
    position = 0
    while position < len(argv):
        word = argv[position]
        if word in ("-i", "--id"):
            position += 1
            identity = argv[position]
        else:
            key, _, value = word.partition("=")
            options["--id" if key == "-i" else key] = value
        position += 1
    identity = options.pop("--id", identity)
    formats = options.pop("--format", "").split(",")
    if "-L" in options or "--list-gpus" in options:
        for index in chosen(identity):
            print(f"GPU {index}: {NAME} (UUID: {UUIDS[index]})")
    elif "--query-gpu" in options:
        query(options["--query-gpu"].split(","), [gpu(i) for i in chosen(identity)], list(gpu(0)), formats)
    elif "--query-compute-apps" in options:
        wanted = {UUIDS[i] for i in chosen(identity)}
        rows = [row for row in apps() if row["gpu_uuid"] in wanted]
        known = ("pid", "process_name", "name", "gpu_uuid", "gpu_name", "used_memory", "used_gpu_memory")
        query(options["--query-compute-apps"].split(","), rows, known, formats)
    elif not options:
        print(f"NVIDIA-SMI {DRIVER}   Driver Version: {DRIVER}   CUDA Version: {CUDA}   (lab stand-in)")
        for index in chosen(identity):
            row = gpu(index)
            print(f"| {index}  {NAME} | {row['memory.used']} MiB / {TOTAL_MIB} MiB |")
    else:
        print("Invalid combination of input arguments. Please run 'nvidia-smi -h' for help.")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
