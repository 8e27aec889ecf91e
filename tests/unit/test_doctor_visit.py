from __future__ import annotations

import io
import json
import os
import pwd
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from doctorhosts import DRAFTER, MODEL, VENV, healthy, host, settings

from ddtree_ops.clock import FakeClock
from ddtree_ops.doctor import parse_machine
from ddtree_ops.doctor.visit import questions, visit, with_flags
from ddtree_ops.hostside import doctor
from ddtree_ops.hostside.context import Context
from ddtree_ops.model import HostSpec, Mode
from ddtree_ops.planner import GIB, MIB
from ddtree_ops.ui import Output
from ddtree_ops.ui.doctor import show_visit


class Caller:
    """A connection whose host takes its time and answers ``raw``."""

    def __init__(self, raw: dict[str, Any], clock: FakeClock, seconds: float) -> None:
        self.host: HostSpec = host()
        self.asked: list[tuple[str, Any]] = []
        self._raw, self._clock, self._seconds = raw, clock, seconds

    def call(self, op: str, args: Mapping[str, Any] | None = None, *, deadline_s: float) -> dict[str, Any]:
        assert self._seconds < deadline_s
        self.asked.append((op, args))
        self._clock.sleep(self._seconds)
        return self._raw


def test_one_round_trip_and_the_clock_at_its_middle() -> None:
    clock = FakeClock(epoch=1_800_000_000.0)
    slow = Caller(healthy() | {"at": 1_800_000_004.0}, clock, 8.0)
    seen = visit(slow, [settings()], clock)
    assert [op for op, _ in slow.asked] == ["doctor"]
    assert seen.seconds == 8.0
    assert "clock-skew" not in {f.check.id for f in seen.findings}
    ahead = Caller(healthy() | {"at": clock.time() + 30}, clock, 8.0)
    assert "clock-skew" in {f.check.id for f in visit(ahead, [settings()], clock).findings}


def test_what_is_asked() -> None:
    asked = questions(host(), [settings(user="sglang"), settings(instance="linear", mode=Mode.LINEAR, port=30000)])
    assert asked["ports"] == [30000, 30001]
    assert asked["venvs"] == [VENV]
    assert asked["users"] == ["sglang"]
    assert set(asked["models"]) == {MODEL, DRAFTER}
    assert asked["path"].startswith(f"{VENV}/bin:/usr/local/cuda/bin:")


def test_a_model_that_is_a_name_is_not_looked_for_as_a_folder() -> None:
    asked = questions(host(), [settings(model="Qwen/Qwen3.6-27B")])
    assert set(asked["models"]) == {DRAFTER}


def test_pair_and_memory_of_each_instance() -> None:
    clock = FakeClock(epoch=1_800_000_000.0)
    seen = visit(Caller(healthy(), clock, 0.1), [settings()], clock)
    assert seen.proofs["tree"].fits
    plan = seen.plans["tree"]
    assert plan.ask.gpu_bytes == 97887 * MIB
    assert plan.items[0].bytes == 54_000_000_000 + (1 << 20), "the part that is not loaded does not count"
    assert plan.fits
    assert plan.left / GIB < 30


@pytest.mark.parametrize(
    ("extra", "want"),
    [
        ((), ("--max-mamba-cache-size", "20", "--mamba-ssm-dtype", "float32")),
        (
            ("--x", "--mamba-ssm-dtype", "bfloat16", "--y"),
            ("--x", "--mamba-ssm-dtype", "float32", "--y", "--max-mamba-cache-size", "20"),
        ),
        (("--max-mamba-cache-size=9",), ("--max-mamba-cache-size=20", "--mamba-ssm-dtype", "float32")),
    ],
)
def test_limits_among_the_extra_arguments(extra: tuple[str, ...], want: tuple[str, ...]) -> None:
    flags = ("--max-running-requests", "4", "--max-mamba-cache-size", "20", "--mamba-ssm-dtype", "float32")
    assert with_flags(extra, flags) == want


def test_the_plan_beside_the_server(capsys: pytest.CaptureFixture[str]) -> None:
    log = (
        "Load weight end. elapsed=12.6 s, type=Qwen3_5ForCausalLM, avail mem=44.1 GB, mem usage=50.29 GB.\n"
        "Load weight end. elapsed=0.8 s, type=DFlashDraftModel, avail mem=40.9 GB, mem usage=3.22 GB.\n"
        "Mamba Cache is allocated. max_mamba_cache_size: 12, conv_state size: 0.04GB, ssm_state size: 1.83GB "
        "intermediate_ssm_state_cache size: 11.95GB intermediate_conv_window_cache size: 0.23GB \n"
    )
    clock = FakeClock(epoch=1_800_000_000.0)
    raw = healthy()
    raw["memory_logs"] = {"sglang-ddtree-tree.service": {"rc": 0, "out": log, "err": ""}}
    seen = visit(Caller(raw, clock, 0.1), [settings(states="snapshots")], clock)
    rows = seen.compared["tree"]
    assert {row.name: row.close for row in rows} == {
        "target weights": True,
        "drafter weights": True,
        "recurrent states": True,
        "convolution states": True,
        "state snapshots": True,
        "convolution snapshots": True,
    }
    show_visit(Output(), seen, memory=True)
    shown = capsys.readouterr().out
    assert "state snapshots\t11.95 GiB\t11.95 GiB\t+0.0%" in shown
    assert "0\tNVIDIA RTX PRO 6000 Blackwell Server Edition\t12.0\t0/97887\tGPU-" in shown


# -- the helper's side ------------------------------------------------------------------------------------------------


def safetensors(path: Path, tensors: dict[str, tuple[str, int]]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, (dtype, size) in tensors.items():
        header[name] = {"dtype": dtype, "shape": [size], "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(at))


def ask(tmp_path: Path, **args: Any) -> dict[str, Any]:
    raw = doctor.doctor(Context({"root": str(tmp_path / "root")}, io.BytesIO(), io.BytesIO()), args)
    return json.loads(json.dumps(raw))


def test_weights_come_from_the_headers_alone(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    safetensors(model / "a.safetensors", {"model.layers.0.mlp.w": ("BF16", 64), "lm_head.weight": ("F32", 32)})
    safetensors(model / "b.safetensors", {"model.layers.1.mlp.w": ("BF16", 16), "mtp.fc.weight": ("BF16", 8)})
    index = {"weight_map": {"x": "a.safetensors", "y": "c.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    machine = parse_machine(ask(tmp_path, models={str(model): None}))
    folder = machine.models[str(model)]
    assert folder.parts == {"model.layers": 80, "lm_head.weight": 32, "mtp.fc": 8}
    assert folder.weights(vision=False) == 112
    assert folder.missing == ("c.safetensors",)
    assert folder.readable


def test_weight_files_that_are_cut_short(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "torn.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{")
    (model / "empty.safetensors").write_bytes(b"")
    safetensors(model / "short.safetensors", {"lm_head.weight": ("BF16", 64)})
    short = (model / "short.safetensors").read_bytes()
    (model / "short.safetensors").write_bytes(short[:-1])
    safetensors(model / "whole.safetensors", {"lm_head.weight": ("BF16", 64)})
    folder = parse_machine(ask(tmp_path, models={str(model): None})).models[str(model)]
    assert folder.damaged == ("empty.safetensors", "short.safetensors", "torn.safetensors")


def test_one_question_that_fails_hides_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(path: str, user: str | None) -> dict[str, Any]:
        raise OSError(f"no {path} for {user}")

    monkeypatch.setattr(doctor, "model", broken)
    raw = ask(tmp_path, models={"/x": None})
    assert "no /x" in raw["models"]["error"]
    assert raw["host"]["kernel"]
    assert parse_machine(raw).models == {}
    assert parse_machine(raw).free_bytes


def test_this_machine_is_read_without_error(tmp_path: Path) -> None:
    machine = parse_machine(
        ask(tmp_path, ports=[1], venvs=["/nowhere"], models={"/nowhere": None}, caches=["/var/cache"])
    )
    assert machine.free_bytes
    assert machine.port_range
    assert machine.venvs["/nowhere"].exists is False
    assert machine.models["/nowhere"].exists is False
    assert machine.caches["/var/cache"].mount


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes somebody else")
def test_who_may_read_is_asked_as_that_user_who_was_looked_up_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look-up in the child could wait for ever for a lock that another thread held as we forked."""
    parent, look = os.getpid(), pwd.getpwnam

    def only_here(user: str) -> Any:
        assert os.getpid() == parent
        return look(user)

    monkeypatch.setattr(doctor, "pwd", SimpleNamespace(getpwnam=only_here))
    with tempfile.NamedTemporaryFile(dir="/tmp") as file:
        os.chmod(file.name, 0o604)
        assert doctor.may_read(file.name, "nobody") is True
        os.chmod(file.name, 0o600)
        assert doctor.may_read(file.name, "nobody") is False
    assert doctor.may_read("/etc/hostname", "no-such-user-here") is False
