"""The helper that runs on a host: standard library only, Python 3.8 or newer.

The package is zipped into one content-addressed file, ``<root>/helper/<sha256[:16]>.pyz``, and run as
``python3 -I FILE``. It reads one JSON line from standard input,

    {"op": "switch", "args": {...}, "root": "/opt/ddtree", "scope": "system"}

followed by a raw payload (a tar stream) for the operations that take one, and writes JSON lines: any number of
``{"event": "progress", ...}`` and last ``{"event": "result", "ok": true, "value": {...}}`` or
``{"event": "result", "ok": false, "error": {"kind", "found", "why", "next", "data"}}``; ``kind`` is the name of a
class of ``ddtree_ops.errors``. Each module holds the operations of one concern in a dictionary ``OPS``.
"""
