"""Gate ``lossless``: a tree may only change how fast the answer comes, never the answer. Pure.

Greedy answers are compared token by token with those that linear mode gave on the same host, engine and model. Two
servers that are both right still part ways at near ties, where the two best tokens are closer than the rounding of
one batch shape against another. Such a parting proves nothing; a parting where the reference was sure proves an
error. Both need a measure, and it comes from linear against linear at another batch shape: the widest gap at which it
parted from itself, or, where no gap is known, on how many prompts it did. Gaps come from an autoregressive run, since
SGLang gives none with speculation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ddtree_ops.gates.measure import Measurement, Sample
from ddtree_ops.gates.result import GateResult, Verdict, could_not_run
from ddtree_ops.gates.stats import more_often

TIE_GAP = 0.25
"""Nats. bfloat16 has 8 bits: at logits of 16 to 32, which is usual, neighbours are 0.125 apart, and two may round."""
GAP_MARGIN = 1.5
P_VALUE = 0.01


@dataclass(frozen=True)
class Parting:
    """Where an answer first differs from the reference, and how sure the reference was there, if known."""

    prompt: int
    at: int
    gap: float | None


@dataclass(frozen=True)
class Calibration:
    """Linear against linear: the reference answers, how many prompts were compared, and where those parted."""

    reference: Mapping[int, Sample]
    prompts: int
    partings: tuple[Parting, ...]

    @property
    def parted(self) -> int:
        return len({parting.prompt for parting in self.partings})

    @property
    def tie_gap(self) -> float:
        widest = max((parting.gap for parting in self.partings if parting.gap is not None), default=0.0)
        return max(TIE_GAP, GAP_MARGIN * widest)


def first_difference(reference: Sequence[int], got: Sequence[int]) -> int | None:
    """Index of the first token that differs; None if one is the beginning of the other."""
    return next((at for at, (want, have) in enumerate(zip(reference, got, strict=False)) if want != have), None)


def calibrate(linear: Measurement, autoregressive: Measurement | None = None) -> Calibration:
    """The first answer to each prompt is the reference; every other one of the same measurement is compared with it."""
    reference: dict[int, Sample] = {}
    others: list[Sample] = []
    for sample in linear.samples():
        if sample.prompt in reference:
            others.append(sample)
        else:
            reference[sample.prompt] = sample
    if autoregressive is not None:
        for known in autoregressive.samples():
            if known.prompt in reference:
                reference[known.prompt] = with_gaps(reference[known.prompt], known)
    return Calibration(reference, len({other.prompt for other in others}), tuple(_partings(reference, others)))


def with_gaps(reference: Sample, known: Sample) -> Sample:
    """Gaps of another server's answer, as far as it is the same: the one at the first difference is known too."""
    if reference.gaps or not known.gaps:
        return reference
    at = first_difference(reference.tokens, known.tokens)
    return replace(reference, gaps=known.gaps if at is None else known.gaps[: at + 1])


def judge(calibration: Calibration, candidate: Measurement) -> GateResult:
    """Whether every parting of the candidate is one that linear could have had with itself."""
    samples = [sample for sample in candidate.samples() if sample.prompt in calibration.reference]
    if not samples or not calibration.prompts:
        return could_not_run("lossless", "there are no answers of linear mode to compare with")
    partings = _partings(calibration.reference, samples)
    sure = [parting for parting in partings if parting.gap is not None and parting.gap > calibration.tie_gap]
    # a prompt that parts does so in every round: prompts are the independent unit, not answers
    prompts, parted = len({s.prompt for s in samples}), len({p.prompt for p in partings})
    unknown = len({parting.prompt for parting in partings if parting.gap is None})
    p_value = more_often(unknown, prompts, calibration.parted, calibration.prompts)
    evidence = {
        "prompts": prompts,
        "answers": len(samples),
        "parted": parted,
        "parted_where_sure": len(sure),
        "tie_gap": calibration.tie_gap,
        "linear_prompts": calibration.prompts,
        "linear_parted": calibration.parted,
        "p_value": p_value,
        "first": [{"prompt": p.prompt, "token": p.at, "gap": p.gap} for p in partings[:8]],
    }
    findings = [_say(parting) for parting in sure]
    if unknown and p_value < P_VALUE:
        findings.append(
            f"answers to {unknown} of {prompts} prompts part from linear's, which parts from itself on "
            f"{calibration.parted} of {calibration.prompts} (p = {p_value:.1e})"
        )
    if findings:
        return GateResult("lossless", Verdict.FAILED, findings[0], tuple(findings), evidence)
    how = "no more often than linear from itself" if unknown else "at near ties"
    ties = f"; {parted} part, {how}" if parted else ""
    return GateResult("lossless", Verdict.PASSED, f"{prompts} prompts answered as linear did{ties}", (), evidence)


def _partings(reference: Mapping[int, Sample], samples: Sequence[Sample]) -> list[Parting]:
    found = []
    for sample in samples:
        wanted = reference[sample.prompt]
        at = first_difference(wanted.tokens, sample.tokens)
        if at is not None:
            gap = wanted.gaps[at] if wanted.gaps and at < len(wanted.gaps) else None
            found.append(Parting(sample.prompt, at, gap))
    return found


def _say(parting: Parting) -> str:
    return (
        f"prompt {parting.prompt} parts from linear's answer at token {parting.at}, where the gap was {parting.gap:.2f}"
    )
