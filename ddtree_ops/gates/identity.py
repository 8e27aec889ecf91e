"""Gates ``identity`` and ``completion``: the judgement of ``health``, kept as gates with their own evidence. Pure."""

from __future__ import annotations

from ddtree_ops import health
from ddtree_ops.gates.result import GateResult, Verdict


def judge(seen: health.Observation, release: str, port: int) -> GateResult:
    """The unit is active, its own process listens, and the answer names the release."""
    verdict = health.judge(seen, release, port)
    answers = verdict.state is health.State.ANSWERING
    return GateResult(
        "identity",
        Verdict.PASSED if answers else Verdict.FAILED,
        f"pid {seen.listener.pid} of the unit answers as this release" if answers and seen.listener else verdict.line,
        evidence={
            "release": seen.release,
            "pid": seen.listener.pid if seen.listener else None,
            "restarts": seen.unit.restarts,
            "invocation": seen.unit.invocation,
        },
    )


def judge_completion(completion: health.Completion, release: str, asked: int) -> GateResult:
    """One real completion returned as many tokens as were asked for, from this release."""
    wrong = health.judge_completion(completion, release, asked)
    return GateResult(
        "completion",
        Verdict.FAILED if wrong else Verdict.PASSED,
        wrong or f"{completion.tokens} tokens in {completion.seconds:.2f} s",
        evidence={"tokens": completion.tokens, "seconds": completion.seconds},
    )
