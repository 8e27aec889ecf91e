"""Stands in for systemctl, journalctl and systemd-run: ``systemctl.py STATE_DIR PROGRAM ARGS...``.

Keeps each unit's state in STATE_DIR/units.json and every call in STATE_DIR/calls.jsonl. A started unit gets a new
InvocationID and is active at once. STATE_DIR/fail-VERB makes that verb fail.
"""

import json
import os
import pathlib
import sys
import uuid


def main() -> int:
    folder, program, *argv = sys.argv[1:]
    words = [a for a in argv if a not in ("--user", "--no-block")]
    with open(os.path.join(folder, "calls.jsonl"), "a") as log:
        log.write(json.dumps([program, *words]) + "\n")
    if program == "journalctl":
        path = os.path.join(folder, "journal.jsonl")
        if os.path.exists(path):
            with open(path) as src:
                sys.stdout.write(src.read())
        return 0
    if program == "systemd-run":
        return 1 if os.path.exists(os.path.join(folder, "fail-systemd-run")) else 0
    if words[0] == "--version":
        print("systemd 252 (fake)")
        return 0
    verb, rest = words[0], words[1:]
    if os.path.exists(os.path.join(folder, "fail-" + verb)):
        print(f"Failed to {verb} unit: told to fail", file=sys.stderr)
        return 1
    path = os.path.join(folder, "units.json")
    units = json.loads(pathlib.Path(path).read_text()) if os.path.exists(path) else {}
    unit = units.setdefault(rest[0], {}) if rest else {}
    if verb in ("start", "restart"):
        unit.update(ActiveState="active", SubState="running", InvocationID=uuid.uuid4().hex, NeedDaemonReload="no")
    elif verb == "stop":
        unit.update(ActiveState="inactive", SubState="dead", InvocationID="")
    elif verb == "show":
        for key, value in {"Id": rest[0], "ActiveState": "inactive", "NeedDaemonReload": "no", **unit}.items():
            print(f"{key}={value}")
        return 0
    tmp = f"{path}.{os.getpid()}"
    with open(tmp, "w") as out:
        json.dump(units, out)
    os.rename(tmp, path)
    return 0


sys.exit(main())
