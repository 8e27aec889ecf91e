from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from doctorhosts import (
    CACHE,
    DRAFTER,
    HERE,
    MODEL,
    VENV,
    answer,
    config,
    gpus,
    healthy,
    host,
    proof,
    settings,
    smi,
)
from hypothesis import given
from hypothesis import strategies as st

from ddtree_ops.backends import Case, refusals
from ddtree_ops.cli.app import COMMANDS
from ddtree_ops.doctor import CHECKS, Finding, Level, examine, parse_machine
from ddtree_ops.doctor.page import page
from ddtree_ops.model import Mode, Settings
from ddtree_ops.proofs import engine_rules, needs_proof, proven_by
from ddtree_ops.shapes import parse_model

Change = Callable[[dict[str, Any]], Any]


def found(raw: Any, *instances: Settings, now: float | None = None, **spec: Any) -> list[Finding]:
    return examine(host(**spec), instances or (settings(),), parse_machine(raw), now)


def changed(change: Change) -> dict[str, Any]:
    raw = healthy()
    change(raw)
    return raw


def test_a_healthy_host_has_no_finding() -> None:
    assert found(healthy()) == []


OPT = {"path": "/opt", "uid": 0, "owner": "root", "mode": 0o777, "group": "root", "members": []}
SIMPLE: list[tuple[str, str, Change]] = [
    ("systemd-absent", "not the init", lambda r: r["host"].update(systemd_runs=False)),
    ("systemd-absent", "not the init", lambda r: r["host"].update(systemd=answer("", 127))),
    ("systemd-old", "systemd 237", lambda r: r["host"].update(systemd=answer("systemd 237\n+PAM\n"))),
    ("root-unwritable", "read-only", lambda r: r["host"]["root_state"].update(read_only=True)),
    ("root-unwritable", "no permission", lambda r: r["host"]["root_state"].update(writable=False)),
    ("root-open", "/opt may be written by every user", lambda r: r["host"]["root_state"].update(folders=[OPT])),
    ("disk-low", "100 MiB free", lambda r: r["disk"].update(free=100 << 20)),
    ("inodes-low", "900 inodes", lambda r: r["disk"].update(inodes_free=900)),
    ("user-absent", "no user sglang", lambda r: r.update(users={"sglang": False})),
    ("clock-free", "NTPSynchronized=no", lambda r: r.update(clock=answer("NTP=no\nNTPSynchronized=no\n"))),
    ("venv-absent", "no bin/python", lambda r: r["venvs"][VENV].update(runs=False)),
    ("sglang-absent", "no sglang", lambda r: r["venvs"][VENV]["dists"].pop("sglang")),
    ("sglang-other", "SGLang 0.5.16", lambda r: r["venvs"][VENV]["dists"].update(sglang=["0.5.16"])),
    ("torch-cpu", "2.11.0+cpu", lambda r: r["venvs"][VENV].update(torch_version="__version__ = '2.11.0+cpu'\n")),
    ("torch-absent", "no torch", lambda r: r["venvs"][VENV].update(torch_version="", dists={"sglang": ["0.5.17"]})),
    ("nvcc-absent", "no nvcc", lambda r: (r["tools"].update(nvcc=None), r.update(nvcc=None))),
    ("nvcc-other", "CUDA 12.8, torch of 13.0", lambda r: r.update(nvcc=answer("release 12.8, V12.8.93"))),
    ("ninja-absent", "no ninja", lambda r: r["venvs"][VENV].update(ninja=False)),
    ("compiler-absent", "neither", lambda r: r["tools"].update({"g++": None})),
    ("cache-volatile", "tmpfs", lambda r: r["caches"][CACHE].update(type="tmpfs")),
    ("gpu-persistence", "off on GPU 0, 1", lambda r: r.update(gpus=gpus(smi("mixed.csv")))),
    ("model-absent", f"there is no {MODEL}", lambda r: r["models"][MODEL].update(exists=False, config="", weights={})),
    ("model-unreadable", "cannot read", lambda r: r["models"][MODEL].update(readable=False)),
    ("model-incomplete", "1 files", lambda r: r["models"][MODEL]["files"].popitem()),
    ("model-incomplete", "x.safetensors in", lambda r: r["models"][MODEL].update(damaged=["x.safetensors"])),
    ("model-config", "is not a model configuration", lambda r: r["models"][MODEL].update(config="{")),
    ("model-config", f"{DRAFTER}/config.json", lambda r: r["models"][DRAFTER].update(config="[]")),
]


@pytest.mark.parametrize(("id", "seen", "change"), SIMPLE, ids=[f"{i}-{id}" for i, (id, _, _) in enumerate(SIMPLE)])
def test_what_is_wrong_is_named(id: str, seen: str, change: Change) -> None:
    results = {f.check.id: f for f in found(changed(change), settings(user="sglang"))}
    assert id in results
    assert seen in results[id].seen


def test_clock_skew_is_measured_against_this_machine() -> None:
    assert [f.check.id for f in found(healthy(), now=1_800_000_042.0)] == ["clock-skew"]
    assert found(healthy(), now=1_800_000_002.0) == []


# -- GPUs -------------------------------------------------------------------------------------------------------------


def with_gpus(csv: str, **more: Any) -> dict[str, Any]:
    return changed(lambda r: r.update(gpus=gpus(csv, **more)))


def ids(results: list[Finding]) -> list[str]:
    return [f.check.id for f in results]


@pytest.mark.parametrize(
    ("text", "rc", "err", "said"),
    [
        (smi("no-driver.txt"), 9, "", "couldn't communicate with the NVIDIA driver"),
        (smi("mismatch.txt"), 18, "", "Driver/library version mismatch"),
        (smi("handle-only.txt"), 255, "", "Unable to determine the device handle"),
        ("", 127, "nvidia-smi: not found", "nvidia-smi is not installed"),
        ("No devices were found\n", 6, "", "No devices were found"),
        ("", 0, "", "there is no GPU"),
    ],
)
def test_no_gpu_can_be_listed(text: str, rc: int, err: str, said: str) -> None:
    results = found(with_gpus(text, rc=rc, err=err, on_bus=8))
    assert ids(results) == ["gpu-driver"]
    assert said in results[0].seen


def test_a_driver_that_is_slow_only_warns() -> None:
    results = found(with_gpus("", rc=124, err="nvidia-smi: no answer within 15 s", on_bus=8))
    assert ids(results) == ["gpu-silent"]


def test_a_host_without_gpus_needs_none() -> None:
    assert found(with_gpus("", rc=127, on_bus=0), settings(gpus=()), gpus=0) == []


def test_h200() -> None:
    """A real answer: one H200 in a virtual machine without systemd, without a venv and without models."""
    raw = json.loads((HERE / "doctor/h200.json").read_text())
    machine = parse_machine(raw)
    card = machine.gpus.card(0)
    assert card is not None
    assert (card.name, card.memory_mib, card.capability, card.driver) == ("NVIDIA H200", 143771, "9.0", "580.159.04")
    assert (card.mig, card.persistent, card.ecc, card.uncorrected, card.bus) == (False, True, True, 0, "00:06")
    assert machine.nvcc == "13.0"
    assert machine.port_range == (32768, 60999)
    assert ids(found(raw, settings(venv="/usr"))) == ["systemd-absent", "sglang-absent", "torch-absent", "ninja-absent"]


@pytest.mark.parametrize(
    "changes",
    [
        {"engine": "0" * 64},
        {"architecture": "Qwen3NextForCausalLM"},
        {"compute_capability": "9.0"},
        {"driver": "570.1"},
        {"max_budget": 8},
        {"passed": False},
    ],
)
def test_a_record_of_something_else_proves_nothing(changes: dict[str, Any]) -> None:
    raw = healthy()
    raw["proofs"] = {"/opt/ddtree/proofs/a.json": proof(**changes), "/opt/ddtree/proofs/b.json": None}
    assert ids(found(raw)) == ["unproven"]


@pytest.mark.parametrize("mode", [Mode.TREE, Mode.AUTO])
@pytest.mark.parametrize("kept", ["snapshots", "records"])
def test_what_the_engine_ships_as_proven_needs_no_record_on_the_host(mode: Mode, kept: str) -> None:
    flags = {"--speculative-ddtree-states": kept}
    case = Case(mode, flags, parse_model(config("shape-27b"), MODEL), (9, 0))
    (name, budget), *others = [
        (name, record["max_budget"])
        for name, record in engine_rules().shipped()
        if record.get("states", "snapshots") == kept
    ]
    assert others == []
    assert proven_by(case, budget, None, ()) == name
    assert proven_by(case, budget + 1, None, ()) is None
    assert proven_by(Case(mode, flags, case.target, (12, 0)), budget, None, ()) is None


def test_trees_are_not_proven_on_every_gpu() -> None:
    csv = json.loads((HERE / "doctor/h200.json").read_text())["gpus"]["query"]["out"]
    assert found(with_gpus(csv)) == []
    results = found(with_gpus(csv.replace("H200", "L40S").replace("9.0", "8.9")))
    assert ids(results) == ["unproven"]
    assert "NVIDIA L40S (compute capability 8.9)" in results[0].seen


def test_a_driver_that_is_too_old_for_torch() -> None:
    results = found(with_gpus(smi("rtx-pro-6000-x8.csv").replace("580.95.05", "570.124.06")))
    # the record was made under the newer driver
    assert ids(results) == ["driver-old", "unproven"]
    assert "needs 580.65 or newer" in results[0].seen


def test_a_gpu_that_requires_reset() -> None:
    results = found(with_gpus(smi("requires-reset.csv")), settings(gpus=(6,)), settings(instance="other", port=30002))
    sick = [f for f in results if f.check.id == "gpu-sick"]
    assert [f.target for f in sick] == ["ct200:tree"], "the other instance's GPU is fine"
    assert "GPU requires reset" in sick[0].seen
    assert sick[0].repair == "nvidia-smi -i 6 -pm 0 && nvidia-smi -i 6 -r"


def test_a_gpu_that_fell_off_the_bus() -> None:
    log = (
        "2026-11-29T23:00:01+00:00 ct200 kernel: NVRM: Xid (PCI:0000:c1:00): 79, pid='<unknown>', GPU has fallen off\n"
        "2026-11-29T23:00:02+00:00 ct200 kernel: NVRM: The NVIDIA GPU 0000:c1:00.0\n"
        "                                 NVRM: fallen off the bus and is not responding to commands.\n"
        "2026-11-29T23:00:05+00:00 ct200 kernel: NVRM: Xid (PCI:0000:21:00): 31, pid=812, name=python\n"
    )
    raw = with_gpus(smi("handle.csv"), on_bus=8)
    raw["kernel_log"] = answer(log)
    results = found(raw)
    assert ids(results) == ["gpu-lost", "gpu-xid", "gpu-xid"]
    assert results[0].seen.startswith("7 of 8 answer: Unable to determine the device handle for GPU0000:C1:00.0")
    assert [f.seen for f in results[1:]] == ["Xid 79 of the GPU at c1:00", "Xid 31 of GPU 1 at 21:00"]


def test_mig() -> None:
    results = found(with_gpus(smi("mig.csv")), settings(gpus=(1,)))
    assert "gpu-mig" in ids(results)
    assert "gpu-mig" not in ids(found(with_gpus(smi("mig.csv")), settings(gpus=(0,))))


def test_gpus_of_different_kinds() -> None:
    results = found(with_gpus(smi("mixed.csv")), settings(gpus=(0, 1), mode=Mode.LINEAR))
    assert "gpu-mixed" in ids(results)
    assert "gpu-mixed" not in ids(found(with_gpus(smi("mixed.csv")), settings(gpus=(0,), mode=Mode.LINEAR)))


def test_a_gpu_that_is_not_there() -> None:
    results = found(healthy(), settings(gpus=(7, 8)))
    assert "no GPU 8; 8 answer" in {f.seen for f in results}


def test_uncorrected_errors() -> None:
    results = found(with_gpus(smi("rtx-pro-6000-x8.csv").replace("Enabled, 0, 33", "Enabled, 3, 33")))
    assert [f.seen for f in results] == [
        "GPU 2 (NVIDIA RTX PRO 6000 Blackwell Server Edition): 3 since the driver was loaded"
    ]


def busy(unit: str, cgroup: str) -> dict[str, Any]:
    uuid = smi("rtx-pro-6000-x8.csv").split(", ")[1]
    owner = {"pid": 812, "argv": ["/opt/x/bin/python3", "-m", "vllm"], "unit": unit, "uid": 1000, "cgroup": cgroup}
    return with_gpus(
        smi("rtx-pro-6000-x8.csv"),
        apps=answer(f"{uuid}, 812, /opt/x/bin/python3, 61440\n{uuid}, 4711, [Not Found], [N/A]\n"),
        owners={"812": owner},
    )


def test_a_gpu_that_somebody_else_uses() -> None:
    results = found(busy("user@1000.service", "0::/user.slice/user-1000.slice/user@1000.service/app.slice\n"))
    assert ids(results) == ["gpu-busy", "gpu-busy"]
    assert results[0].seen == "GPU 0: python3 (pid 812, uid 1000) of user@1000.service, 61440 MiB"
    assert results[0].repair == "ps -fp 812"


@pytest.mark.parametrize(
    "cgroup",
    [
        "0::/system.slice/docker-3f4e5d6c7b8a90123f4e5d6c7b8a90123f4e5d6c7b8a90123f4e5d6c7b8a9012.scope\n",
        "12:devices:/docker/3f4e5d6c7b8a90123f4e5d6c7b8a90123f4e5d6c7b8a90123f4e5d6c7b8a9012\n",
        "0::/kubepods/besteffort/pod1/3f4e5d6c7b8a90123f4e5d6c7b8a90123f4e5d6c7b8a90123f4e5d6c7b8a9012\n",
    ],
)
def test_a_container_is_named(cgroup: str) -> None:
    assert "in container 3f4e5d6c7b8a" in found(busy("", cgroup))[0].seen


def test_a_little_memory_only_warns() -> None:
    raw = busy("nvidia-dcgm.service", "0::/system.slice/nvidia-dcgm.service\n")
    raw["gpus"]["apps"] = answer(raw["gpus"]["apps"]["out"].splitlines()[0].replace("61440", "420") + "\n")
    assert ids(found(raw)) == ["gpu-shared"]


def test_what_only_sglang_needs_is_not_asked_of_a_stand_in() -> None:
    raw = with_gpus("", rc=127)
    raw["venvs"][VENV].update(torch_version="", dists={"sglang": ["0.5.17"]})
    raw["models"] = {}
    assert found(raw, settings(launch_module="ddtree_standin")) == []
    raw["disk"]["free"] = 0
    assert ids(found(raw, settings(launch_module="ddtree_standin", port=40000))) == ["disk-low", "port-ephemeral"]


def test_our_own_server_is_not_somebody_else() -> None:
    raw = busy("sglang-ddtree-tree.service", "0::/system.slice/sglang-ddtree-tree.service\n")
    raw["gpus"]["apps"] = answer(raw["gpus"]["apps"]["out"].splitlines()[0] + "\n")
    raw["listeners"] = [{"port": 30001, "processes": [{"pid": 812, "unit": "sglang-ddtree-tree.service"}]}]
    assert found(raw) == []


# -- ports, containers ------------------------------------------------------------------------------------------------


def test_port_of_another_process() -> None:
    raw = healthy()
    raw["listeners"] = [
        {"port": 30001, "processes": [{"pid": 7, "argv": ["/usr/sbin/nginx"], "unit": "nginx.service"}]}
    ]
    results = found(raw)
    assert [f.seen for f in results] == ["nginx (pid 7) of nginx.service listens on 30001"]
    raw["listeners"] = [{"port": 30001, "processes": []}]
    assert ids(found(raw)) == ["port-taken"], "an owner that we may not see is still an owner"


def test_port_inside_the_range_for_outgoing_connections() -> None:
    raw = healthy()
    assert ids(found(raw, settings(port=40000))) == ["port-ephemeral"]
    raw["reserved_ports"] = "8080,39999-40001\n"
    assert found(raw, settings(port=40000)) == []


def test_gpu_containers_at_risk() -> None:
    raw = healthy()
    lines = (
        '"3f4e" "/vllm" [{"Driver":"","Count":-1,"Capabilities":[["gpu"]]}] "runc"\n'
        '"77aa" "/web" null "runc"\n'
        '"88bb" "/old" null "nvidia"\n'
    )
    raw["containers"] = {"ps": answer("3f4e\n"), "inspect": answer(lines), "driver": answer("systemd\n")}
    results = found(raw)
    assert [f.seen for f in results] == ["vllm, old in scopes of systemd"]
    raw["containers"]["driver"] = answer("cgroupfs\n")
    assert found(raw) == []


def test_gpu_containers_of_another_engine() -> None:
    scope = "cri-containerd-3f4e5d6c7b8a90123f4e5d6c7b8a90123f4e5d6c7b8a90123f4e5d6c7b8a9012.scope"
    results = found(busy(scope, f"0::/kubepods.slice/{scope}\n"), settings(gpus=(3,)))
    assert [(f.check.id, f.seen) for f in results] == [("gpu-containers", "3f4e5d6c7b8a in scopes of systemd")]


# -- pair, backends, memory -------------------------------------------------------------------------------------------


def test_a_drafter_of_another_model() -> None:
    raw = healthy()
    drafter = json.loads(raw["models"][DRAFTER]["config"]) | {"hidden_size": 4096, "dtype": "float32"}
    raw["models"][DRAFTER]["config"] = json.dumps(drafter)
    assert ids(found(raw)) == ["pair", "pair-odd"]
    assert found(raw, settings(mode=Mode.AR, drafter=None)) == []


@pytest.mark.parametrize(
    ("extra", "mode", "said"),
    [
        (("--attention-backend", "fa3"), Mode.LINEAR, "FA3 runs on compute capability 8.x and 9.x"),
        (("--attention-backend=trtllm_mha",), Mode.TREE, "verifies chains only"),
        (("--attention-backend", "trtllm_mha"), Mode.LINEAR, "prefills on compute capability 10.x only"),
        (("--attention-backend", "flashinfer"), Mode.TREE, "proven on triton, not on flashinfer"),
        (("--page-size", "16"), Mode.TREE, "set --page-size 1"),
        (("--enable-deterministic-inference",), Mode.TREE, "drop --enable-deterministic-inference"),
        (("--enable-dp-attention",), Mode.LINEAR, "drop --enable-dp-attention"),
        (("--mamba-radix-cache-strategy", "extra_buffer_lazy"), Mode.LINEAR, "extra_buffer"),
        (("--linear-attn-backend", "flashinfer"), Mode.TREE, "set --linear-attn-backend triton"),
        (("--linear-attn-backend", "flashinfer"), Mode.AR, "needs --mamba-ssm-dtype bfloat16"),
    ],
)
def test_flags_that_cannot_work(extra: tuple[str, ...], mode: Mode, said: str) -> None:
    results = found(healthy(), settings(extra_args=(*extra, "--disable-radix-cache"), mode=mode))
    assert "backend" in ids(results)
    assert any(said in f.seen for f in results)


@pytest.mark.parametrize(
    ("extra", "mode"),
    [
        (("--attention-backend", "triton"), Mode.TREE),
        (("--page-size", "16"), Mode.LINEAR),
        (("--page-size", "1"), Mode.TREE),
        (("--mamba-radix-cache-strategy", "extra_buffer_lazy"), Mode.AR),
        (("--kv-cache-dtype", "nvfp4"), Mode.AR),
    ],
)
def test_flags_that_work(extra: tuple[str, ...], mode: Mode) -> None:
    assert found(healthy(), settings(extra_args=(*extra, "--disable-radix-cache"), mode=mode)) == []


def test_unproven_trees() -> None:
    results = found(healthy(), settings(budget=65, max_running_requests=1))
    assert ids(results) == ["unproven"]
    assert "admitted by the instance's settings" in found(
        healthy(), settings(budget=65, max_running_requests=1, allow_hybrid_unsafe=True, unsafe_reason="a trial")
    )[0].seen  # fmt: skip


def whose_states_are_kept(*records: dict[str, Any]) -> dict[str, Any]:
    """A host whose target is the wrapper, for which SGLang keeps states, with these records."""
    raw, model = healthy(), json.loads(config("shape-27b"))
    raw["models"][MODEL]["config"] = json.dumps({**model, "architectures": ["Qwen3_5ForConditionalGeneration"]})
    raw["proofs"] = {f"{number}.json": record for number, record in enumerate(records)}
    return raw


def test_the_prefix_cache_is_proven_where_a_record_says_so() -> None:
    cached, without = settings(extra_args=()), whose_states_are_kept(proof())
    (unproven,) = found(without, cached)
    assert unproven.check.id == "unproven"
    assert "with the prefix cache (without it, --disable-radix-cache, it is proven)" in unproven.seen
    assert found(without) == []
    with_it = whose_states_are_kept(proof(prefix_cache={"extra_buffer": 16}))
    assert found(with_it, cached) == []
    assert ids(found(with_it, settings(extra_args=(), budget=17))) == ["unproven"]
    (unproven,) = found(whose_states_are_kept(), cached)
    assert "prefix cache" not in unproven.seen  # nothing is proven


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"mode": Mode.AUTO, "widths": (16,)}, "use mode tree, or add --disable-radix-cache"),
        ({"extra_args": ("--disable-overlap-schedule",)}, "no_buffer"),
        ({"extra_args": ("--mamba-radix-cache-strategy", "no_buffer")}, "no_buffer"),
        ({"extra_args": ("--enable-int8-mamba-checkpoint",)}, "drop int8"),
        ({"extra_args": ("--mamba-radix-cache-strategy", "extra_buffer_lazy")}, "does not plan lazy"),
    ],
)
def test_what_no_record_admits_with_the_prefix_cache(change: dict[str, Any], says: str) -> None:
    auto = engine_rules().auto_digest(states="records")
    raw = whose_states_are_kept(proof(prefix_cache={"extra_buffer": 64}, auto=auto))
    (wrong,) = [each for each in found(raw, settings(**{"extra_args": (), **change})) if each.check.id == "backend"]
    assert says in wrong.seen
    assert "unproven" not in ids(found(raw, settings(**{"extra_args": (), **change, "mode": Mode.LINEAR})))


def test_sglang_keeps_no_states_for_the_text_model() -> None:
    raw, model = healthy(), json.loads(config("shape-27b"))
    raw["proofs"] = {"a.json": proof(prefix_cache={"extra_buffer": 64})}
    raw["models"][MODEL]["config"] = json.dumps({**model, "architectures": ["Qwen3_5ForCausalLM"]})
    (wrong,) = found(raw, settings(extra_args=(), allow_hybrid_unsafe=True, unsafe_reason="a trial"))
    assert "keeps no recurrent states for Qwen3_5ForCausalLM" in wrong.seen


def test_a_model_on_two_gpus_is_proven_by_a_record_of_two() -> None:
    raw, shared = healthy(), settings(gpus=(0, 1), max_running_requests=1)
    raw["proofs"] = {"one.json": proof()}
    (unproven,) = found(raw, shared)
    assert unproven.check.id == "unproven"
    assert "with 2 GPUs to a model" in unproven.seen
    raw["proofs"] = {"two.json": proof(tp=2)}
    assert ids(found(raw, shared)) == []
    assert ids(found(raw, settings(max_running_requests=1))) == ["unproven"]
    assert "backend" not in ids(found(raw, shared.model_copy(update={"mode": Mode.LINEAR})))


def test_a_dense_model_on_two_gpus_is_proven_by_any_models_ranks() -> None:
    """It has no states to be wrong; what is to be shown is that ranks stay together."""
    two = [("two.json", proof(tp=2, states="snapshots"))]
    dense = parse_model(config("tiny-dense"), MODEL)
    for tp, needed in ((1, False), (2, True)):
        case = Case(Mode.TREE, {"--tp-size": str(tp)}, dense, (12, 0))
        assert needs_proof(case) is needed
        assert (proven_by(case, 16, None, two) is not None) is needed
    assert not needs_proof(Case(Mode.LINEAR, {"--tp-size": "2"}, dense, (12, 0)))


@pytest.mark.parametrize(
    ("mode", "tp", "says"),
    [
        (Mode.AUTO, 2, "use one GPU, or mode tree"),
        (Mode.TREE, 64, "cannot be shared by 64 GPUs"),
        (Mode.TREE, 2, None),
        (Mode.AUTO, 1, None),
    ],
)
def test_how_many_gpus_may_share_a_model(mode: Mode, tp: int, says: str | None) -> None:
    case = Case(
        mode, {"--tp-size": str(tp), "--disable-radix-cache": ""}, parse_model(config("shape-27b"), MODEL), (9, 0)
    )
    reasons = refusals(case)
    assert len(reasons) == (says is not None)
    assert says is None or says in reasons[0]


def test_a_tree_that_cannot_be_as_large_as_its_budget() -> None:
    chain = settings(budget=16, topk_cap=1, extra_args=("--disable-radix-cache",))
    results = found(healthy(), chain)
    assert ids(results) == ["tree-size"]
    assert results[0].seen == "budget 16, but a block of 16 and 1 child a node make 15 nodes at most"
    assert results[0].repair == "ddtree-ops deploy ct200:tree --budget 15"
    assert ids(found(healthy(), chain.model_copy(update={"budget": 15}))) == []


def test_trees_with_records_are_proven_by_themselves() -> None:
    raw = healthy()
    by_itself = settings(max_running_requests=1)
    records, snapshots = (by_itself.model_copy(update={"states": word}) for word in ("records", "snapshots"))
    for word, proven, other in (("records", records, snapshots), ("snapshots", snapshots, records)):
        raw["proofs"] = {"r.json": proof(states=word)}
        assert ids(found(raw, proven)) == []
        (unproven,) = found(raw, other)
        assert unproven.check.id == "unproven"
        assert unproven.seen.endswith(f", states kept as {other.states}")
        assert ids(found(raw, by_itself)) == ids(found(raw, records))


def test_mode_auto_is_proven_by_a_record_of_changing_widths() -> None:
    raw, changing = healthy(), settings(mode=Mode.AUTO, widths=(8, 16), max_running_requests=1)
    raw["proofs"] = {"r.json": proof()}
    assert ids(found(raw, changing)) == ["unproven"]
    raw["proofs"] = {"r.json": proof(auto=engine_rules().auto_digest(states="records"))}
    assert ids(found(raw, changing)) == []
    assert "unproven" in ids(found(raw, changing.model_copy(update={"widths": (8, 128)})))


def test_mode_auto_with_records_is_proven_by_both() -> None:
    raw, rules = healthy(), engine_rules()
    changing = settings(mode=Mode.AUTO, widths=(8, 16), states="records", max_running_requests=1)
    kept = {"states": "records", "engine": rules.engine_digest(states="records")}
    for auto, wanted in (
        (None, ["unproven"]),
        (rules.auto_digest(), ["unproven"]),
        (rules.auto_digest(states="records"), []),
    ):
        raw["proofs"] = {"r.json": proof(**kept, auto=auto)}
        assert ids(found(raw, changing)) == wanted


def test_mode_auto_needs_a_width_as_long_as_the_drafters_chain() -> None:
    raw = healthy()
    raw["proofs"] = {"r.json": proof(auto=engine_rules().auto_digest(states="records"))}
    results = found(raw, settings(mode=Mode.AUTO, widths=(4, 8), max_running_requests=1))
    assert ids(results) == ["backend"]
    assert results[0].seen == "the drafter's chain has 15 nodes and the widest width 8: add --width 15"
    assert ids(found(raw, settings(mode=Mode.AUTO, widths=(4, 15), max_running_requests=1))) == []


def test_records_are_refused_where_the_kernels_are_not_written_for() -> None:
    raw = healthy()
    raw["models"][MODEL]["config"] = raw["models"][MODEL]["config"].replace(
        '"linear_value_head_dim": 128', '"linear_value_head_dim": 96'
    )
    results = found(raw, settings(states="records", max_running_requests=1))
    said = [f.seen for f in results if f.check.id == "backend"]
    assert said == [
        "records need head sizes that are powers of two from 16 and these are 128 and 96: "
        "set --speculative-ddtree-states snapshots"
    ]
    (unproven,) = found(raw, settings(max_running_requests=1))
    assert unproven.seen.endswith(
        ", states kept as snapshots: records need head sizes that are powers of two from 16 and these are 128 and 96"
    )
    raw["proofs"] = {"r.json": proof(states="snapshots")}
    assert ids(found(raw, settings(max_running_requests=1))) == []


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"extra_args": ("--disable-radix-cache", "--dtype", "half")}, "set SGLANG_MAMBA_CONV_DTYPE=float16"),
        (
            {"env": {"SGLANG_MAMBA_CONV_DTYPE": "float32"}},
            "which are bfloat16, in the type of its windows, which is float32",
        ),
        ({"budget": 65}, "at most 64 nodes and the budget is 65"),
    ],
)
def test_flags_and_variables_decide_with_the_target_how_states_are_kept(change: dict[str, Any], says: str) -> None:
    raw = healthy()
    raw["proofs"] = {"r.json": proof(max_budget=255)}
    (unproven,) = found(raw, settings(max_running_requests=1, **change))
    assert ", states kept as snapshots: " in unproven.seen
    assert says in unproven.seen
    raw["proofs"] = {"r.json": proof(max_budget=255, states="snapshots")}
    assert ids(found(raw, settings(max_running_requests=1, **change))) == []


def test_a_tree_of_which_fewer_fit() -> None:
    results = found(healthy(), settings(states="snapshots", budget=64, max_running_requests=8))
    results = [each for each in results if each.check.id != "unproven"]
    assert ids(results) == ["memory-tight"]
    assert results[0].seen.startswith("8 requests of 32768 tokens with budget 64 need ")
    assert results[0].seen.endswith("GiB more than a 96 GiB GPU has; 1 of them or budget 17 would fit")
    assert results[0].repair == "ddtree-ops deploy ct200:tree --budget 17"


def test_a_context_that_is_too_long_for_the_rest() -> None:
    results = found(healthy(), settings(budget=16, max_running_requests=64, context_length=262144))
    assert ids(results) == ["memory-tight"]
    assert "are too much for a" in results[0].seen or "more than a" in results[0].seen


def test_a_model_that_does_not_fit_at_all() -> None:
    raw = healthy()
    raw["models"][MODEL]["weights"]["model.layers"]["BF16"] = int(100e9)
    results = found(raw)
    assert ids(results) == ["memory-short"]
    assert "not even one would fit" in results[0].seen


# -- the whole --------------------------------------------------------------------------------------------------------


def leaves(value: Any) -> list[tuple[Any, Any]]:
    """Every place in a raw answer where something could be missing or broken."""
    places: list[tuple[Any, Any]] = []
    for key in list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else []:
        places += [(value, key), *leaves(value[key])]
    return places


@given(st.data())
def test_a_broken_answer_is_never_an_error(data: st.DataObject) -> None:
    """Cut any text, or put anything in place of any part: facts become unknown, nothing raises."""
    raw = busy("", "")
    for _ in range(data.draw(st.integers(1, 3))):
        container, key = data.draw(st.sampled_from(leaves(raw)))
        value = container[key]
        if isinstance(value, str) and data.draw(st.booleans()):
            container[key] = value[: data.draw(st.integers(0, len(value)))]
        else:
            container[key] = data.draw(st.sampled_from([None, "", 0, [], {}, "x", [1], {"x": 1}, True]))
    examine(host(), [settings()], parse_machine(raw), now=0.0)


@pytest.mark.parametrize("raw", [None, {}, [], "x", {"gpus": {"error": "OSError: no"}}])
def test_an_answer_that_says_nothing(raw: Any) -> None:
    examine(host(), [settings()], parse_machine(raw))


def test_red_comes_first_and_every_repair_is_filled_in() -> None:
    raw = busy("", "")
    raw["disk"].update(free=0, inodes_free=1)
    results = found(raw)
    levels = [f.check.level for f in results]
    assert levels == sorted(levels, key=lambda level: level is Level.YELLOW)
    assert all("{" not in f.repair for f in results)
    assert results[0].refuses
    assert not results[-1].refuses


def test_the_page_is_what_the_program_says() -> None:
    text = (Path(__file__).parents[2] / "docs/doctor.md").read_text()
    assert text == page(), "run: python -m ddtree_ops.doctor.page > docs/doctor.md"
    assert all(f"`{id}`" in text for id in CHECKS)


def test_every_repair_of_ours_is_a_command_that_exists() -> None:
    named = {word for check in CHECKS.values() for word in re.findall(r"ddtree-ops (\w+)", check.repair)}
    assert named <= set(COMMANDS)


def test_every_check_can_be_found() -> None:
    """Each entry of the catalogue is made by some line of the checks; none is only text."""
    folder = Path(__file__).parents[2] / "ddtree_ops/doctor"
    source = (folder / "checks.py").read_text() + (folder / "models.py").read_text()
    assert [id for id in CHECKS if f'"{id}"' not in source] == []
