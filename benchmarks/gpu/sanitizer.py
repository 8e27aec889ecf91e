"""The kernels' checks under compute-sanitizer: `python -m benchmarks.gpu.sanitizer --out DIR`.

Writes DIR/sanitizer.json. At small sizes, since a watched kernel is up to a thousand times slower. A host without the
tool, or whose GPU does not let it in, is reported as unable.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

TOOLS = ("memcheck", "racecheck")
UNABLE = ("Device not supported", "Failed to initialize", "driver is not supported")
ERRORS = re.compile(r"ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard")
TOOL = "compute-sanitizer"
LIMIT_S = 180.0


def found(tool: str, text: str, status: int) -> dict[str, Any]:
    """What a tool's output says: its own count of errors, and whether the checks passed under it."""
    counts = [int(match.group(1) or match.group(2)) for match in ERRORS.finditer(text)]
    unable = next((line.strip() for line in text.splitlines() if any(word in line for word in UNABLE)), "")
    wrong = []
    if not unable:
        if not counts:
            wrong.append(f"no summary, exit status {status}")
        elif sum(counts):
            wrong.append(f"{sum(counts)} errors or hazards")
        elif status:
            wrong.append(f"the checks failed, exit status {status}")
    return {"tool": tool, "counts": counts, "unable": unable, "wrong": wrong, "tail": text[-2000:]}


def watch(tool: str, limit_s: float = LIMIT_S) -> dict[str, Any]:
    """The tool and the program that it starts are ended together: the program outlives a tool that is killed alone."""
    command = [TOOL, "--tool", tool, sys.executable, "-m", "sglang_ddtree.kernels.checks", "--small"]
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            status: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        text = output.read().decode(errors="replace")
    print(text, flush=True)
    if status is None:  # says nothing of the kernels: others may have had the GPU
        unable = f"{tool} was not done after {limit_s:.0f} s"
        return {"tool": tool, "counts": [], "unable": unable, "wrong": [], "tail": text[-2000:]}
    return found(tool, text, status)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    tools: list[dict[str, Any]] = []
    unable = "" if shutil.which(TOOL) else f"there is no {TOOL} on the PATH"
    for tool in () if unable else TOOLS:
        tools.append(watch(tool))
        unable = unable or tools[-1]["unable"]
    (out / "sanitizer.json").write_text(json.dumps({"unable": unable, "tools": tools}, indent=1) + "\n")
    return int(any(tool["wrong"] for tool in tools))


if __name__ == "__main__":
    sys.exit(main())
