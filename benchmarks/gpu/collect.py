"""Put a session's results where they are committed: `python -m benchmarks.gpu.collect DIR`, DIR as `--out` was.

benchmarks/results/gpu.json        the report without timelines
benchmarks/results/gpu.md          its tables; an existing page keeps what is written around them
benchmarks/results/gpu/            the benchmark's answers, records of the self-test, profiles, a server's answers
"""

from __future__ import annotations

import argparse
import json
import sys
import tarfile
from pathlib import Path

from benchmarks.gpu import tables

RESULTS = Path(__file__).parents[1] / "results"
MEASURED = ("benchmark/result.json", "kernel-times/kernels.json")
# Of the archive of answers: what is worth keeping in the repository, and where.
KEPT = {
    "benchmark/result.json": "benchmark.json",
    "kernel-times/kernels.json": "kernels.json",
    "selftest/proofs": "proofs",
    "selftest-records/proofs": "proofs",
    "selftest-two/proofs": "proofs",
    "selftest-two-records/proofs": "proofs",
    "parity-two/proofs": "proofs",
    "server/captures/exchanges.json": "server/exchanges.json",
    "server/captures/startup.log": "server/startup.log",
    "server-records/captures/startup.log": "server/startup-records.log",
}


def commanded(content: bytes) -> bytes:
    """A file of measurements whose command does not name the session's folder; written in one line if it was."""
    indent = 1 if content.startswith(b"{\n") else None
    return (json.dumps(tables.pathless(json.loads(content)), indent=indent) + "\n").encode()


def extract(archives: list[Path], into: Path) -> list[str]:
    """Write what is KEPT of the archives; returns what was written."""
    written = []
    for archive in archives:
        with tarfile.open(archive, "r:xz") as tar:
            for member in (one for one in tar.getmembers() if one.isfile()):
                for source, target in KEPT.items():
                    if member.name == source or member.name.startswith(f"{source}/"):
                        path = into / (target + member.name.removeprefix(source))
                        path.parent.mkdir(parents=True, exist_ok=True)
                        content = tar.extractfile(member)
                        assert content is not None
                        path.write_bytes(commanded(content.read()) if source in MEASURED else content.read())
                        written.append(str(path.relative_to(into)))
    return written


def collect(session: Path, results: Path) -> list[str]:
    """Everything; returns what was written, relative to ``results``."""
    report = tables.trimmed(json.loads((session / "report.json").read_text()))
    results.mkdir(parents=True, exist_ok=True)
    (results / "gpu.json").write_text(json.dumps(report, indent=1) + "\n")
    page = results / "gpu.md"
    page.write_text(tables.fill(page.read_text() if page.exists() else tables.blank(), report))
    archives = [path for name in ("results.tar.xz", "logs.tar.xz") if (path := session / name).exists()]
    return ["gpu.json", "gpu.md", *(f"gpu/{name}" for name in extract(archives, results / "gpu"))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("session", type=Path, metavar="DIR")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    try:
        written = collect(options.session, options.results)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("\n".join(written))
    return 0


if __name__ == "__main__":
    sys.exit(main())
