"""Where an arm may leave plain decoding: at a near tie, which is asked about and not taken on trust.

In bfloat16 two tokens may be likelier than one another by less than a sum's rounding. With a seed in float32 the draw
jumps where the law hardly moves: under a filter SGLang's sampler gives its noise to ranks, so two tokens that swap
their ranks swap their noise.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from sglang_ddtree.parity import plan, verdicts
from sglang_ddtree.parity.plan import Arm
from sglang_ddtree.parity.pool import Results
from sglang_ddtree.parity.sections import reference_of
from sglang_ddtree.reference import sampling

NEAR_TIE = 0.1  # nats between the two tokens that plain decoding and a tree chose, in bfloat16
NEAR_LAW = 5e-4  # of a log-probability, in float32: how far apart two orders of its sums may be
TRIALS = 256


def allowed(arm: Arm) -> bool:
    """Whether the arm's tokens may differ at near ties: in bfloat16, and draws of a tree."""
    return arm.dtype == "bfloat16" or (arm.seeded and arm.kind in ("tree", "auto"))


def questions(arms: list[Arm], results: Results) -> dict[str, Arm]:
    """By arm that leaves plain decoding where it may: the arm that is asked for plain decoding's laws there."""
    found = {}
    for arm, lines in differences(arms, results):
        if lines:
            reference = plan.oracle_reference(arm.target, [line["sequence"] for line in lines])
            found[arm.name] = dataclasses.replace(reference, name=question_of(arm), dtype=arm.dtype)
    return found


def question_of(arm: Arm) -> str:
    return f"{arm.name}-gaps"


def differences(arms: list[Arm], results: Results) -> list[tuple[Arm, list[dict[str, Any]]]]:
    """The arms with an answer that may differ, and the first differences of their requests from plain decoding's."""
    by_name = {arm.name: arm for arm in arms}
    found = []
    for arm in (a for a in arms if allowed(a) and a.kind in ("tree", "auto", "linear")):
        name = plain_of(arm)
        plain, answer = results.get(name), results.get(arm.name)
        if plain and answer and plain["ok"] and answer["ok"]:
            jobs = plan.common_jobs(by_name[name], arm)
            found.append((arm, verdicts.differences(with_asks(plain, by_name[name]), answer, jobs)))
    return found


def plain_of(arm: Arm) -> str:
    """Plain decoding with the arm's jobs: of linear in bfloat16 too, whose tokens are compared with DFLASH's."""
    return f"{arm.target}/bf16-ar" if arm.dtype == "bfloat16" else reference_of(arm)


def with_asks(result: dict[str, Any], arm: Arm) -> dict[str, Any]:
    jobs = [{**job, "asks": spec.get("asks")} for job, spec in zip(result["results"], arm.jobs, strict=True)]
    return {**result, "results": jobs}


def rows(arms: list[Arm], results: Results) -> list[dict[str, Any]]:
    """How near to a tie plain decoding was at each first difference; one that was none is wrong."""
    found = []
    for arm, lines in differences(arms, results):
        row: dict[str, Any] = {"arm": arm.name + "/ties", "kind": "ties", "differences": lines, "wrong": []}
        answer = results.get(question_of(arm)) if lines else None
        if answer and answer["ok"]:
            laws = answer["results"][0]["logprobs"]
            row["wrong"] = [text for line, law in zip(lines, laws, strict=True) if (text := judge(arm, line, law))]
        elif lines:
            row["wrong"] = ["no answer about the gaps"]
            row["late"] = bool(answer and answer.get("late"))
        for line in lines:
            del line["sequence"], line["params"]
        found.append(row)
    return found


def judge(arm: Arm, line: dict[str, Any], law: list[float]) -> str:
    """What is wrong with a difference, if anything; leaves on it how near the tie was."""
    a, b = line["tokens"]
    line["gap"] = round(abs(law[a] - law[b]), 6 if arm.seeded else 4)
    if not arm.seeded:
        return f"token {line['at']}: gap {line['gap']}" if line["gap"] > NEAR_TIE else ""
    line["drawn_nearby"] = drawn_nearby(law, line["params"], len(line["sequence"]) - 1, b)
    return "" if line["drawn_nearby"] else f"token {line['at']}: no law within {NEAR_LAW} of plain decoding's draws {b}"


def drawn_nearby(law: list[float], params: dict[str, Any], position: int, token: int) -> bool:
    """Whether the request's draw at `position` is `token` for some law within NEAR_LAW of `law`, log-probabilities [V].

    TRIALS laws are tried, always the same: plain decoding's own and random ones around it.
    """
    rng = np.random.default_rng(position)
    filters = {name: params[name] for name in ("temperature", "top_k", "top_p", "min_p") if name in params}
    for trial in range(TRIALS):
        moved = np.asarray(law) + (rng.uniform(-NEAR_LAW, NEAR_LAW, len(law)) if trial else 0.0)
        if sampling.draw(moved, params["sampling_seed"], position, **filters) == token:
            return True
    return False
