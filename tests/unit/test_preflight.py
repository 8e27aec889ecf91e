"""What a deploy refuses before it touches anything."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from fakehost import host_of, settings

from ddtree_ops.errors import ExitCode, RefusedError
from ddtree_ops.facts.host import Gpu, GpuUser, HostFacts, InstanceFacts, Listening, OnDisk, Venv
from ddtree_ops.facts.root import OpenFolder
from ddtree_ops.preflight import findings, refuse

WANTED = settings(gpus=(1,))
VENV = Venv(WANTED.venv, True, "0.5.17")
GPUS = tuple(Gpu(index, f"GPU-{index}") for index in range(2))
FIT = HostFacts("h1", systemd=252, gpus=GPUS, venvs={WANTED.venv: VENV})


def found(**changes: Any) -> list[str]:
    return [f.found for f in findings(host_of(WANTED), WANTED, replace(FIT, **changes), "0.5.17")]


def test_fit_host() -> None:
    assert found() == []
    refuse(host_of(WANTED), WANTED, [])


def other(name: str, **changes: Any) -> dict[str, InstanceFacts]:
    theirs = settings(name, **changes)
    return {name: InstanceFacts(name, current="c", releases={"c": OnDisk(settings=theirs)})}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"systemd": None}, "systemd does not run here"),
        ({"systemd": 232}, "systemd 232 is too old"),
        ({"root_problem": "it is on a read-only file system"}, "/opt/ddtree cannot be written: it is on a read-only"),
        ({"open_folders": (OpenFolder("/opt", ("every user",), "root"),)}, "/opt may be written by every user"),
        ({"instances": {"a": InstanceFacts("a", masked=True)}}, "sglang-ddtree-a.service is masked"),
        ({"lingers": False}, "the user's systemd ends with their last session"),
        ({"venvs": {WANTED.venv: Venv(WANTED.venv, False)}}, "there is no virtual environment at /opt/sglang/venv"),
        ({"venvs": {WANTED.venv: Venv(WANTED.venv, True, None)}}, "has no SGLang; the engine is made for 0.5.17"),
        ({"venvs": {WANTED.venv: Venv(WANTED.venv, True, "0.5.23")}}, "has SGLang 0.5.23; the engine is made for"),
        ({"gpus": GPUS[:1]}, "there is no GPU 1; this host has 1 GPU"),
        ({"listening": (Listening(30000, 7, "nginx", "nginx.service"),)}, "port 30000 is taken by nginx (pid 7) of"),
        ({"instances": other("b", gpus=(0, 1), port=30001)}, "GPU 1 belongs to the deployed instance b"),
        ({"instances": other("b", gpus=(0,), port=30000)}, "port 30000 belongs to the deployed instance b"),
        ({"instances": {"a": InstanceFacts("a", current_problem="is a real folder, not a link")}}, "is a real folder"),
        (
            {"gpus": (GPUS[0], replace(GPUS[1], users=(GpuUser(9, 100, "train.py"),)))},
            "GPU 1 is used by train.py (pid 9)",
        ),
    ],
)
def test_unfit_host(changes: dict[str, Any], said: str) -> None:
    assert len(found(**changes)) == 1
    assert said in found(**changes)[0]


@pytest.mark.parametrize(
    "changes",
    [
        {"listening": (Listening(30000, 7, "sglang", "sglang-ddtree-a.service"),)},
        {"listening": (Listening(30001, 7, "nginx"),)},
        {"gpus": None},
        {"gpus": (GPUS[0], replace(GPUS[1], users=(GpuUser(9, 100, "sglang", "sglang-ddtree-a.service"),)))},
        {"gpus": (replace(GPUS[0], users=(GpuUser(9, 100, "train.py"),)), GPUS[1])},
        {"instances": other("b", gpus=(0,), port=30001)},
        {"instances": other("a", gpus=(1,), port=30000)},
    ],
)
def test_what_is_ours_or_not_in_the_way(changes: dict[str, Any]) -> None:
    assert found(**changes) == []


def test_refusal_names_the_instance_every_finding_and_a_command() -> None:
    listed = findings(host_of(WANTED), WANTED, replace(FIT, systemd=None, gpus=GPUS[:1]), "0.5.17")
    with pytest.raises(RefusedError) as raised:
        refuse(host_of(WANTED), WANTED, listed)
    error = raised.value
    assert (error.exit_code, error.host) == (ExitCode.REFUSED, "h1:a")
    assert len(error.data["problems"]) == 2
    assert error.why
    assert error.next.startswith("ddtree-ops ")
