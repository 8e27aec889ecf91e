"""What happens to a command when nobody reads what it writes."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import LIMIT_S

from ddtree_ops.ui.output import Output
from ddtree_ops.ui.streams import Patient, gone, patient_streams

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "ddtree_ops", "-i", "inventory/ct200.toml"]


class Broken(io.StringIO):
    """Takes nothing, and has no descriptor."""

    encoding = "utf-8"

    def __init__(self, error: OSError) -> None:
        super().__init__()
        self.error = error

    def write(self, _text: str) -> int:
        raise self.error


def test_a_write_that_fails_is_kept_and_does_not_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    first = BrokenPipeError(32, "Broken pipe")
    monkeypatch.setattr(sys, "stdout", Broken(first))
    with patient_streams() as (out, _):
        assert not gone()
        print("a line")
        Output().line("another")
        assert gone()
        assert out.failure is first


def test_the_streams_are_put_back() -> None:
    before = sys.stdout, sys.stderr
    with contextlib.suppress(RuntimeError), patient_streams():
        assert isinstance(sys.stdout, Patient)
        raise RuntimeError
    assert (sys.stdout, sys.stderr) == before


def test_what_a_stream_cannot_encode_is_escaped() -> None:
    raw = io.BytesIO()
    out = Patient(io.TextIOWrapper(raw, "ascii"))
    out.write("naïve ✓\n")
    out.flush()
    assert raw.getvalue() == b"na\\xefve \\u2713\n"


def test_json_is_json_on_a_stream_of_ascii(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, "ascii"))
    with patient_streams():
        Output(json=True).data({"found": "naïve"})
    assert json.loads(raw.getvalue()) == {"found": "naïve"}


def run(args: list[str], stdout: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *args], cwd=ROOT, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=LIMIT_S
    )


def test_a_reader_that_left_is_no_failure() -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        done = run(["render", "ct200"], write)
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_result_that_is_lost_is_said() -> None:
    with open("/dev/full", "w") as full:
        done = run(["render", "ct200"], full.fileno())
    assert done.returncode == 1
    assert "standard output cannot be written: No space left on device" in done.stderr
    assert "Traceback" not in done.stderr
