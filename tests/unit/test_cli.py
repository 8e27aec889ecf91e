"""The frame: every way to end is a message with found / why / next and its exit code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from ddtree_ops.cli import app as frame
from ddtree_ops.cli.command import OneTarget, Session, command
from ddtree_ops.errors import DdtreeError, ExitCode, LockedError, RolledBackError, UnreachableError
from ddtree_ops.interrupt import Interrupted
from ddtree_ops.ui.hint import COMMANDS, repeat_in_data, repeat_inventory

RUNNER = CliRunner()
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The repository root, where ./inventory/ holds the examples; no inventory of the person running the tests."""
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("DDTREE_INVENTORY", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))


def raising(error: BaseException) -> typer.Typer:
    """An application whose command ``x`` ends with ``error``."""
    app = frame.build_app()

    @command(app, "x", examples=["ddtree-ops x"])
    def x(session: Session) -> None:
        """Fail."""
        assert not session.out.live
        raise error

    return app


ENDINGS: list[tuple[BaseException, ExitCode]] = [
    (LockedError("locked by me", "h1", "one at a time", "ddtree-ops unlock h1"), ExitCode.LOCKED),
    (UnreachableError("no answer", "h1"), ExitCode.UNREACHABLE),
    (RolledBackError("health failed", "h1:tree"), ExitCode.ROLLED_BACK),
    (ValueError("oops"), ExitCode.BUG),
    (KeyboardInterrupt(), ExitCode.INTERRUPTED),
    (Interrupted("SIGTERM"), ExitCode.INTERRUPTED),
    (typer.Exit(8), ExitCode.MOVED),
]


@pytest.mark.parametrize(("error", "code"), ENDINGS, ids=lambda value: type(value).__name__)
def test_every_ending_has_its_exit_code(error: BaseException, code: ExitCode) -> None:
    result = RUNNER.invoke(raising(error), ["x"])
    assert result.exit_code == code
    assert "Traceback" not in result.output


def test_an_error_is_found_host_why_next() -> None:
    result = RUNNER.invoke(raising(ENDINGS[0][0]), ["x"])
    assert result.stdout == ""
    assert result.stderr == "error: h1: locked by me\nwhy: one at a time\nnext: ddtree-ops unlock h1\n"


def test_an_error_under_json_is_one_document() -> None:
    result = RUNNER.invoke(raising(ENDINGS[0][0]), ["x", "--json"])
    assert json.loads(result.stdout)["error"] == {
        "kind": "LockedError",
        "exit_code": 7,
        "found": "locked by me",
        "host": "h1",
        "why": "one at a time",
        "next": "ddtree-ops unlock h1",
        "data": {},
    }
    assert result.exit_code == ExitCode.LOCKED


@pytest.mark.parametrize("error", [KeyboardInterrupt(), Interrupted("SIGTERM")], ids=["key", "signal"])
def test_an_interruption_under_json_is_one_document(error: BaseException) -> None:
    result = RUNNER.invoke(raising(error), ["x", "--json"])
    assert json.loads(result.stdout)["error"]["exit_code"] == result.exit_code == ExitCode.INTERRUPTED


def test_a_file_of_this_machine_that_fails_is_no_bug() -> None:
    result = RUNNER.invoke(raising(PermissionError(13, "Permission denied", "/root/.cache/x")), ["x"])
    assert result.exit_code == ExitCode.BUG
    assert result.stderr.splitlines()[0] == "error: /root/.cache/x: Permission denied"
    assert result.stderr.splitlines()[-1] == "next: ls -ld /root/.cache/x /root/.cache"


def test_a_bug_is_one_line_and_debug_shows_the_traceback() -> None:
    result = RUNNER.invoke(raising(ValueError("oops\nsecond line")), ["x"])
    assert result.stderr.splitlines()[0] == "error: unexpected ValueError: oops"
    debug = RUNNER.invoke(raising(ValueError("oops")), ["x", "--debug"])
    assert "Traceback" in debug.output
    assert debug.exit_code == ExitCode.BUG


def test_a_paragraph_of_help_is_wrapped_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    shown = RUNNER.invoke(frame.app, ["sweep", "--help"]).stdout
    assert (
        "A tree is recommended if its answers are linear's and it is surely faster at every number of streams" in shown
    )


def test_brackets_in_an_error_are_not_markup() -> None:
    result = RUNNER.invoke(raising(DdtreeError("[red]x[/red] [/]")), ["x"])
    assert "[red]x[/red] [/]" in result.stderr


@pytest.mark.parametrize(
    ("args", "found", "following"),
    [
        (["nonsense"], "No such command 'nonsense'", "next: ddtree-ops --help"),
        (["target"], "Did you mean 'targets'?", "next: ddtree-ops --help"),
        (["targets", "--colour"], "No such option: --colour", "next: ddtree-ops targets --help"),
        (["targets", "nowhere"], "unknown host or group 'nowhere'", "next: ddtree-ops targets"),
        (["targets", "ct200:x"], "ct200: host ct200 has no instance 'x'", "next: ddtree-ops targets ct200"),
        (
            ["render", "ct200", "--budget", "0"],
            "ct200:tree: budget 0 is out of range",
            "next: use a budget of 1 to 255",
        ),
        (["render", "ct200", "--budget", "-4"], "budget -4 is out of range", "use a budget of 1 to 255"),
        (["render", "ct200", "--budget", "256"], "budget 256 is out of range", "use a budget of 1 to 255"),
        (["render", "ct200", "--topk-cap", "17"], "topk_cap 17 is out of range", "use a topk_cap of 1 to 16"),
        (["render", "ct200", "--budget", "many"], "it must be a whole number", "next: ddtree-ops render --help"),
        (["render", "ct200", "--mode", "tee"], "'tee' is not one of 'ar', 'linear'", "next: ddtree-ops render --help"),
        (["render", "ct200", "--gpu", "8"], "GPU 8 is out of range: the host has 8", "next: use a GPU of 0 to 7"),
        (["render", "ct200", "--gpu", "0"], "GPU 0 is already instance linear's", "next: use a GPU that no other"),
        (["render", "ct200", "--port", "30000"], "port 30000 is already instance linear's", "next: use another port"),
        (["render", "ct200", "--allow-hybrid-unsafe"], "without a reason", "next: give --reason"),
        (["render", "ct200", "--port", "70000"], "must be at most 65535", "next: give port a value of at most 65535"),
        (["prune", "ct200", "--keep", "-1"], "it must be at least 0", "next: ddtree-ops prune --help"),
        (["deploy", "ct200", "--parallel", "65"], "it must be at most 64", "next: ddtree-ops deploy --help"),
        (["render"], "Missing argument", "next: ddtree-ops render --help"),
        (["targets", "-i", "docs/demo.svg"], "is not valid TOML", "next: repair that line"),
        (["targets", "-i", "docs/benchmark.png"], "is not a text: byte 0", "next: iconv"),
        (["targets", "-i", "nowhere.toml"], "nowhere.toml does not exist", "--inventory FILE"),
    ],
)
def test_usage_errors(args: list[str], found: str, following: str) -> None:
    result = RUNNER.invoke(frame.app, args, prog_name="ddtree-ops")
    assert result.exit_code == ExitCode.USAGE
    assert found in result.stderr
    assert following in result.stderr


def test_no_command_shows_the_help() -> None:
    result = RUNNER.invoke(frame.app, [])
    assert result.exit_code == ExitCode.DONE
    assert "targets" in result.stdout


@pytest.mark.parametrize("name", [info.name for info in frame.app.registered_commands])
def test_every_command_has_help_with_an_example(name: str) -> None:
    result = RUNNER.invoke(frame.app, [name, "--help"])
    assert result.exit_code == ExitCode.DONE
    assert "Examples:" in result.stdout
    assert f"ddtree-ops {name}" in result.stdout.split("Examples:")[1]
    assert all(option in result.stdout for option in ("--json", "--inventory", "--debug"))


def test_shared_options_stand_before_or_after_the_command() -> None:
    before = RUNNER.invoke(frame.app, ["--json", "-i", "inventory/ct200.toml", "targets", "ct200"])
    after = RUNNER.invoke(frame.app, ["targets", "ct200", "--json", "--inventory", "inventory/ct200.toml"])
    assert before.exit_code == after.exit_code == ExitCode.DONE
    assert json.loads(before.stdout) == json.loads(after.stdout)
    [inventory] = json.loads(after.stdout)["inventories"]
    assert [target["target"] for target in inventory["targets"]] == ["ct200:linear", "ct200:tree"]


# -- render


def test_the_command_of_the_example_works_as_it_stands() -> None:
    result = RUNNER.invoke(frame.app, ["render", "ct200", "--mode", "tree", "--budget", "32"])
    assert result.exit_code == ExitCode.DONE
    assert result.stdout.startswith("# sglang-ddtree-tree.service\n")
    assert result.stdout.count("[Service]") == 1
    assert "--speculative-ddtree-budget 32" in result.stdout


def test_render_as_json_holds_the_exact_argv() -> None:
    result = RUNNER.invoke(frame.app, ["render", "ct200", "--json", "--release", "abc"])
    units = json.loads(result.stdout)["units"]
    assert [unit["name"] for unit in units] == ["sglang-ddtree-linear.service", "sglang-ddtree-tree.service"]
    assert units[0]["argv"][units[0]["argv"].index("--weight-version") + 1] == "abc"


def test_a_capped_topk_is_said() -> None:
    result = RUNNER.invoke(frame.app, ["render", "ct200", "--budget", "4", "--topk-cap", "9"])
    assert result.stderr == "note: ct200:tree: topk-cap 9 is above the budget; capped at 4\n"
    assert "--speculative-ddtree-topk-cap 4" in result.stdout


def test_mode_tree_without_a_drafter(tmp_path: Path) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text(HOST.format(name="h"))
    result = RUNNER.invoke(frame.app, ["render", "h", "--mode", "tree", "-i", str(file)])
    assert result.exit_code == ExitCode.USAGE
    assert "error: h:a: mode tree has no drafter" in result.stderr


def test_a_template_with_an_undefined_variable(tmp_path: Path) -> None:
    (tmp_path / "own.j2").write_text("ExecStart={{ comand }}\n")
    file = tmp_path / "fleet.toml"
    file.write_text(HOST.format(name="h").replace("[hosts.h]\n", '[hosts.h]\nunit_template = "own.j2"\n'))
    result = RUNNER.invoke(frame.app, ["render", "h", "-i", str(file)])
    assert result.exit_code == ExitCode.USAGE
    assert "own.j2:1: 'comand' is undefined" in result.stderr
    assert "a template may use: cache, " in result.stderr


# -- which inventory


HOST = (
    '[hosts.{name}]\naddress = "{name}"\n[hosts.{name}.instances.a]\nmode = "ar"\ngpus = [0]\nport = 1\nmodel = "/m"\n'
)


def fleet_dir(at: Path, **hosts: str) -> None:
    (at / "inventory").mkdir()
    for file, host in hosts.items():
        (at / "inventory" / f"{file}.toml").write_text(HOST.format(name=host))


def test_the_file_that_defines_the_target_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet_dir(tmp_path, x="one", y="two", z="two")
    monkeypatch.chdir(tmp_path)
    assert RUNNER.invoke(frame.app, ["targets", "one"]).exit_code == ExitCode.DONE
    twice = RUNNER.invoke(frame.app, ["targets", "two"])
    assert "defined in more than one inventory: y.toml, z.toml" in twice.stderr
    listed = RUNNER.invoke(frame.app, ["targets"])
    assert (listed.exit_code, listed.stdout.count("two:a")) == (ExitCode.DONE, 2)
    every = RUNNER.invoke(frame.app, ["render", "all"])
    assert "more than one inventory" in every.stderr
    unknown = RUNNER.invoke(frame.app, ["targets", "on"])
    assert "Did you mean 'one'?" in unknown.stderr
    assert {r.exit_code for r in (twice, every, unknown)} == {ExitCode.USAGE}


def test_precedence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    empty = RUNNER.invoke(frame.app, ["targets"])
    assert empty.exit_code == ExitCode.USAGE
    assert "no inventory" in empty.stderr
    config = tmp_path / "ddtree-ops" / "inventory.toml"
    config.parent.mkdir()
    config.write_text(HOST.format(name="config"))
    assert "config:a" in RUNNER.invoke(frame.app, ["targets"]).stdout
    fleet_dir(tmp_path, x="folder")
    assert "folder:a" in RUNNER.invoke(frame.app, ["targets"]).stdout
    (tmp_path / "inventory.toml").write_text(HOST.format(name="single"))
    assert "single:a" in RUNNER.invoke(frame.app, ["targets"]).stdout
    (tmp_path / "other.toml").write_text(HOST.format(name="other"))
    monkeypatch.setenv("DDTREE_INVENTORY", "other.toml")
    assert "other:a" in RUNNER.invoke(frame.app, ["targets"]).stdout
    assert "single:a" in RUNNER.invoke(frame.app, ["targets", "-i", "inventory.toml"]).stdout


# -- commands to run next act on the same inventory


def telling(app: typer.Typer) -> None:
    """Add a command ``x`` that tells of commands in every way there is, and then fails."""

    @command(app, "x", examples=["ddtree-ops x"])
    def x(session: Session, target: OneTarget) -> None:
        """Tell."""
        session.out.notice(f"carry it out: ddtree-ops deploy {target}")
        raise LockedError(f"locked by ddtree-ops deploy {target}", target, next=f"ddtree-ops unlock {target} --force")


@pytest.mark.parametrize(
    ("words", "option"),
    [
        ((), ""),
        (("x", "h1", "-i", "inventory/ct200.toml"), " -i inventory/ct200.toml"),
        (("--inventory", "my fleet's.toml", "x", "h1"), " -i 'my fleet'\"'\"'s.toml'"),
        (("-i", "above.toml", "x", "h1", "--inventory=below.toml"), " -i below.toml"),
    ],
)
def test_a_command_to_run_next_repeats_the_inventory_that_an_option_named(words: tuple[str, ...], option: str) -> None:
    app = frame.build_app()
    telling(app)
    result = RUNNER.invoke(app, list(words or ("x", "h1")))
    assert result.stderr == (
        f"note: carry it out: ddtree-ops deploy{option} h1\n"
        "error: h1: locked by ddtree-ops deploy h1\n"
        f"next: ddtree-ops unlock{option} h1 --force\n"
    )
    found = json.loads(RUNNER.invoke(app, [*(words or ("x", "h1")), "--json"]).stdout)["error"]
    assert found["next"] == f"ddtree-ops unlock{option} h1 --force"


def test_an_inventory_that_the_environment_names_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDTREE_INVENTORY", "inventory/ct200.toml")
    result = RUNNER.invoke(frame.app, ["targets", "ct200:nothing"])
    assert result.stderr.endswith("next: ddtree-ops targets ct200\n")
    named = RUNNER.invoke(frame.app, ["targets", "ct200:nothing", "-i", "inventory/ct200.toml"])
    assert named.stderr.endswith("next: ddtree-ops targets -i inventory/ct200.toml ct200\n")


def test_an_interrupted_command_repeats_it_too() -> None:
    result = RUNNER.invoke(raising(KeyboardInterrupt()), ["x", "--json", "-i", "f.toml"])
    assert json.loads(result.stdout)["error"]["next"] == "ddtree-ops status -i f.toml"


def test_every_command_that_reads_an_inventory_is_known() -> None:
    assert set(COMMANDS) == set(frame.COMMANDS) - {"bundle", "lab"}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("if it is there: ddtree-ops doctor h1", "if it is there: ddtree-ops doctor -i f h1"),
        ("mv a b && ddtree-ops deploy h1:a", "mv a b && ddtree-ops deploy -i f h1:a"),
        ("stopped: x; go on: ddtree-ops deploy --resume", "stopped: x; go on: ddtree-ops deploy -i f --resume"),
        ("ddtree-ops status", "ddtree-ops status -i f"),
        ("ddtree-ops deploy -i f h1", "ddtree-ops deploy -i f h1"),
        ("ddtree-ops status --help", "ddtree-ops status --help"),
        ("ddtree-ops lab up", "ddtree-ops lab up"),
        ("ddtree-ops bundle", "ddtree-ops bundle"),
        ("another version of ddtree-ops deployed it", "another version of ddtree-ops deployed it"),
        ("unit sglang-ddtree-ops status", "unit sglang-ddtree-ops status"),
    ],
)
def test_only_commands_that_read_an_inventory_and_name_none_repeat_it(text: str, shown: str) -> None:
    assert repeat_inventory(text, Path("f")) == shown
    assert repeat_inventory(text, None) == text


def test_of_data_only_the_fields_that_hold_commands_repeat_it() -> None:
    said = "ddtree-ops deploy h1"
    data = {"unit": said, "next": said, "errors": [{"next": said, "found": said}], "notes": [said], "repair": None}
    shown = "ddtree-ops deploy -i f h1"
    assert repeat_in_data(data, Path("f")) == {
        "unit": said,
        "next": shown,
        "errors": [{"next": shown, "found": said}],
        "notes": [shown],
        "repair": None,
    }
    assert repeat_in_data(data, None) == data


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("deploy ct", {"ct200", "ct200:linear", "ct200:tree"}),
        ("status ct200:t", {"ct200:tree"}),
        ("deploy ct200 : t", {"tree"}),  # bash has split the word at the colon
        ("diff ct200 : t", {"tree"}),  # here a word of its own would be a release
        ("smoke ct200 : ", {"linear", "tree"}),
        ("rollback lab1 : main lab2 : m", {"main"}),
        ("rollback lab1 : main l", {"lab", "lab1", "lab2", "lab2:main", "local", "local:main"}),
        ("status lab1 pr", {"prod"}),
        ("rollback al", {"all"}),
    ],
)
def test_the_shell_completes_targets(typed: str, offered: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_DDTREE_OPS_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", f"ddtree-ops {typed}")
    monkeypatch.setenv("COMP_CWORD", str(len(typed.split(" "))))
    result = RUNNER.invoke(frame.app, [], prog_name="ddtree-ops")
    assert set(result.stdout.split()) == offered
