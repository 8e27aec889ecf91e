#!/usr/bin/env python3
"""The demonstration behind ``make demo``: two real hosts, four deploys (one broken on purpose), a rollback.

Every step runs the real ``ddtree-ops`` in a terminal of its own and checks its exit code. Nothing is mocked but the
model server, which says of itself that it is a stand-in; at the end the self-test pair takes its place and writes text.
``--svg FILE`` exports the run as the README's picture.
"""

from __future__ import annotations

import argparse
import io
import os
import pty
import re
import select
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.text import Text

from ddtree_ops.errors import DdtreeError, ExitCode
from ddtree_ops.lab.lab import Lab
from ddtree_ops.lab.owned import owned_lab, take_down
from ddtree_ops.lab.system import debian, require_root

COLUMNS = 110
STEP_S = 240.0
PROMPT = "def read_config(path):"


@dataclass(frozen=True)
class Step:
    """One command of the story: why, what, and the exit code it must end with. ``shown``: part of the picture."""

    why: str
    words: Sequence[str]
    expect: ExitCode = ExitCode.DONE
    shown: bool = True
    pair: bool = False  # with the inventory of the self-test pair


STORY = (
    Step("Two hosts with a real systemd and sshd.", ("lab", "up"), shown=False),
    Step("First deploy: linear speculation on both.", ("deploy", "lab"), shown=False),
    Step(
        "What would a draft tree of 32 nodes change?", ("plan", "lab1", "--mode", "tree", "--budget", "32"), shown=False
    ),
    Step(
        "Deploy it on both, and write it into the inventory.",
        ("deploy", "lab", "--mode", "tree", "--budget", "32", "--save"),
    ),
    Step("What the inventory wants is on disk, loaded, and what answers.", ("status", "lab")),
    Step(
        "Now break one on purpose: a server with 64 nodes runs out of memory on lab1.",
        ("lab", "fault", "lab1", "CRASH_AT_START=1", "ONLY=budget=64"),
        shown=False,
    ),
    Step(
        "The failed deploy is taken back: exit code 5, the release before it serves again.",
        ("deploy", "lab1", "--mode", "tree", "--budget", "64"),
        ExitCode.ROLLED_BACK,
    ),
    Step("And by hand: back to the last proven release before this one.", ("rollback", "lab1"), shown=False),
    Step("What happened on lab1.", ("history", "lab1"), shown=False),
    Step("What runs now, and where lab1 differs from the inventory.", ("status", "lab"), shown=False),
    Step("Real weights on lab1, sent as to a host without internet.", ("lab", "pair", "lab1"), shown=False),
    Step("A chain drafts, on the CPU.", ("deploy", "lab1", "--mode", "linear"), shown=False, pair=True),
    Step("What it writes, in how many rounds.", ("lab", "ask", "lab1", PROMPT), shown=False),
    Step("A tree of 32 nodes.", ("deploy", "lab1", "--mode", "tree", "--budget", "32"), shown=False, pair=True),
    Step("The same text, to the letter, in fewer rounds.", ("lab", "ask", "lab1", PROMPT), shown=False),
)


@dataclass
class Screen:
    """What a terminal shows after some output: enough of one to undo the redraws of a progress display."""

    lines: list[str] = field(default_factory=lambda: [""])
    row: int = 0

    def feed(self, text: str) -> None:
        for part in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|[^\x1b]+", text.replace("\r\n", "\n")):
            if part.startswith("\x1b["):
                self._control(part)
            else:
                self._print(part)

    def _control(self, sequence: str) -> None:
        count = int(re.sub(r"\D", "", sequence) or 1)
        if sequence.endswith("A"):
            self.row = max(0, self.row - count)
        elif sequence.endswith("K"):
            self.lines[self.row] = ""
        elif sequence.endswith("m"):
            self.lines[self.row] += sequence

    def _print(self, text: str) -> None:
        for character in text:
            if character == "\n":
                self.row += 1
                if self.row == len(self.lines):
                    self.lines.append("")
            elif character == "\r":
                pass  # a carriage return comes before an erased line, or does not matter
            else:
                self.lines[self.row] += character

    @property
    def text(self) -> Text:
        return Text.from_ansi("\n".join(self.lines).rstrip("\n"))


def run_in_terminal(argv: Sequence[str], env: dict[str, str], mirror: bool) -> tuple[int, Screen]:
    """Run a command in a pseudo terminal; what it writes goes to our own terminal too if ``mirror``."""
    parent, child = pty.openpty()
    process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=child, stderr=child, env=env, close_fds=True)
    os.close(child)
    screen, deadline = Screen(), time.monotonic() + STEP_S
    try:
        while True:
            ready, _, _ = select.select([parent], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                process.kill()
                raise TimeoutError(f"{shlex.join(argv)} did not end in {STEP_S:.0f} s")
            try:
                data = os.read(parent, 65536)
            except OSError:  # how Linux says that the other side of a terminal is closed
                break
            if not data:
                break
            screen.feed(data.decode("utf-8", "replace"))
            if mirror:
                os.write(sys.stdout.fileno(), data)
    finally:
        os.close(parent)
        process.wait(timeout=30)
    return process.returncode, screen


def environment(lab: Lab, step: Step, home: Path) -> dict[str, str]:
    """For one step: the lab's inventory, and a home for everything else that a deploy writes on its operator's side."""
    inventory = lab.names.pair_inventory if step.pair else lab.names.inventory
    own = {"DDTREE_LAB": lab.names.lab, "DDTREE_INVENTORY": str(inventory)}
    own |= {"COLUMNS": str(COLUMNS), "TERM": "xterm-256color"}
    if step.words[0] != "lab":  # the lab keeps its own state where `lab up` and `lab down` find it
        own |= {f"XDG_{name}_HOME": str(home / name.lower()) for name in ("CONFIG", "DATA", "STATE")}
    return {**{key: value for key, value in os.environ.items() if key != "NO_COLOR"}, **own}


def tell(console: Console, picture: Console, lab: Lab, home: Path) -> bool:
    """Play the story; False if a step ended otherwise than it must."""
    for number, step in enumerate(STORY, 1):
        line = Text.assemble(("$ ", "bold green"), shlex.join(("ddtree-ops", *step.words)))
        console.print(Text(f"# {number}/{len(STORY)}  {step.why}", style="bold"), soft_wrap=True)
        console.print(line, soft_wrap=True)
        console.file.flush()
        argv = [sys.executable, "-m", "ddtree_ops", *step.words]
        code, screen = run_in_terminal(argv, environment(lab, step, home), mirror=console.is_terminal)
        if not console.is_terminal:
            console.print(screen.text, soft_wrap=True)
        console.print(Text(f"exit code {code}", style="dim"))
        console.print()
        if step.shown:
            picture.print(Text(f"# {step.why}", style="dim"), line, screen.text, sep="\n")
            picture.print(Text(f"exit code {code}\n" if code else "", style="dim"))
        if code != step.expect:
            console.print(Text(f"this step must end with {int(step.expect)}, it ended with {code}", style="bold red"))
            return False
    return True


def refuse(console: Console, error: DdtreeError) -> int:
    """Say what is missing here, and what works without it."""

    def say(text: str | Text) -> None:
        console.print(text, soft_wrap=True)

    say(Text(f"make demo cannot run here: {error.found}.", style="bold"))
    say(f"It boots two systemd hosts on this machine, as root on Debian 12: {error.why}.")
    if shutil.which("systemctl") is None:
        say("This machine has no systemd of its own to use instead.")
    else:
        say("Without any of that, ddtree-ops drives this machine's own systemd, as you, without sudo:")
        say("    $EDITOR inventory/local.toml        # where the model and SGLang's virtual environment lie")
        say("    .venv/bin/ddtree-ops plan local")
        say("    .venv/bin/ddtree-ops deploy local")
    return int(error.exit_code)


def self_contained(svg: str) -> str:
    """Without rich's web fonts (a picture in a repository loads nothing), and with every blank kept."""
    plain = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)
    return plain.replace("<svg ", '<svg xml:space="preserve" ', 1)


def main() -> int:
    parser = argparse.ArgumentParser(description="Boot two hosts, deploy, break a deploy, roll back, tear down.")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="export the run as a picture")
    parser.add_argument("--keep", action="store_true", help="leave the hosts running")
    options = parser.parse_args()
    console = Console(highlight=False)
    picture = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, highlight=False)
    try:
        require_root()
        debian()
    except DdtreeError as error:
        return refuse(console, error)
    lab, started, done = Lab(owned_lab("demo")), time.monotonic(), False
    try:
        take_down("demo")  # what a demonstration that was killed left
        with tempfile.TemporaryDirectory(prefix="ddtree-demo-") as home:
            done = tell(console, picture, lab, Path(home))
        if done and options.svg:
            options.svg.write_text(self_contained(picture.export_svg(title="ddtree-ops")))
            console.print(f"picture: {options.svg}")
    except KeyboardInterrupt:
        return int(ExitCode.INTERRUPTED)
    finally:
        if options.keep:
            console.print(f"the hosts stay: ddtree-ops lab status --lab {lab.names.lab}")
        else:
            lab.down()
            console.print("the hosts are gone; nothing of them stays but the cached base root")
    console.print(f"{'done' if done else 'failed'} in {time.monotonic() - started:.0f} s")
    return 0 if done else 1


if __name__ == "__main__":
    sys.exit(main())
