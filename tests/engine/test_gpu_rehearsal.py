"""What a GPU session needs of SGLang, rehearsed on the CPU: the overlay on its sources, a server's answers captured."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from ports import reserved_port

from benchmarks.gpu import capture, overlay

ROOT = Path(__file__).parents[2]


def test_the_overlay_is_the_patched_engine_and_leaves_sglang_alone(sglang_src: Path, tmp_path: Path) -> None:
    package, site = sglang_src / "sglang", tmp_path / "site"
    text = package / "srt/models/qwen3_5_text.py"
    before = text.read_bytes()
    applied = overlay.build(site, package)
    assert applied == (ROOT / "patches/sglang-0.5.17/series").read_text().split()
    assert text.read_bytes() == before
    assert b"def set_dflash_layers_to_capture" in (site / "sglang/srt/models/qwen3_5_text.py").read_bytes()
    assert (site / "sglang/version.py").read_bytes() == (package / "version.py").read_bytes()
    points = importlib.metadata.distributions(path=[str(site)])
    found = [(point.name, point.value) for one in points for point in one.entry_points]
    assert found == [("ddtree", "sglang_ddtree.plugin:register")]
    overlay.build(site, package)  # again, over what is there
    with pytest.raises(overlay.OverlayError, match=r"must be SGLang 0\.5\.17 as published"):
        overlay.build(tmp_path / "twice", site / "sglang")


def test_a_python_finds_the_plugin_through_the_overlay(sglang_src: Path, tmp_path: Path) -> None:
    overlay.build(tmp_path / "site", sglang_src / "sglang")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path / "site"), str(ROOT)])}
    command = [sys.executable, "-m", "benchmarks.gpu.host", "--out", str(tmp_path)]
    subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, check=False, timeout=120)
    found = json.loads((tmp_path / "host.json").read_text())
    assert not any("plugin" in line for line in found["wrong"])
    environment["PYTHONPATH"] = str(ROOT)
    subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, check=False, timeout=120)
    assert any("plugin" in line for line in json.loads((tmp_path / "host.json").read_text())["wrong"])


@pytest.mark.skipif(importlib.util.find_spec("tokenizers") is None, reason="the CPU engine needs tokenizers")
def test_a_servers_answers_are_captured_without_the_hosts_paths(tmp_path: Path) -> None:
    pair = ROOT / "patches/selftest-pair"
    argv = [
        sys.executable, "-m", "sglang_ddtree.cpu.server", "--model-path", str(pair / "target"),
        "--speculative-algorithm", "DDTREE", "--speculative-draft-model-path", str(pair / "drafter"),
        "--speculative-ddtree-mode", "tree", *capture.MORE,
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "patches/sglang-ddtree/src")}
    with reserved_port() as port:
        found = capture.capture([*argv, "--port", str(port)], environment, port, tmp_path)
    assert found == []
    exchanges = {one["name"]: one for one in json.loads((tmp_path / "exchanges.json").read_text())}
    assert set(exchanges) == {question.name for question in capture.QUESTIONS}
    assert json.loads(exchanges["generate"]["body"])["output_ids"]
    assert exchanges["generate-stream"]["body"].count("data: ") > 2
    assert exchanges["error-too-long"]["status"] == 400
    written = "".join(path.read_text() for path in tmp_path.iterdir())
    assert str(ROOT) not in written
    assert str(Path.home()) not in written
    assert "<repository>/patches/selftest-pair/target" in (tmp_path / "startup.log").read_text()
    assert any("mem usage" in line for line in json.loads((tmp_path / "summary.json").read_text())["memory"])


def test_a_server_that_does_not_come_up_is_told_with_its_last_words(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", "raise SystemExit('CUDA out of memory')"]
    with reserved_port() as port:
        found = capture.capture(argv, os.environ, port, tmp_path)
    assert found == ["the server did not become healthy", "CUDA out of memory"]
    assert json.loads((tmp_path / "summary.json").read_text())["wrong"] == found
