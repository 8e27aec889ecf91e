"""The frame: the table of commands, the options all share, and the one place where errors become exit codes.

To add a command, write ``ddtree_ops/cli/NAME.py`` with ``register(app)`` and add its name to ``COMMANDS``.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from ddtree_ops import __version__
from ddtree_ops.cli.command import DebugOption, InventoryOption, JsonOption
from ddtree_ops.cli.completion import whole_words
from ddtree_ops.errors import DdtreeError, ExitCode, UsageError
from ddtree_ops.interrupt import Interrupted
from ddtree_ops.log import LOG
from ddtree_ops.ui import Output
from ddtree_ops.ui.streams import Patient, patient_streams

# one module of this package each, in the order of --help
COMMANDS: tuple[str, ...] = (
    "doctor",
    "bootstrap",
    "smoke",
    "selftest",
    "bench",
    "sweep",
    "targets",
    "render",
    "plan",
    "deploy",
    "status",
    "rollback",
    "logs",
    "history",
    "diff",
    "unlock",
    "prune",
    "bundle",
    "trust",
    "lab",
)


class Frame(TyperGroup):
    """Turns every way a command can end into a message and an exit code. No traceback without ``--debug``."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,  # noqa: ARG002  the frame itself ends the process
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        args = list(sys.argv[1:] if args is None else args)
        options: dict[str, Any] = {}  # those that all commands share, once they are parsed
        with patient_streams() as (out, _), whole_words(os.environ):
            code = self._run(args, prog_name, complete_var, windows_expand_args, {**extra, "obj": options}, out)
        lost = out.failure
        if lost is not None and not isinstance(lost, BrokenPipeError):  # a reader that has seen enough is no failure
            Output(inventory=options.get("inventory")).error(_lost(lost))
            code = code or ExitCode.BUG
        sys.exit(code)

    def _run(
        self,
        args: list[str],
        prog_name: str | None,
        complete_var: str | None,
        expand: bool,
        extra: dict[str, Any],
        out: Patient,
    ) -> int:
        # read here too: an error may come before the options are parsed
        output = Output(json="--json" in args)
        debug = "--debug" in args or bool(os.environ.get("DDTREE_DEBUG"))
        if debug:
            LOG.enable()
        try:
            code = super().main(
                args, prog_name, complete_var, standalone_mode=False, windows_expand_args=expand, **extra
            )
        except DdtreeError as error:
            output.inventory = extra["obj"].get("inventory")
            output.error(error)
            code = error.exit_code
            if debug:
                traceback.print_exc()
        except typer.TyperException as error:
            output.error(_usage(error))
            code = ExitCode.USAGE
        except (KeyboardInterrupt, typer.Abort, Interrupted):
            code = ExitCode.INTERRUPTED
        except Exception as error:  # noqa: BLE001  the last net: a bug of ours, said in one line
            output.error(_bug(error))
            code = ExitCode.BUG
            if debug:
                traceback.print_exc()
        if code == ExitCode.INTERRUPTED:
            output.notice("interrupted")
            if output.json and not out.wrote:  # a result, or lines of one, say it themselves
                output.inventory = extra["obj"].get("inventory")
                output.error(EndedError("interrupted", next="ddtree-ops status"))
        return code if isinstance(code, int) else ExitCode.DONE


class EndedError(DdtreeError):
    """A person or the system ended the command; what was begun is taken back."""

    exit_code = ExitCode.INTERRUPTED


def _usage(error: typer.TyperException) -> UsageError:
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "ddtree-ops"
    text = error.format_message() if hasattr(error, "format_message") else str(error)
    for theirs, ours in _WORDS:
        text = text.replace(theirs, ours)
    text = re.sub(r"Input should be (greater|less) than or equal to (\S+)", _bound, text)
    return UsageError(text.rstrip("."), next=f"{path} --help")


def _bound(found: re.Match[str]) -> str:
    return f"it must be at {'least' if found[1] == 'greater' else 'most'} {found[2]}"


_WORDS = (  # what pydantic says to programmers, for people
    ("Value error, ", ""),
    ("Input should be a valid integer, unable to parse string as an integer", "it must be a whole number"),
    ("Input should be a valid number, unable to parse string as a number", "it must be a number"),
)


def _bug(error: Exception) -> DdtreeError:
    if isinstance(error, OSError) and error.filename and error.strerror:  # of this machine: a host's are its helper's
        place = os.fsdecode(error.filename)
        return DdtreeError(
            f"{place}: {error.strerror}",
            why="a file of this machine cannot be used as it must be",
            next=f"ls -ld {place} {os.path.dirname(place) or '.'}",
        )
    found = f"unexpected {type(error).__name__}: {error}".splitlines()[0]
    return DdtreeError(found, why="this is a bug of ddtree-ops", next="run the same command with --debug and report it")


def _lost(failure: OSError) -> DdtreeError:
    return DdtreeError(
        f"standard output cannot be written: {failure.strerror or failure}",
        why="the result is lost; what the command did is done",
        next="ddtree-ops status",
    )


def _version(value: bool) -> None:
    if value:
        typer.echo(f"ddtree-ops {__version__}")
        raise typer.Exit


def _root(
    context: typer.Context,
    inventory: InventoryOption = None,
    json: JsonOption = False,
    debug: DebugOption = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Deploy, prove and roll back SGLang servers with DDTree speculative decoding.

    TARGET is HOST, HOST:INSTANCE, a group, or all.
    """
    del version
    context.obj.update(inventory=inventory, json=json, debug=debug)
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def build_app() -> typer.Typer:
    """The application with every command of the table."""
    made = typer.Typer(
        name="ddtree-ops",
        cls=Frame,
        callback=_root,
        invoke_without_command=True,
        context_settings={"help_option_names": ["-h", "--help"]},
        pretty_exceptions_enable=False,
    )
    for name in COMMANDS:
        importlib.import_module(f"ddtree_ops.cli.{name}").register(made)
    return made


app = build_app()
