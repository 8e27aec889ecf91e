"""How a command is declared: a function, its name, examples; the options all commands share come by themselves.

    @command(app, "render", examples=["ddtree-ops render ct200:tree"], changes=True)
    def render(session: Session, targets: Targets, overrides: Overrides) -> None:
        \"\"\"One line for the list of commands.\"\"\"

The first parameter is the ``Session``. With ``changes=True`` the options that change settings (``--mode``,
``--budget``, ...) are added and arrive as one ``Overrides``.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, get_args

import platformdirs
import typer

from ddtree_ops.cli.completion import complete_target
from ddtree_ops.inventory import load_fleet, locate_inventory
from ddtree_ops.inventory.locate import candidates
from ddtree_ops.model import MAX_BUDGET, MAX_TOPK_CAP, Fleet, Mode
from ddtree_ops.targets import Overrides, Selection, resolve_targets
from ddtree_ops.ui import Output


def _flag(*names: str, panel: str, help: str, metavar: str | None = None) -> Any:
    return typer.Option(*names, metavar=metavar, show_default=False, help=help, rich_help_panel=panel)


SHARED = "Of every command"
SETTINGS = "Settings of the instance, for this command"

InventoryOption = Annotated[
    Path | None, _flag("--inventory", "-i", metavar="FILE", panel=SHARED, help="Inventory file (TOML).")
]
JsonOption = Annotated[bool, _flag("--json", panel=SHARED, help="Print one JSON document instead of text.")]
DebugOption = Annotated[bool, _flag("--debug", panel=SHARED, help="Show every call to a host, and tracebacks.")]

ModeOption = Annotated[Mode | None, _flag("--mode", "-m", metavar="MODE", panel=SETTINGS, help=f"{', '.join(Mode)}.")]
Budget = Annotated[
    int | None, _flag("--budget", "-b", metavar="N", panel=SETTINGS, help=f"Tree nodes, 1 to {MAX_BUDGET}.")
]
Width = Annotated[
    list[int] | None,
    _flag("--width", metavar="N", panel=SETTINGS, help="Mode auto: nodes of one of its trees; may be repeated."),
]
TopkCap = Annotated[
    int | None,
    _flag("--topk-cap", "-k", metavar="K", panel=SETTINGS, help=f"Most children of a node, 1 to {MAX_TOPK_CAP}."),
]
StatesOption = Annotated[
    str | None,
    _flag(
        "--states",
        metavar="WORD",
        panel=SETTINGS,
        help="How trees keep recurrent states: records (default where written for) or snapshots.",
    ),
]
Gpu = Annotated[list[int] | None, _flag("--gpu", "-g", metavar="G", panel=SETTINGS, help="GPU; may be repeated.")]
Port = Annotated[int | None, _flag("--port", "-p", metavar="P", panel=SETTINGS, help="Port of the server.")]
Unsafe = Annotated[
    bool,
    _flag("--allow-hybrid-unsafe", panel=SETTINGS, help="Admit a combination whose parity suite has not passed."),
]
Reason = Annotated[str | None, _flag("--reason", metavar="TEXT", panel=SETTINGS, help="Why; recorded and shown.")]


def _targets(metavar: str, help: str) -> Any:
    return typer.Argument(metavar=metavar, show_default=False, autocompletion=complete_target, help=help)


_ANY = "HOST, HOST:INSTANCE, group or all"
Targets = Annotated[list[str], _targets("TARGET", f"{_ANY}.")]
OptionalTargets = Annotated[list[str] | None, _targets("TARGET", f"{_ANY}; everything if left out.")]
TargetsUnlessPlan = Annotated[list[str] | None, _targets("TARGET", f"{_ANY}; none with --plan.")]
OneTarget = Annotated[str, _targets("TARGET", "HOST or HOST:INSTANCE.")]


@dataclass
class Session:
    """What the shared options said: which inventory, which output."""

    inventory: Path | None = None
    json: bool = False
    debug: bool = False
    out: Output = field(default_factory=Output)

    def fleet(self, targets: Sequence[str] = ()) -> Fleet:
        """The inventory that the targets are in."""
        return load_fleet(
            locate_inventory(
                self.inventory, targets, environ=os.environ, config_dir=platformdirs.user_config_path("ddtree-ops")
            )
        )

    def fleets(self) -> list[Fleet]:
        """Every inventory that a target could be in."""
        files = candidates(self.inventory, environ=os.environ, config_dir=platformdirs.user_config_path("ddtree-ops"))
        return [load_fleet(path) for path in files]

    def select(self, targets: Sequence[str] | None, overrides: Overrides | None = None) -> Selection:
        """The targets with their settings; what a person should know about it is printed."""
        targets = targets or ()
        selection = resolve_targets(self.fleet(targets), targets, overrides)
        for notice in selection.notices:
            self.out.notice(notice)
        return selection


def _changing(
    mode: ModeOption = None,
    budget: Budget = None,
    width: Width = None,
    topk_cap: TopkCap = None,
    states: StatesOption = None,
    gpu: Gpu = None,
    port: Port = None,
    allow_hybrid_unsafe: Unsafe = False,
    reason: Reason = None,
) -> Overrides:
    return Overrides(
        mode=mode,
        budget=budget,
        widths=tuple(width) if width else None,
        topk_cap=topk_cap,
        states=states,
        gpus=tuple(gpu) if gpu else None,
        port=port,
        allow_hybrid_unsafe=allow_hybrid_unsafe or None,
        unsafe_reason=reason,
    )


def _common(inventory: InventoryOption = None, json: JsonOption = False, debug: DebugOption = False) -> None: ...


def command(
    app: typer.Typer, name: str, *, examples: Sequence[str], changes: bool = False
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a function as a command. ``examples`` are shown at the end of its help."""

    def decorate(func: Callable[..., None]) -> Callable[..., None]:
        own = [p for p in _parameters(func) if p.name not in ("session", "overrides")]
        changing = _parameters(_changing) if changes else []
        # a command that has its own --reason (say, for skipping a gate) shares it with the settings' one
        changing = [p for p in changing if p.name not in {q.name for q in own}]
        names = {p.name for p in changing}

        @functools.wraps(func)
        def run(context: typer.Context, **given: Any) -> None:
            shared = {key: given.pop(key) for key in ("inventory", "json", "debug")}
            session = _session(context, shared)
            if changes:
                wanted = {key: given.pop(key) for key in names}
                wanted |= {"reason": given["reason"]} if "reason" in given else {}
                given["overrides"] = _changing(**wanted)
            func(session, **given)

        first = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
        parameters = [first, *own, *changing, *_parameters(_common)]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        epilog = "\n\n".join(["Examples:", *(f"  {example}" for example in examples)])
        app.command(name, help=_paragraphs(inspect.getdoc(func) or ""), epilog=epilog)(run)
        return func

    return decorate


def _paragraphs(text: str) -> str:
    """The lines of each paragraph as one: the terminal's width wraps them, not the source's."""
    return "\n\n".join(" ".join(each.split()) for each in text.split("\n\n"))


def _parameters(func: Callable[..., Any]) -> list[inspect.Parameter]:
    parameters = inspect.signature(func, eval_str=True).parameters.values()
    return [_plain_flag(p.replace(kind=inspect.Parameter.KEYWORD_ONLY)) for p in parameters]


def _plain_flag(parameter: inspect.Parameter) -> inspect.Parameter:
    """A flag takes no value, so its help shows none (typer would write <bool>)."""
    kind, *notes = get_args(parameter.annotation) or (None,)
    if kind is bool:
        for note in notes:
            note.metavar = note.metavar or ""
    return parameter


def _session(context: typer.Context, shared: dict[str, Any]) -> Session:
    """The shared options may stand before or after the command's name; after wins. The frame learns what held."""
    above: dict[str, Any] = context.find_root().obj
    merged = {key: shared[key] or above.get(key) for key in shared}
    above.update(merged)
    json, inventory = bool(merged["json"]), merged["inventory"]
    out = Output(json=json, inventory=inventory)
    return Session(inventory=inventory, json=json, debug=bool(merged["debug"]), out=out)
