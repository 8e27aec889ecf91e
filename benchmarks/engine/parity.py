"""Do all arms decode the same text? Greedy tokens of every arm against plain decoding's.

In float32 the tokens are equal, or something is wrong. In bfloat16 a pass over several rows rounds differently from a
pass over one, so two tokens that are nearly tied may change places. A first difference counts as a near tie if plain
decoding itself had both tokens on top, no further apart than GAP; anything else is a mistake of the arm.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

GAP = 0.75  # nats between the two best tokens


@dataclass(frozen=True)
class Law:
    """What plain decoding chose, and by how much: the two best tokens and their log-probabilities at each position."""

    tokens: tuple[int, ...]
    best: tuple[tuple[int, int], ...]
    gaps: tuple[float, ...]


@dataclass
class Verdict:
    arm: str
    identical: int = 0
    near_ties: list[dict[str, Any]] = field(default_factory=list)
    wrong: list[dict[str, Any]] = field(default_factory=list)

    @property
    def red(self) -> bool:
        return bool(self.wrong)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def read_law(answer: Mapping[str, Any]) -> Law:
    """From a /generate answer with return_logprob and two alternatives a token."""
    meta = answer["meta_info"]
    top = meta["output_top_logprobs"]
    return Law(
        tokens=tuple(answer["output_ids"]),
        best=tuple((a[1], b[1]) for a, b in top),
        gaps=tuple(a[0] - b[0] for a, b in top),
    )


def difference(law: Law, tokens: Sequence[int]) -> dict[str, Any] | None:
    """The first place where ``tokens`` leave the law's, or None."""
    for place, (want, have) in enumerate(zip(law.tokens, tokens, strict=False)):
        if want != have:
            tie = have in law.best[place] and law.gaps[place] <= GAP
            return {"at": place, "plain": want, "arm": have, "gap": round(law.gaps[place], 4), "near_tie": tie}
    if len(law.tokens) != len(tokens):
        return {"at": min(len(law.tokens), len(tokens)), "plain": None, "arm": None, "gap": None, "near_tie": False}
    return None


def judge(arm: str, laws: Sequence[Law], answers: Sequence[tuple[int, Sequence[int]]]) -> Verdict:
    """``answers``: (prompt number, tokens) of every greedy completion of the arm."""
    verdict = Verdict(arm)
    for prompt, tokens in answers:
        found = difference(laws[prompt], tokens)
        if found is None:
            verdict.identical += 1
        else:
            (verdict.near_ties if found["near_tie"] else verdict.wrong).append({"prompt": prompt, **found})
    return verdict
