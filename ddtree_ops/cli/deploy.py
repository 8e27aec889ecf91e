"""``ddtree-ops deploy``: one command from what is there to what is wanted, proven or taken back."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ddtree_ops import operate, rolling
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
    "ddtree-ops deploy all --batches 1,25%,rest --soak 300 --max-failures 1",
    "ddtree-ops deploy --resume",
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
Batches = Annotated[
    str | None,
    typer.Option("--batches", metavar="LIST", show_default=False, help="Hosts at a time: 1,25%,rest. Canary first."),
]
MaxFailures = Annotated[
    int, typer.Option("--max-failures", metavar="N", min=0, help="Failures before a batch stops it.")
]
MaxUnreachable = Annotated[
    int, typer.Option("--max-unreachable", metavar="N", min=0, help="Hosts that may be away before it stops.")
]
SoakS = Annotated[float, typer.Option("--soak", metavar="S", min=0, help="Seconds to watch a batch before the next.")]
HostDeadline = Annotated[
    float | None,
    typer.Option("--host-deadline", metavar="S", min=1, show_default=False, help="Seconds that one host may take."),
]
WholeDeadline = Annotated[
    float | None,
    typer.Option("--deadline", metavar="S", min=1, show_default=False, help="Seconds after which no batch is begun."),
]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with the last rollout that was stopped.")]
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
        batches: Batches = None,
        max_failures: MaxFailures = 0,
        max_unreachable: MaxUnreachable = 0,
        soak: SoakS = 0,
        host_deadline: HostDeadline = None,
        deadline: WholeDeadline = None,
        resume: Resume = False,
    ) -> None:
        """Plan, check, stage, switch, start, prove; take back what fails."""
        asked = rolling.Asked(batches, max_failures, max_unreachable, soak, deadline, resume)
        job = rolling.choose(session.fleet, targets or (), overrides, plan, asked)
        for notice in job.wanted.notices:
            session.out.notice(notice)
        skips = checked_skips(skip_gate or (), overrides.unsafe_reason)
        how = operate.How(restart, health_timeout, wait, parallel, patience, dead_man, host_deadline, skips, baseline)
        with showing(session.out) as report:
            rolled = rolling.carry_out(job, how, report)
        if save:
            for line in operate.save(job.wanted, overrides, rolled.outcomes):
                session.out.notice(line)
        if session.json:
            session.out.data(rolled.as_json())
        else:
            show_outcomes(session.out, rolled.outcomes, rolled.line)
        raise typer.Exit(worst(rolled.outcomes))
