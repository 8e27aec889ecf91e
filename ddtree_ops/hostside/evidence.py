"""What is needed to understand a failure, in one archive, with secrets taken out."""

from __future__ import annotations

import base64
import gzip
import io
import json
import os
import re
import tarfile
import time
from typing import Any, Match

from . import facts, files, journal, observe, procs, staging, state, units
from .context import Context, Op

HIDDEN = "[redacted]"
# Flags and variables whose value is a secret by their name, and tokens that show by their shape.
BY_NAME = re.compile(
    r"""((?:--[a-z-]*(?:api-key|token|password|secret)["']?(?:\s*[=,]\s*|\s+)"""
    r"""|(?:API_?KEY|TOKEN|PASSWORD|SECRET|CREDENTIALS?)["']?\s*[=:]\s*))"""
    r"""("[^"]{4,}"|'[^']{4,}'|[^\s"',;}\]]{4,})""",
    re.I,
)
BY_SHAPE = re.compile(r"\b(?:hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{20,})|(?<=Bearer )\S{8,}")


def redact(text: str, secrets: list[str]) -> str:
    """Take out the values that are known to be secret, then whatever looks like one."""
    for secret in sorted((s for s in secrets if len(s) >= 4), key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
        text = text.replace(json.dumps(secret)[1:-1], HIDDEN)
    return BY_SHAPE.sub(HIDDEN, BY_NAME.sub(hide, text))


def hide(found: Match[str]) -> str:
    quote = found.group(2)[0] if found.group(2)[0] in "\"'" else ""
    return found.group(1) + quote + HIDDEN + quote


def known_secrets(ctx: Context, instance: str) -> list[str]:
    """The contents of the secret files delivered for this instance."""
    folder = os.path.join(ctx.instance_dir(instance), "secrets")
    names = os.listdir(folder) if os.path.isdir(folder) else []
    return [s for s in (procs.text(os.path.join(folder, name)).strip() for name in names) if s]


def evidence(ctx: Context, args: dict[str, Any]) -> dict[str, Any]:
    """{instance, port, bind?, since?, headers?} -> {name, archive_b64, files}: a tar.gz, secrets redacted."""
    instance = args["instance"]
    secrets = known_secrets(ctx, instance) + list((args.get("headers") or {}).values())
    parts = collect(ctx, args)
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    top = f"evidence-{ctx.host}-{instance}-{stamp}"
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, text in sorted(parts.items()):
            data = redact(text, secrets).encode()
            member = tarfile.TarInfo(f"{top}/{name}")
            member.size, member.mtime, member.mode = len(data), int(time.time()), 0o600
            tar.addfile(member, io.BytesIO(data))
    packed = gzip.compress(raw.getvalue(), 6)
    return {"name": top + ".tar.gz", "archive_b64": base64.b64encode(packed).decode(), "files": sorted(parts)}


def collect(ctx: Context, args: dict[str, Any]) -> dict[str, str]:
    instance = args["instance"]
    shown = units.shown(ctx, instance)
    log = journal.entries(ctx, instance, last=20000, since=args.get("since"))
    processes = procs.of_unit(ctx.unit(instance))
    parts = {
        "unit-state.txt": ctx.run("systemctl", "show", ctx.unit(instance)).out,
        "unit-status.txt": ctx.run("systemctl", "status", "--no-pager", "-l", ctx.unit(instance)).out,
        "unit-file.txt": ctx.run("systemctl", "cat", ctx.unit(instance)).out,
        "journal.txt": "".join("{} {}\n".format(stamp(line["at"]), line["message"]) for line in log["lines"]),
        "processes.json": pretty(processes),
        "state.json": pretty(state.load(ctx, instance)),
        "history.jsonl": "".join(json.dumps(e) + "\n" for e in history(ctx, instance)),
        "main-pid.txt": "{}\n".format(shown.get("MainPID", "")),
        "nvidia-smi.txt": ctx.run("nvidia-smi", timeout_s=20.0).out,
        "gpus.json": pretty(facts.gpus(ctx)),
        "disk.json": pretty(facts.disk(ctx.root)),
        "host.json": pretty(facts.host(ctx)),
        "listeners.json": pretty(procs.listeners({int(args["port"])})),
    }
    for path in ("/ready", "/model_info", "/server_info", "/metrics"):
        parts["http{}.json".format(path.replace("/", "-"))] = pretty(observe.ask(args, "GET", path, 3.0))
    release = state.current(ctx, instance)
    for name in (staging.MANIFEST, "settings.json", "gates.json"):
        if release is not None:
            parts["release-" + name] = procs.text(os.path.join(ctx.release_dir(instance, release), name))
    return {name: text for name, text in parts.items() if text}


def history(ctx: Context, instance: str) -> list[dict[str, Any]]:
    return files.read_lines(os.path.join(ctx.instance_dir(instance), "history.jsonl"), last=100)


def pretty(value: Any) -> str:
    return json.dumps(value, indent=1, sort_keys=True) + "\n"


def stamp(at: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at))


OPS: dict[str, Op] = {"evidence": evidence}
