"""``ddtree-ops lab``: real systemd hosts on this machine, to deploy to and to break."""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any

import typer

from ddtree_ops.cli.command import Session, command
from ddtree_ops.lab.lab import DISK_MIB, Lab
from ddtree_ops.lab.names import DEFAULT_LAB, LabNames

app = typer.Typer(
    name="lab",
    help="Boot real systemd hosts on this machine (root, Debian) to try deploys on and to break on purpose.",
    no_args_is_help=True,
)

Name = Annotated[
    str, typer.Option("--lab", envvar="DDTREE_LAB", metavar="NAME", help="Which lab; each has its own addresses.")
]
HostName = Annotated[str, typer.Argument(metavar="HOST", show_default=False, help="lab1, lab2, ...")]
# what each fault does, by command name; the methods of Machine have the same names
ACTIONS = {
    "cut": "Unplug a host's network cable; nobody is told.",
    "heal": "Plug the cable in again.",
    "freeze": "Stop every process of a host where it stands; its kernel still answers the network.",
    "thaw": "Let a frozen host go on.",
    "kill": "SIGKILL everything in a host; connections to it are reset. `lab up` boots it again.",
    "powercut": "Pull a host's plug: its network falls silent, what was not synced to disk is lost.",
}


def register(root: typer.Typer) -> None:
    root.add_typer(app)


def _lab(session: Session, name: str) -> Lab:
    return Lab(LabNames(name), say=session.out.notice)


def _show(session: Session, lab: Lab) -> None:
    status, out = lab.status(), session.out
    if session.json:
        out.data(status)
        return
    if not status["hosts"]:
        out.line(f"lab {status['lab']} has no hosts; boot some: ddtree-ops lab up")
        return
    rows = [[host["name"], host["address"], host["power"], host["cable"]] for host in status["hosts"]]
    out.table(("HOST", "ADDRESS", "POWER", "CABLE"), rows)
    out.line(f"inventory: {status['inventory']}")


@command(app, "up", examples=["ddtree-ops lab up", "ddtree-ops lab up -n 3 --disk 512"])
def up(
    session: Session,
    count: Annotated[int, typer.Option("-n", "--hosts", min=1, max=64, help="How many hosts.")] = 2,
    disk: Annotated[int, typer.Option(min=160, metavar="MIB", help="Size of a new host's disk.")] = DISK_MIB,
    name: Name = DEFAULT_LAB,
) -> None:
    """Boot hosts lab1 to labN; those that run already stay as they are."""
    lab = _lab(session, name)
    lab.up(count, disk)
    _show(session, lab)


@command(app, "down", examples=["ddtree-ops lab down"])
def down(session: Session, name: Name = DEFAULT_LAB) -> None:
    """Take the lab down; no process, mount, link or file of it stays (the cached base root does)."""
    there = _lab(session, name).down()
    if session.json:
        session.out.data({"lab": name, "was_there": there})
    else:
        session.out.line(f"lab {name} is down" if there else f"lab {name}: there was nothing to take down")


@command(app, "status", examples=["ddtree-ops lab status", "ddtree-ops lab status --json"])
def status(session: Session, name: Name = DEFAULT_LAB) -> None:
    """Show the lab's hosts: address, power, cable; and where the inventory for them lies."""
    _show(session, _lab(session, name))


@app.command(
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    epilog="Examples:\n\n  ddtree-ops lab ssh lab1\n\n  ddtree-ops lab ssh lab1 systemctl --failed",
)
def ssh(
    host: HostName,
    words: Annotated[list[str] | None, typer.Argument(metavar="[CMD]...", show_default=False)] = None,
    user: Annotated[str, typer.Option(help="root, ops (passwordless sudo) or visitor (no sudo).")] = "root",
    name: Name = DEFAULT_LAB,
) -> None:
    """Run a command in a host through ssh, or open a shell there."""
    machine = Lab(LabNames(name)).machine(host)
    argv = machine.ssh_argv(*(words or []), user=user, tty=not words and sys.stdin.isatty())
    os.execvp(argv[0], argv)


def _state(session: Session, state: dict[str, Any]) -> None:
    if session.json:
        session.out.data(state)
    else:
        session.out.line(f"{state['name']}: power {state['power']}, cable {state['cable']}")


def _add_action(action: str, help: str) -> None:
    def act(session: Session, host: HostName, name: Name = DEFAULT_LAB) -> None:
        machine = _lab(session, name).machine(host)
        getattr(machine, action)()
        _state(session, machine.state())

    act.__name__, act.__doc__ = action, help
    command(app, action, examples=[f"ddtree-ops lab {action} lab1"])(act)


for _action, _help in ACTIONS.items():
    _add_action(_action, _help)


@command(app, "renew", examples=["ddtree-ops lab renew lab1"])
def renew(session: Session, host: HostName, name: Name = DEFAULT_LAB) -> None:
    """Give a host a new disk and boot it, as if just installed; its name, address and keys stay."""
    lab = _lab(session, name)
    machine = lab.machine(host)
    lab.renew(machine)
    _state(session, machine.state())


@command(app, "pair", examples=["ddtree-ops lab pair", "ddtree-ops lab pair lab1"])
def pair(
    session: Session,
    hosts: Annotated[list[str] | None, typer.Argument(metavar="[HOST]...", show_default=False)] = None,
    name: Name = DEFAULT_LAB,
) -> None:
    """Put the self-test pair on hosts: real weights and real text, served by the engine's CPU reference.

    Its Python packages travel as wheels, the way a host without an index gets them. Prints the inventory to use.
    """
    from ddtree_ops.lab.pair import install

    lab = _lab(session, name)
    did = install(lab, [lab.machine(host) for host in hosts or ()])
    if session.json:
        session.out.data({"inventory": str(lab.names.pair_inventory), "hosts": did})
    else:
        session.out.line(f"inventory: {lab.names.pair_inventory}")


@command(app, "ask", examples=["ddtree-ops lab ask lab1 'def read_config(path):'"])
def ask(
    session: Session,
    host: HostName,
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", show_default=False, help="What the text begins with.")],
    tokens: Annotated[int, typer.Option(min=1, max=1000, help="How many to add.")] = 64,
    name: Name = DEFAULT_LAB,
) -> None:
    """Let the pair that a host serves go on with a text, and show in how many rounds it did."""
    from ddtree_ops.lab.pair import complete

    said = complete(_lab(session, name).machine(host), prompt, tokens)
    if session.json:
        session.out.data({"host": host, **said.data()})
    else:
        session.out.line(f"{prompt}{said.text}")
        session.out.line(said.line)


@command(app, "fill", examples=["ddtree-ops lab fill lab1 --leave 1", "ddtree-ops lab fill lab1 --empty"])
def fill(
    session: Session,
    host: HostName,
    leave: Annotated[int, typer.Option(min=0, metavar="MIB", help="What to leave free.")] = 0,
    empty: Annotated[bool, typer.Option("--empty", help="Give the space back instead.")] = False,
    name: Name = DEFAULT_LAB,
) -> None:
    """Fill a host's disk, or give the space back with --empty."""
    machine = _lab(session, name).machine(host)
    if empty:
        machine.empty()
    else:
        machine.fill(leave)
    free = machine.free_bytes()
    if session.json:
        session.out.data({"name": host, "free_bytes": free})
    else:
        session.out.line(f"{host}: {free >> 20} MiB free")


@command(
    app,
    "fault",
    examples=["ddtree-ops lab fault lab1 CRASH_AT_START=1 ONLY=budget=64", "ddtree-ops lab fault lab1 --clear"],
)
def fault(
    session: Session,
    host: HostName,
    faults: Annotated[list[str] | None, typer.Argument(metavar="[NAME=VALUE]...", show_default=False)] = None,
    clear: Annotated[bool, typer.Option("--clear", help="No faults from now on.")] = False,
    name: Name = DEFAULT_LAB,
) -> None:
    """Make the stand-in server misbehave from its next start on (docs/lab.md lists the faults)."""
    machine = _lab(session, name).machine(host)
    now = machine.set_faults([] if clear else faults) if clear or faults else machine.faults()
    if session.json:
        session.out.data({"name": host, "faults": now})
    else:
        session.out.line(f"{host}: {' '.join(f'{key}={value}' for key, value in now.items()) or 'no faults'}")
