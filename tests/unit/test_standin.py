"""The stand-in server over loopback: SGLang's flags and answers, and every fault it can be told to have."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import pytest
from ports import reserved_port
from prometheus_client.parser import text_string_to_metric_families
from waiting import LIMIT_S, running, until

from ddtree_ops.lab.standin import NOTICE, faults, flags

STANDIN = Path(faults.__file__).parent
MODELS = STANDIN.parent / "guest/models"
SERVER_ARGS = '''
from typing import Annotated as A
CHOICES = ["triton", "fa3"]
class ServerArgs:
    """In the manner of SGLang's."""
    model_path: A[str, Arg(help="Path.", aliases=["--model"])]
    tokenizer_path: A[Optional[str], "Path."] = None
    host: A[str, "Host."] = "127.0.0.1"
    port: A[int, "Port."] = 30000
    api_key: A[Optional[str], "Key."] = None
    context_length: A[Optional[int], Arg(help="Length.", type_parser=human_readable_int), NS("model")] = None
    weight_version: A[str, "Version."] = "default"
    served_model_name: A[Optional[str], "Name."] = None
    max_running_requests: A[Optional[int], "Limit."] = None
    attention_backend: A[Optional[str], Arg(help="Backend.", choices=CHOICES)] = None
    enable_metrics: A[bool, "Metrics."] = False
    offload_mode: A[Literal["cpu", "meta"], "Mode."] = "cpu"
    tp_size: A[int, Arg(help="TP.", aliases=["--tensor-parallel-size"])] = 1
    cuda_graph_bs: A[Optional[List[int]], "Sizes."] = None
    hidden: A[int, Arg(help="No flag.", no_cli=True)] = 0
    speculative_algorithm: A[Optional[str], "Algorithm."] = None
    speculative_draft_model_path: A[Optional[str], "Drafter."] = None
    @staticmethod
    def add_cli_args(parser):
        parser.add_argument("--disable-cuda-graph", action=DeprecatedStoreTrueAction, new_flag="--x")
        parser.add_argument("--reasoning-parser", type=str, choices=list(DETECTORS))
'''
PLUGIN_ARGS = """
def add_flags(parser):
    group = parser.add_argument_group("DDTree")
    group.add_argument("--speculative-ddtree-mode", choices=settings.MODES, default=None)
    group.add_argument("--speculative-ddtree-budget", type=int, default=None)
    group.add_argument("--speculative-ddtree-widths", type=choices.parse_widths, default=None)
    group.add_argument("--speculative-ddtree-topk-cap", type=int, default=None)
    group.add_argument("--speculative-ddtree-allow-hybrid-unsafe", action="store_true", default=None)
    group.add_argument("--speculative-ddtree-states", choices=states.CHOICES, default=None)
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An import path with small sources in the manner of SGLang and of the plugin, and the stand-in."""
    path = tmp_path_factory.mktemp("site")
    for name, text in {
        "sglang/__init__.py": "raise ImportError('never imported')",
        "sglang/_version.py": "__version__ = version = '0.5.17'\n",
        "sglang/srt/server_args.py": SERVER_ARGS,
        "sglang/srt/entrypoints/http_server.py": '@app.get("/health")\n',
        "sglang_ddtree/__init__.py": "raise ImportError('never imported')",
        "sglang_ddtree/args.py": PLUGIN_ARGS,
    }.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(text)
    shutil.copytree(STANDIN, path / "ddtree_standin", ignore=shutil.ignore_patterns("__pycache__"))
    for model in ("Qwen3.6-27B", "Qwen3.6-27B-DFlash"):
        (path / model).mkdir()
        shutil.copy(MODELS / f"{model}.json", path / model / "config.json")
    return path


class Running:
    """A stand-in server under test."""

    def __init__(self, site: Path, words: tuple[str, ...], env: dict[str, str]) -> None:
        self._claim = ExitStack()
        self.port = self._claim.enter_context(reserved_port())
        command = [sys.executable, "-m", "ddtree_standin", "--model-path", str(site / "Qwen3.6-27B")]
        quick = {"STANDIN_LOAD_S": "0.05", "STANDIN_WARM_S": "0", "STANDIN_DRAIN_S": "0.05", "STANDIN_TOK_S": FAST}
        self.process = subprocess.Popen(
            [*command, "--port", str(self.port), *words],
            env={**os.environ, "PYTHONPATH": str(site), **quick, **env},
            cwd=site,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def close(self) -> None:
        """End it and the child that a fault left behind."""
        self.process.kill()
        self.process.wait()
        for pid in self.strays():  # before reading to the end: a stray holds the pipe
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.communicate(timeout=LIMIT_S)
        self._claim.close()

    def strays(self) -> list[int]:
        """Processes of the fault STRAY_CHILD, known by this server's port on the command line they were forked with."""
        return [pid for pid in running(str(self.port)) if comm(pid) == "sglang::stray"]

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}{path}"

    def get(self, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url(path), data, headers)
        try:
            with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
                status, text = answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                status, text = error.code, error.read().decode()
        try:
            return status, json.loads(text)
        except ValueError:
            return status, text

    def generate(self, tokens: int = 16, **more: Any) -> Any:
        return self.get("/generate", {"text": "hi", "sampling_params": {"max_new_tokens": tokens}, **more})[1]

    def up(self) -> Running:
        """Wait until it says that it is ready; its log so far is in ``said``."""
        assert self.process.stdout is not None
        self.said = ""
        for line in self.process.stdout:
            self.said += line
            if "ready to roll" in line:
                return self
        raise AssertionError(f"it ended with {self.process.wait(LIMIT_S)}: {self.said}")

    def end(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        """Signal it (0: just wait) and return its exit status and the rest of its log."""
        if number:
            self.process.send_signal(number)
        said, _ = self.process.communicate(timeout=LIMIT_S)
        return self.process.returncode, said


FAST = "ar=4000,linear=4000,shadow-linear=4000,tree=4000"
LINEAR = ("--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", "Qwen3.6-27B-DFlash")
TREE = (
    *("--speculative-algorithm", "DDTREE", "--speculative-draft-model-path", "Qwen3.6-27B-DFlash"),
    *("--speculative-ddtree-mode", "tree", "--speculative-ddtree-budget", "32"),
)
Start = Callable[..., Running]


@pytest.fixture
def start(site: Path) -> Iterator[Start]:
    started: list[Running] = []

    def run(*words: str, **env: str) -> Running:
        started.append(Running(site, words, {f"STANDIN_{name}": value for name, value in env.items()}))
        return started[-1]

    yield run
    for server in started:
        server.close()


# ---- flags


def test_flags_are_those_of_the_sources(site: Path) -> None:
    parser = flags.build_parser(str(site / "sglang"), None)
    words = "--model m --tensor-parallel-size 2 --cuda-graph-bs 1 2 --context-length 25.6k --disable-cuda-graph"
    args = parser.parse_args(words.split())
    assert (args.model_path, args.tp_size, args.cuda_graph_bs, args.context_length) == ("m", 2, [1, 2], 25600)
    assert (args.port, args.enable_metrics, args.offload_mode) == (30000, False, "cpu")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--model-path", "m", "--nope"], "unrecognized arguments: --nope"),
        (["--model-path", "m", "--hidden", "1"], "unrecognized arguments"),
        (["--model-path", "m", "--speculative-ddtree-budget", "8"], "unrecognized arguments: --speculative-ddtree"),
        (["--model-path", "m", "--port", "x"], "invalid int value"),
        (["--model-path", "m", "--attention-backend", "magic"], "invalid choice"),
        (["--model-path", "m", "--offload-mode", "magic"], "invalid choice"),
        ([], "required: --model-path"),
    ],
)
def test_a_wrong_command_line_is_an_error(
    site: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        flags.build_parser(str(site / "sglang"), None).parse_args(words)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_the_plugin_s_flags_come_with_the_plugin(site: Path) -> None:
    parser = flags.build_parser(str(site / "sglang"), str(site / "sglang_ddtree"))
    assert parser.parse_args(["--model-path", "m", *TREE]).speculative_ddtree_budget == 32


@pytest.mark.parametrize(("text", "value"), [("8192", 8192), ("1k", 1000), ("1.5M", 1500000), ("2Ki", 2048)])
def test_human_readable_numbers(text: str, value: int) -> None:
    assert flags.human_readable_int(text) == value


# ---- answers


def test_it_says_what_it_is_wherever_it_is_asked(start: Start) -> None:
    server = start("--enable-metrics").up()
    assert NOTICE in server.said
    assert server.get("/server_info")[1]["stand_in"] == NOTICE
    assert server.get("/")[1].strip() == NOTICE


def test_paths_status_codes_and_metrics(start: Start) -> None:
    kept = ("--speculative-ddtree-states", "records")
    server = start(*TREE, *kept, "--enable-metrics", "--weight-version", "r1", "--served-model-name", "q").up()
    before = time.monotonic()
    assert server.get("/health")[0] == 200
    assert time.monotonic() - before >= 1.0
    assert server.get("/ready")[0] == 404  # these sources have no /ready
    assert server.get("/model_info")[1]["weight_version"] == "r1"
    assert server.get("/v1/models")[1]["data"][0]["id"] == "q"
    answer = server.generate(16)
    assert len(answer["output_ids"]) == answer["meta_info"]["completion_tokens"] == 16
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 16}
    found = {
        (sample.name, sample.labels.get("is_streaming")): sample.value
        for family in text_string_to_metric_families(server.get("/metrics")[1])
        for sample in family.samples
    }
    assert found["sglang:spec_accept_length", None] == pytest.approx(16 / 3)  # 16 tokens in 3 rounds
    assert found["sglang:generation_tokens_total", "false"] == 16
    assert found["sglang:generation_tokens_total", "true"] == 0
    state = server.get("/server_info")[1]["internal_states"][0]
    assert state["ddtree"] == {
        "mode": "tree", "budget": 32, "topk_cap": 8, "allow_hybrid_unsafe": False, "keep_spine": False,
        "block_size": 16, "verify_rows": 33, "hybrid_verdict": "proven by the stand-in's word", "states": "records",
    }  # fmt: skip
    assert server.get("/nope")[0] == 404
    assert server.get("/generate", {"sampling_params": {}})[0] == 400


def test_without_enable_metrics_there_are_none(start: Start) -> None:
    assert start().up().get("/metrics")[0] == 404


def test_an_api_key_guards_all_but_health_and_metrics(start: Start) -> None:
    server = start("--api-key", "k", "--enable-metrics").up()
    assert server.get("/server_info")[0] == 401
    status, shown = server.get("/server_info", Authorization="Bearer k")
    assert (status, shown["api_key"], shown["internal_states"][0]["api_key"]) == (200, "***", "***")
    assert server.get("/metrics")[0] == 200


def test_openai_completions_stream_as_events(start: Start) -> None:
    server = start(*LINEAR).up()
    whole = server.get("/v1/completions", {"prompt": "hi", "max_tokens": 9})[1]
    body = {"prompt": "hi", "max_tokens": 9, "stream": True, "stream_options": {"include_usage": True}}
    events = [line[6:] for line in server.get("/v1/completions", body)[1].splitlines() if line]
    assert events.pop() == "[DONE]"
    chunks = [json.loads(event) for event in events]
    assert chunks.pop()["usage"]["completion_tokens"] == 9
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["choices"][0]["text"]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


def test_tokens_depend_on_the_prompt_and_on_nothing_else(start: Start) -> None:
    linear, tree = start(*LINEAR).up(), start(*TREE).up()
    assert linear.generate()["output_ids"] == tree.generate()["output_ids"]
    assert linear.generate()["output_ids"] != linear.generate(text="ho")["output_ids"]


def test_mode_auto_is_a_tree_of_its_widest_width(start: Start) -> None:
    auto = ("--speculative-ddtree-mode", "auto", "--speculative-ddtree-widths", "8,64,16")
    server = start(*TREE[:4], *auto, "--speculative-ddtree-states", "records").up()
    block = server.get("/server_info")[1]["internal_states"][0]["ddtree"]
    assert (block["mode"], block["budget"], block["verify_rows"]) == ("auto", 64, 65)
    assert block["widths"] == ["8", "16", "64", "chain"]
    assert block["states"] == "records"


def test_states_are_kept_as_the_engine_would_keep_them(start: Start) -> None:
    wide = (*TREE, "--speculative-ddtree-budget", "65")
    said = "DDTREE: recurrent states are kept as snapshots: records are written for at most 64 nodes"
    found = []
    for words in (TREE, wide, (*wide, "--speculative-ddtree-states", "snapshots")):
        server = start(*words).up()
        block = server.get("/server_info")[1]["internal_states"][0]["ddtree"]
        found.append((block["states"], said in server.said))
    assert found == [("records", False), ("snapshots", True), ("snapshots", False)]


def test_it_drains_on_sigterm(start: Start) -> None:
    server = start(*LINEAR, TOK_S="linear=4").up()  # slow enough that the request still runs when it is looked at
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(server.generate, 20)
        until(lambda: server.get("/server_info")[1]["internal_states"][0]["last_gen_throughput"] > 0, "it runs")
        server.process.terminate()
        until(lambda: server.get("/health")[0] == 503, "it drains")
        assert answer.result(LIMIT_S)["meta_info"]["completion_tokens"] == 20
    code, said = server.end(0)
    assert code == 0
    assert "Draining requests" in said


# ---- refusals


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--model-path", "missing"), "Can't load the configuration of the model"),
        (("--speculative-algorithm", "DDTREE", "--speculative-draft-model-path", "no"), "of the draft model"),
        (("--speculative-ddtree-budget", "8"), "set without --speculative-algorithm DDTREE"),
        (("--speculative-algorithm", "MAGIC"), "MAGIC"),
        ((*TREE[:4], "--speculative-ddtree-budget", "256"), "a tree has 1 to 255 nodes"),
        ((*TREE[:4], "--speculative-ddtree-topk-cap", "17"), "choose 1 to 16 children"),
    ],
)
def test_it_refuses_to_start(start: Start, words: tuple[str, ...], said: str) -> None:
    code, log = start(*words).end(0)
    assert code == 1
    assert said in log


def test_a_taken_port_is_said(start: Start) -> None:
    first = start().up()
    code, log = start("--port", str(first.port)).end(0)
    assert code == 1
    assert "address already in use" in log


# ---- faults


def test_crash_at_start(start: Start) -> None:
    code, said = start(CRASH_AT_START="1").end(0)
    assert code == 1
    assert "CUDA out of memory" in said


def test_crash_after_some_time(start: Start) -> None:
    server = start(CRASH_AFTER_S="0.2").up()
    assert server.end(0)[0] == 1


def test_hang_while_loading(start: Start) -> None:
    server = start(HANG_LOADING="1")
    assert server.process.stdout is not None
    assert any("Load weight begin" in line for line in server.process.stdout)
    with pytest.raises(subprocess.TimeoutExpired):  # it would be up in a tenth of that
        server.process.wait(0.8)
    server.process.kill()
    assert server.process.stdout.read() == "", "it went on"


def test_hung_completion_is_healthy(start: Start) -> None:
    server = start("--enable-metrics", HANG_COMPLETION="1").up()
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=LIMIT_S)
    with closing(connection):
        connection.request("POST", "/generate", b'{"text":"hi"}')
        until(lambda: requests(server) == 1, "the request runs")
        assert server.get("/health")[0] == 200  # it takes a second to say so
        assert requests(server) == 1
        server.get("/abort_request", {"abort_all": True})
        with connection.getresponse() as answer:
            assert json.load(answer)["meta_info"]["finish_reason"]["type"] == "abort"
    assert server.end()[0] == 0


def requests(server: Running) -> float:
    """How many the server works on."""
    text = server.get("/metrics")[1]
    return next(
        float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith("sglang:num_running_reqs{")
    )


def test_another_release_answers(start: Start) -> None:
    server = start("--weight-version", "mine", WEIGHT_VERSION="other").up()
    assert server.get("/model_info")[1]["weight_version"] == "other"
    assert server.generate()["meta_info"]["weight_version"] == "other"


def test_another_budget_and_another_mode_than_asked(start: Start) -> None:
    assert start(*TREE, BUDGET="8").up().get("/server_info")[1]["internal_states"][0]["ddtree"]["budget"] == 8
    server = start(*TREE, MODE="linear").up()
    assert server.get("/server_info")[1]["internal_states"][0]["ddtree"]["mode"] == "linear"
    assert "running linear" in server.said


def test_short_completions(start: Start) -> None:
    assert start(SHORT_COMPLETION="1").up().generate(16)["meta_info"]["completion_tokens"] == 8


def test_slow_stop(start: Start) -> None:
    server = start(SLOW_STOP_S="0.8").up()
    before = time.monotonic()
    assert server.end()[0] == 0
    assert time.monotonic() - before >= 0.8


def test_a_tree_that_diverges_and_is_slow(start: Start) -> None:
    linear = start(*LINEAR).up().generate()["output_ids"]
    server = start(*TREE, DIVERGE_AT="5", TOK_S="tree=100").up()
    before = time.monotonic()
    tree = server.generate()["output_ids"]
    assert time.monotonic() - before >= 0.16
    assert tree[:5] == linear[:5]
    assert tree[5] != linear[5]


def test_an_unproven_hybrid_needs_the_unsafe_flag(start: Start) -> None:
    code, said = start(*TREE, REFUSE_HYBRID="1").end(0)
    assert code == 1
    assert "allow-hybrid-unsafe" in said
    server = start(*TREE, "--speculative-ddtree-allow-hybrid-unsafe", REFUSE_HYBRID="1").up()
    assert server.get("/server_info")[1]["internal_states"][0]["ddtree"]["hybrid_verdict"].startswith("unproven")


def test_a_stray_child_outlives_the_server(start: Start) -> None:
    server = start(STRAY_CHILD="1").up()
    (stray,) = until(server.strays, "the stray has its name")
    server.process.terminate()
    server.process.wait(LIMIT_S)
    ignored = next(line.split()[1] for line in status(stray).splitlines() if line.startswith("SigIgn:"))
    assert int(ignored, 16) & 1 << signal.SIGTERM - 1
    os.kill(stray, signal.SIGTERM)
    assert server.strays() == [stray]


def status(pid: int) -> str:
    return Path(f"/proc/{pid}/status").read_text()


def comm(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


# ---- where faults come from


def test_an_unknown_fault_is_an_error() -> None:
    with pytest.raises(ValueError, match="STANDIN_CRASH_AT_STRAT"):
        faults.variables({"STANDIN_CRASH_AT_STRAT": "1"})


def test_only_narrows_the_faults_but_not_the_speed() -> None:
    values = {"ONLY": "tree,budget=64", "CRASH_AT_START": "1", "TOK_S": "tree=1"}
    hit = faults.read(values, {"mode": "tree", "budget": "64"})
    missed = faults.read(values, {"mode": "tree", "budget": "32"})
    assert (hit.crash_at_start, missed.crash_at_start) == (True, False)
    assert hit.tok_s["tree"] == missed.tok_s["tree"] == 1.0


@pytest.mark.parametrize(
    ("condition", "holds"),
    [
        ("", True), ("tree", True), ("mode=tree", True), ("linear", False), ("budget=32", True), ("budget=3", False),
        ("tree,budget=64", False), ("weight_version=ab12", True), ("weight_version=ff", False), ("nonsense=1", False),
    ],
)  # fmt: skip
def test_conditions(condition: str, holds: bool) -> None:
    assert faults.applies(condition, {"mode": "tree", "budget": "32", "weight_version": "ab12cd"}) is holds


def test_the_host_s_file_sets_faults(tmp_path: Path) -> None:
    file = tmp_path / "faults"
    assert faults.from_file(str(file)) == {}
    file.write_text("# broken on purpose\nSTANDIN_ONLY=budget=64\n\nSTANDIN_CRASH_AT_START=1\n")
    assert faults.variables(faults.from_file(str(file))) == {"ONLY": "budget=64", "CRASH_AT_START": "1"}


def test_every_fault_is_documented() -> None:
    from ddtree_ops.lab import standin

    for name in (*faults.KNOBS, *faults.FAULTS, "ONLY"):
        assert f"STANDIN_{name}=" in (standin.__doc__ or "")
