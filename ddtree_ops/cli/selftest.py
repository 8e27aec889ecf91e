"""``ddtree-ops selftest``: prove a host's GPU on the self-test pair."""

from __future__ import annotations

import typer

from ddtree_ops.cli.command import OneTarget, Session, command
from ddtree_ops.targets import Overrides

EXAMPLES = [
    "ddtree-ops selftest ct200:tree",
    "ddtree-ops selftest ct200:tree --states snapshots",
    "ddtree-ops selftest ct200:tree --gpu 3       # another GPU of the same kind, while the instance serves",
]


def register(app: typer.Typer) -> None:
    @command(app, "selftest", examples=EXAMPLES, changes=True)
    def selftest(session: Session, overrides: Overrides, target: OneTarget) -> None:
        """Prove in about two minutes that trees are exact on a host's own GPU, without the big weights.

        Stages the engine and the self-test pair, runs the engine's parity suite and leaves its record on the host: a
        hybrid model is then verified in trees without --allow-hybrid-unsafe. A failed run withdraws an earlier proof.
        """
        from ddtree_ops import operate, wiring
        from ddtree_ops.errors import UsageError
        from ddtree_ops.remote import open_remote
        from ddtree_ops.selftest import prove
        from ddtree_ops.selftest_pair import packed

        wanted = operate.select(session.fleet, [target], overrides)
        if len(wanted.targets) != 1:
            raise UsageError(
                f"{target} means {len(wanted.targets)} instances, a self-test takes one",
                next=f"ddtree-ops selftest {wanted.targets[0].name}",
            )
        for notice in wanted.notices:
            session.out.notice(notice)
        ((host, (settings,)),) = wanted.by_host()
        connection, remote = wiring.connect(host), open_remote(host, wiring.CLOCK)
        try:
            proof = prove(connection, remote, settings, wiring.engine(), packed(), session.out.notice)
        finally:
            remote.close()
            connection.close()
        if session.json:
            session.out.data({"target": proof.target, "path": proof.path, "record": dict(proof.record)})
        else:
            session.out.line(f"{proof.target}: {proof.line}")
