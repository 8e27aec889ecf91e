"""``ddtree-ops deploy``: one command from what is there to what is wanted, proven or taken back."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ddtree_ops import operate
from ddtree_ops.cli.command import Session, TargetsUnlessPlan, command
from ddtree_ops.connection import PATIENCE_S
from ddtree_ops.gates.run import checked_skips
from ddtree_ops.outcome import worst
from ddtree_ops.steps import DEAD_MAN_S
from ddtree_ops.targets import Overrides
from ddtree_ops.ui.progress import showing
from ddtree_ops.ui.results import show_outcomes

EXAMPLES = [
    "ddtree-ops deploy ct200",
    "ddtree-ops deploy ct200 --mode tree --budget 32",
    "ddtree-ops deploy ct200:tree --budget 64 --save",
    "ddtree-ops deploy ct200:tree --skip-gate throughput --reason 'measured by hand'",
    "ddtree-ops deploy --plan change.json",
    "ddtree-ops deploy all --json | jq '.outcomes[] | .status'",
]

PlanFile = Annotated[Path | None, typer.Option("--plan", metavar="FILE", help="A plan that `plan --out` kept.")]
Save = Annotated[bool, typer.Option("--save", help="Write the options into the inventory, so that they stay in force.")]
Restart = Annotated[bool, typer.Option("--restart", help="Restart also if the wanted release already runs.")]
HealthTimeout = Annotated[
    int | None,
    typer.Option("--health-timeout", metavar="S", min=1, help="Seconds to become healthy (start_timeout_s)."),
]
Wait = Annotated[int, typer.Option("--wait", metavar="S", min=0, help="Seconds to wait for a lock that another holds.")]
SkipGate = Annotated[
    list[str] | None,
    typer.Option("--skip-gate", metavar="NAME", show_default=False, help="Waive a gate; needs --reason. Recorded."),
]
Baseline = Annotated[bool, typer.Option("--baseline", help="Measure linear anew before a tree is judged.")]
Patience = Annotated[
    float, typer.Option("--patience", metavar="S", min=0, help="Seconds to wait for a link that broke half way.")
]
DeadMan = Annotated[
    float,
    typer.Option(
        "--dead-man", metavar="S", min=0, help="The host takes back if it hears nothing for so long; 0: never."
    ),
]
Parallel = Annotated[int, typer.Option("--parallel", metavar="N", min=1, max=64, help="Hosts at the same time.")]


def register(app: typer.Typer) -> None:
    @command(app, "deploy", examples=EXAMPLES, changes=True)
    def deploy(
        session: Session,
        overrides: Overrides,
        targets: TargetsUnlessPlan = None,
        plan: PlanFile = None,
        save: Save = False,
        restart: Restart = False,
        health_timeout: HealthTimeout = None,
        wait: Wait = 0,
        patience: Patience = PATIENCE_S,
        dead_man: DeadMan = DEAD_MAN_S,
        parallel: Parallel = 8,
        skip_gate: SkipGate = None,
        baseline: Baseline = False,
    ) -> None:
        """Plan, check, stage, switch, start, prove; take back what fails."""
        names = targets or ()
        if plan is None:
            wanted = operate.select(session.fleet, names, overrides)
        else:
            wanted = operate.select_kept(session.fleet, names, overrides, plan)
        for notice in wanted.notices:
            session.out.notice(notice)
        skips = checked_skips(skip_gate or (), overrides.unsafe_reason)
        how = operate.How(restart, health_timeout, wait, parallel, patience, dead_man, skips, baseline)
        with showing(session.out) as report:
            outcomes = operate.deploy(wanted, how, report)
        if save:
            for line in operate.save(wanted, overrides, outcomes):
                session.out.notice(line)
        if session.json:
            session.out.data(operate.result(outcomes))
        else:
            show_outcomes(session.out, outcomes)
        raise typer.Exit(worst(outcomes))
