"""The kernels' checks under compute-sanitizer: `python -m benchmarks.gpu.sanitizer --out DIR`.

Writes DIR/sanitizer.json. At small sizes, since a watched kernel is up to a thousand times slower. A host without the
tool, or whose GPU does not let it in, is reported as unable.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
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


def watch(tool: str) -> dict[str, Any]:
    command = [TOOL, "--tool", tool, sys.executable, "-m", "sglang_ddtree.kernels.checks", "--small"]
    try:
        ran = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=LIMIT_S,
                             check=False)  # fmt: skip
    except subprocess.TimeoutExpired as late:
        text = (late.stdout or b"").decode(errors="replace") if isinstance(late.stdout, bytes) else ""
        return {
            "tool": tool,
            "counts": [],
            "unable": "",
            "wrong": [f"not done after {LIMIT_S:.0f} s"],
            "tail": text[-2000:],
        }
    print(ran.stdout, flush=True)
    return found(tool, ran.stdout, ran.returncode)


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
