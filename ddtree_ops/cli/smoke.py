"""``ddtree-ops smoke``: for CI: deploy, gates, back again, and a report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ddtree_ops.cli.command import OneTarget, Session, command
from ddtree_ops.steps import DEAD_MAN_S
from ddtree_ops.targets import Overrides

JUnitOption = Annotated[
    Path | None, typer.Option("--junit", metavar="FILE", show_default=False, help="Write JUnit XML.")
]
MarkdownOption = Annotated[
    Path | None, typer.Option("--markdown", metavar="FILE", show_default=False, help="Write a page in Markdown.")
]
SkipGateOption = Annotated[
    list[str] | None,
    typer.Option("--skip-gate", metavar="NAME", show_default=False, help="Waive a gate; needs --reason."),
]
WaitOption = Annotated[int, typer.Option("--wait", metavar="S", min=0, help="Seconds to wait for a lock.")]
DeadManOption = Annotated[
    float,
    typer.Option(
        "--dead-man", metavar="S", min=1, help="The host puts back by itself if it hears nothing for so long."
    ),
]

EXAMPLES = [
    "ddtree-ops smoke ct200:tree --budget 32",
    "ddtree-ops smoke ct200:tree --junit smoke.xml --markdown smoke.md",
    "ddtree-ops smoke lab1 --skip-gate throughput --reason 'a stand-in decodes nothing' --json",
]


def register(app: typer.Typer) -> None:
    @command(app, "smoke", examples=EXAMPLES, changes=True)
    def smoke(
        session: Session,
        overrides: Overrides,
        target: OneTarget,
        junit: JUnitOption = None,
        markdown: MarkdownOption = None,
        skip_gate: SkipGateOption = None,
        wait: WaitOption = 0,
        dead_man: DeadManOption = DEAD_MAN_S,
    ) -> None:
        """Deploy to one instance, take it through its gates, and put back what was there.

        Exit code 0: the release passed and the host is as before; else that of the deploy, or of the way back.
        """
        from ddtree_ops import operate
        from ddtree_ops import smoke as run
        from ddtree_ops.errors import UsageError
        from ddtree_ops.gates.run import checked_skips
        from ddtree_ops.ui import smoke as ui
        from ddtree_ops.ui.files import require_writable
        from ddtree_ops.ui.progress import showing
        from ddtree_ops.wiring import CLOCK

        require_writable(junit, markdown)
        wanted = operate.select(session.fleet, [target], overrides)
        if len(wanted.targets) != 1:
            raise UsageError(
                f"{target} means {len(wanted.targets)} instances, a smoke test takes one",
                next=f"ddtree-ops smoke {wanted.targets[0].name}",
            )
        for notice in wanted.notices:
            session.out.notice(notice)
        skips = checked_skips(skip_gate or (), overrides.unsafe_reason)
        how = operate.How(restart=True, lock_wait_s=wait, dead_man_s=dead_man, skips=skips)
        with showing(session.out) as report:
            seen = ui.hinted(run.smoke(wanted, how, report, CLOCK), session.out.hint)
        if junit:
            junit.write_bytes(ui.junit(seen))
        if markdown:
            markdown.write_text(ui.markdown(seen), "utf-8")
        if session.json:
            session.out.data(ui.smoke_data(seen))
        else:
            session.out.table(
                ("GROUP", "CASE", "VERDICT", "SECONDS", "SEEN"),
                [(c.group, c.name, str(c.verdict), f"{c.seconds:.1f}", c.line) for c in seen.cases],
            )
        raise typer.Exit(seen.code)
