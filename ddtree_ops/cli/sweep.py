"""``ddtree-ops sweep``: which tree is fastest here, or is it linear."""

from __future__ import annotations

from typing import Annotated

import typer

from ddtree_ops.cli.bench import Prompts, Rounds, Streams, Tokens, Wait
from ddtree_ops.cli.command import OneTarget, Reason, Session, Unsafe, command
from ddtree_ops.errors import UsageError
from ddtree_ops.targets import Overrides

Budgets = Annotated[str, typer.Option("--budgets", "-b", metavar="N,N,...", help="Sizes of trees to try.")]
Caps = Annotated[
    str,
    typer.Option("--topk-caps", "-k", metavar="K,K,...", show_default=False, help="Caps to try; else the instance's."),
]
Save = Annotated[bool, typer.Option("--save", help="Write what is recommended into the inventory.")]

EXAMPLES = [
    "ddtree-ops sweep ct200:tree",
    "ddtree-ops sweep ct200:tree --budgets 16,32,64 --topk-caps 4,8 --streams 1 --streams 8",
    "ddtree-ops sweep ct200:tree --save && ddtree-ops deploy ct200:tree",
]


def register(app: typer.Typer) -> None:
    @command(app, "sweep", examples=EXAMPLES)
    def sweep(
        session: Session,
        target: OneTarget,
        budgets: Budgets = "8,16,32,64",
        topk_caps: Caps = "",
        streams: Streams = None,
        prompts: Prompts = None,
        tokens: Tokens = None,
        rounds: Rounds = None,
        save: Save = False,
        wait: Wait = 0,
        allow_hybrid_unsafe: Unsafe = False,
        reason: Reason = None,
    ) -> None:
        """Start linear and trees of several sizes on one instance, measure each, put back what ran, say which to keep.

        The instance serves nobody meanwhile. A tree is recommended if its answers are linear's and it is surely faster
        at every number of streams; else linear is. Exit code 0: measured, and the host is as before; 5: nothing could
        be measured; 6: what ran before does not run again.
        """
        from ddtree_ops import measuring, operate
        from ddtree_ops.ui.measure import show_sweep
        from ddtree_ops.ui.progress import showing

        unsafe = Overrides(allow_hybrid_unsafe=allow_hybrid_unsafe or None, unsafe_reason=reason)
        sizes = numbers("--budgets", budgets), numbers("--topk-caps", topk_caps)
        wanted, settings = measuring.arms(session.fleet, target, *sizes, unsafe)
        for notice in wanted.notices:
            session.out.notice(notice)
        load = measuring.Load(tuple(streams or ()), prompts, tokens, rounds)
        with showing(session.out) as report:
            swept = measuring.sweep(wanted, settings, load, operate.How(lock_wait_s=wait), report)
        if save:
            swept = measuring.save(wanted, swept)
            for line in swept.saved:
                session.out.notice(line)
        if session.json:
            session.out.data(swept.as_json())
        else:
            show_sweep(session.out, swept)
        raise typer.Exit(swept.code)


def numbers(option: str, text: str) -> list[int]:
    """``8,16,32``. UsageError for anything else."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    wrong = next((word for word in words if not word.lstrip("-").isdigit()), None)
    if wrong is not None:
        raise UsageError(
            f"{option}: {wrong!r} is no whole number", why="it takes numbers with commas", next=f"{option} 8,16,32"
        )
    return [int(word) for word in words]
