"""``selftest`` against a scripted host: what is sent, what is run, what each answer means."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any, cast

import pytest

from ddtree_ops.connection import Connection
from ddtree_ops.deploy import Engine
from ddtree_ops.errors import ExitCode, RefusedError
from ddtree_ops.facts.host import Gpu, GpuUser, HostFacts
from ddtree_ops.model import Address, HostSpec, Mode, Settings
from ddtree_ops.remote import Completed
from ddtree_ops.selftest import prove
from ddtree_ops.selftest_pair import PackedPair, packed

HOST = HostSpec(name="ct200", address=Address(host="10.0.0.1"))
CONFIGS = Path(__file__).parent / "fixtures/configs"
SETTINGS = Settings(instance="tree", mode=Mode.TREE, model="/m", drafter="/d", venv="/venv", gpus=(3, 4), port=30000)
FREE = Gpu(3, "GPU-x", "RTX", memory_total=97000, memory_used=12)
ALSO_FREE = Gpu(4, "GPU-y", "RTX", memory_total=97000, memory_used=12)
RECORD = {
    "architecture": "Qwen3_5ForCausalLM", "backend": "triton", "compute_capability": "12.0", "max_budget": 64,
    "passed": True, "suite": {"seconds": 101.0, "unproven": []},
}  # fmt: skip
PROOF = "/opt/ddtree/proofs/selftest-x.json"
SAID = f"a table\nproven on compute capability 12.0; recorded in {PROOF}\n"


class FakeConnection:
    def __init__(self, gpus: tuple[Gpu, ...]) -> None:
        self.host, self.gpus = HOST, gpus
        self.leases: list[float] = []

    def facts(self, settings: list[Settings]) -> HostFacts:
        return HostFacts(HOST.name if settings else "", gpus=self.gpus)

    @contextmanager
    def locked(self, *_: object) -> Iterator[str]:
        yield ""

    def renew(self, lease_s: float) -> None:
        self.leases.append(lease_s)


class FakeRemote:
    name = "ct200"

    def __init__(
        self, rc: int = 0, out: str = SAID, err: str = "", record: dict[str, Any] | None = None, config: str = ""
    ) -> None:
        self.rc, self.out, self.err, self.record, self.config = rc, out, err, record or RECORD, config
        self.ran: list[list[str]] = []
        self.there: set[str] = set()

    def run(self, argv: list[str], **_: object) -> Completed:
        self.ran.append(argv)
        if argv[0] == "test":
            return Completed(tuple(argv), 0 if argv[2] in self.there else 1, b"", b"")
        if argv[0] == "env":
            return Completed(tuple(argv), self.rc, self.out.encode(), self.err.encode())
        if argv[0] == "cat":
            assert argv[1] == "/m/config.json"
            return Completed(tuple(argv), 0 if self.config else 1, self.config.encode(), b"")
        return Completed(tuple(argv), 0, b"", b"")

    def put(self, data: bytes, path: str, **_: object) -> None:
        assert data == b"", "a mark is empty"
        self.there.add(path)

    def get(self, path: str, **_: object) -> bytes:
        assert path == PROOF
        return json.dumps(self.record).encode()


def run(remote: FakeRemote, *gpus: Gpu, settings: Settings = SETTINGS) -> Any:
    connection = cast(Connection, FakeConnection(gpus or (FREE, ALSO_FREE)))
    engine = Engine("e" * 12, "0.5.17", lambda *_: 0, lambda *_: "engine staged")
    return prove(connection, cast(Any, remote), settings, engine, PackedPair(b"tar", "d1"), lambda _: None)


def test_a_pass_is_a_proof_and_the_pair_travels_once() -> None:
    remote = FakeRemote()
    proof = run(remote)
    assert proof.line == (
        "proven: Qwen3_5ForCausalLM on triton, compute capability 12.0, trees up to 64 nodes; not with the prefix "
        "cache (101 s)"
    )
    argv = next(argv for argv in remote.ran if argv[0] == "env")
    assert "CUDA_VISIBLE_DEVICES=3,4" in argv, "what shares a model is proven sharing one"
    assert f"PYTHONPATH={HOST.root}/engines/{'e' * 12}/site" in argv
    assert argv[-4:] == ["--states", "records", "--tp", "2"]
    assert argv[argv.index("/venv/bin/python") :][:3] == ["/venv/bin/python", "-m", "sglang_ddtree.selftest"]
    sent = sum(argv[0] == "tar" for argv in remote.ran)
    run(remote)
    assert sum(argv[0] == "tar" for argv in remote.ran) == sent == 1


@pytest.mark.parametrize(
    ("config", "change", "proven"),
    [
        ("", {}, "records"),
        ("no JSON", {}, "records"),
        ("", {"states": "snapshots"}, "snapshots"),
        ("shape-27b", {}, "records"),
        ("shape-27b", {"budget": 65}, "snapshots"),
        ("shape-27b", {"budget": 65, "mode": Mode.LINEAR}, "records"),
        ("shape-27b", {"extra_args": ("--dtype", "float16")}, "snapshots"),
        ("shape-27b", {"extra_args": ("--dtype", "float16"), "env": {"SGLANG_MAMBA_CONV_DTYPE": "float16"}}, "records"),
        ("tiny-dense", {}, "snapshots"),
    ],
)
def test_what_is_proven_is_the_way_this_instance_keeps_states(config: str, change: dict[str, Any], proven: str) -> None:
    file = CONFIGS / f"{config}.json"
    remote = FakeRemote(config=file.read_text() if file.is_file() else config)
    run(remote, settings=SETTINGS.model_copy(update=change))
    argv = next(argv for argv in remote.ran if argv[0] == "env")
    assert argv[argv.index("--states") + 1] == proven


def test_a_failed_suite_is_refused_with_its_first_reason() -> None:
    record = {**RECORD, "passed": False, "suite": {"seconds": 9.0, "unproven": ["pair/tree-16: differs", "more"]}}
    with pytest.raises(RefusedError, match=r"not proven: pair/tree-16: differs \(and 1 more\)") as caught:
        run(FakeRemote(rc=1, record=record))
    assert caught.value.exit_code is ExitCode.REFUSED
    assert PROOF in caught.value.why
    assert caught.value.next == "ddtree-ops deploy ct200:tree --mode linear"


@pytest.mark.parametrize(
    ("remote", "says"),
    [
        (FakeRemote(rc=2, out="", err="no CUDA GPU is visible here: nothing to prove\n"), "no CUDA GPU is visible"),
        (FakeRemote(rc=1, out="", err="Traceback\nModuleNotFoundError: No module named 'sglang'\n"), "No module named"),
        (FakeRemote(rc=124, out="half a table\n", err=""), "half a table"),
    ],
)
def test_a_suite_that_did_not_run_says_why(remote: FakeRemote, says: str) -> None:
    with pytest.raises(RefusedError, match=says):
        run(remote)


@pytest.mark.parametrize(
    ("gpus", "says"),
    [
        ([ALSO_FREE], "there is no GPU 3"),
        ([FREE], "there is no GPU 4"),
        (
            [FREE, Gpu(4, "GPU-y", "RTX", 97000, 88000, (GpuUser(7, unit="sglang-ddtree-tree.service"),))],
            r"88000 of 97000 MiB \(by sglang-ddtree-tree.service\)",
        ),
    ],
)
def test_a_gpu_that_is_not_free_is_left_alone(gpus: list[Gpu], says: str) -> None:
    remote = FakeRemote()
    with pytest.raises(RefusedError, match=says):
        run(remote, *gpus)
    assert not remote.ran


def test_one_gpu_is_proven_by_itself_and_more_than_the_pair_has_heads_for_is_refused() -> None:
    remote = FakeRemote()
    run(remote, settings=SETTINGS.model_copy(update={"gpus": (3,)}))
    argv = next(argv for argv in remote.ran if argv[0] == "env")
    assert "CUDA_VISIBLE_DEVICES=3" in argv
    assert argv[-2:] == ["--tp", "1"]
    with pytest.raises(RefusedError, match="3 GPUs and the self-test pair is shared by 2 at most"):
        run(remote, settings=SETTINGS.model_copy(update={"gpus": (3, 4, 5)}))


def test_a_proof_of_several_gpus_says_so() -> None:
    assert "up to 64 nodes, and mode auto; not with the" in run(FakeRemote(record={**RECORD, "auto": "a" * 64})).line
    cached = run(FakeRemote(record={**RECORD, "prefix_cache": {"extra_buffer": 16}})).line
    assert "up to 64 nodes; with the prefix cache (extra_buffer) up to 16 nodes (" in cached
    assert "capability 12.0, 2 GPUs to a model, trees up to 64" in run(FakeRemote(record={**RECORD, "tp": 2})).line


def test_the_packed_pair_is_the_same_everywhere_and_whole(tmp_path: Path) -> None:
    one, two = packed(), packed()
    assert one.digest == two.digest
    with tarfile.open(fileobj=BytesIO(one.data)) as tar:
        names = tar.getnames()
        assert {member.mtime for member in tar.getmembers()} == {0}
    assert {"prompts.json", "target/model.safetensors", "target/tokenizer.json", "drafter/config.json"} <= set(names)
    for folder in ("target", "drafter"):
        (tmp_path / folder).mkdir()
    (tmp_path / "prompts.json").write_text("[]")
    assert packed(tmp_path).digest != one.digest
