"""The parity suite on a real GPU, as a host's self-test runs it: about three minutes and 30 GiB of GPU memory.

Needs SGLang 0.5.17 with the plugin installed: pytest tests/gpu/test_parity_gpu.py
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu


@pytest.mark.timeout(900)
@pytest.mark.parametrize("target", ["hybrid", "dense"])
def test_a_host_can_prove_itself(target: str, tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    command = [sys.executable, "-m", "sglang_ddtree.parity.suite", "--section", f"{target}/selftest"]
    command += ["--out", str(tmp_path), "--proof", str(record), "--parallel", "9", "--limit-s", "840"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr[-2000:]
    proof = json.loads(record.read_text())
    assert proof["passed"] is True
    assert proof["max_budget"] == 64
