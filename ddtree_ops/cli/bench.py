"""``ddtree-ops bench``: what servers that run do."""

from __future__ import annotations

from typing import Annotated

import typer

from ddtree_ops.cli.command import Session, Targets, command

Streams = Annotated[
    list[int] | None,
    typer.Option("--streams", "-s", metavar="N", show_default=False, help="Requests at a time; may be repeated."),
]
Prompts = Annotated[int | None, typer.Option("--prompts", metavar="N", show_default=False, help="How many prompts.")]
Tokens = Annotated[int | None, typer.Option("--tokens", metavar="N", show_default=False, help="Tokens of an answer.")]
Rounds = Annotated[
    int | None, typer.Option("--rounds", metavar="N", show_default=False, help="How often each prompt is asked.")
]
Wait = Annotated[int, typer.Option("--wait", metavar="S", min=0, help="Seconds to wait for a lock.")]

EXAMPLES = [
    "ddtree-ops bench ct200:tree",
    "ddtree-ops bench ct200:linear ct200:tree --streams 1 --streams 8",
    "ddtree-ops bench ct200:tree --json | jq '.targets[].runs[].tokens_per_s'",
]


def register(app: typer.Typer) -> None:
    @command(app, "bench", examples=EXAMPLES)
    def bench(
        session: Session,
        targets: Targets,
        streams: Streams = None,
        prompts: Prompts = None,
        tokens: Tokens = None,
        rounds: Rounds = None,
        wait: Wait = 0,
    ) -> None:
        """Measure servers that run, on their own hosts and as the gates measure; nothing is changed.

        Several targets take turns, and the first is what the others are compared with; a single one is compared with
        the linear baseline that its host keeps. What is not given is as the instance's gates say. Requests of others
        slow it down, and it slows them.
        """
        from ddtree_ops import measuring
        from ddtree_ops.ui.measure import show_bench
        from ddtree_ops.ui.progress import showing

        load = measuring.Load(tuple(streams or ()), prompts, tokens, rounds)
        with showing(session.out) as report:
            found = measuring.bench(session.fleet, targets, load, wait, report)
        if session.json:
            session.out.data({"exit_code": 0, "targets": [each.as_json() for each in found]})
        else:
            show_bench(session.out, found)
