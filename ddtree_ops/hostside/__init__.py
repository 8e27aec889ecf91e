"""The helper that runs on a host: standard library only, Python 3.8 or newer.

The package is zipped into one content-addressed file, ``<root>/helper/<sha256[:16]>.pyz``, and run as
``python3 -I FILE``. It reads one JSON line from standard input,

    {"op": "switch", "args": {...}, "root": "/opt/ddtree", "scope": "system",
     "host": "ct200", "lock": "<token>", "deadline_s": 30, "unit_dir": null, "bin": {"systemctl": ["systemctl"]}}

followed by a raw payload (a tar stream) for the operations that take one, and writes JSON lines: any number of
``{"event": "progress", ...}`` and last ``{"event": "result", "ok": true, "value": {...}}`` or
``{"event": "result", "ok": false, "error": {"kind", "found", "why", "next", "data"}}``; ``kind`` is the name of a
class of ``ddtree_ops.errors``. Only ``op`` and ``root`` are needed; ``bin`` and ``unit_dir`` let tests put their own
programs and folders in place of systemd's.

Each module holds the operations of one concern; ``__main__.OPERATIONS`` says which module holds which. An operation
that changes something carries the token of the host's lock, which is checked and its lease renewed before anything
else happens. Every change is made beside its place, flushed, and renamed: a ``kill -9`` at any instant leaves either
the state before or the state after.
"""
