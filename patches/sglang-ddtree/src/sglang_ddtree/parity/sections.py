"""From what is asked for on the command line to the arms that run: `TARGET/SECTION[@records][:TAIL,TAIL...]`.

`hybrid/matrix` is every arm of the matrix on the hybrid target; `hybrid/matrix:tree-16-2,tree-32-8` is these two, and
the plain-decoding arm they are compared with. `@records`: the trees keep their states as records.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sglang_ddtree.parity import models, plan
from sglang_ddtree.parity.plan import Arm

SECTIONS: dict[str, Callable[[str], list[Arm]]] = {
    "matrix": plan.matrix,
    "variants": plan.variants,
    "behaviour": plan.behaviour,
    "audits": plan.audits,
    "auto": plan.auto,
    "oracle": plan.oracle,
    "bf16": plan.half_precision,
    "costs": plan.costs,
    "costs-of-eight": plan.costs_of_eight,
    "selftest": plan.selftest,
}
PAIRED = ("behaviour", "retract", "radix", "limit", "seeded", "10k")


class SectionError(ValueError):
    """What was asked for does not exist; the message says what does."""


def reference_of(arm: Arm) -> str:
    """The arm that an arm's tokens are compared with: plain decoding of the same target and jobs; DFLASH for linear in
    bfloat16; itself, that is nothing, for one that is timed or whose nodes are looked at.
    """
    target, _, tail = arm.name.removesuffix("@records").partition("/")
    if tail.startswith(("cost-", "oracle-")):
        return arm.name
    if tail.startswith("bf16-"):
        return f"{target}/bf16-dflash" if arm.kind == "linear" else f"{target}/bf16-ar"
    kind, _, jobs = tail.partition("-")
    return f"{target}/ar-{jobs}" if kind == "tree" and jobs in PAIRED else f"{target}/ar"


def parse(text: str) -> list[Arm]:
    """The arms of one section, or the named ones of it with what they are compared with."""
    where, _, tails = text.partition(":")
    section, _, kept = where.partition("@")
    target, _, name = section.partition("/")
    if target not in models.MODELS or name not in SECTIONS or kept not in ("", "records"):
        raise SectionError(
            f"{text!r} is no section; write TARGET/SECTION or TARGET/SECTION@records with a target of "
            f"{', '.join(models.MODELS)} and a section of {', '.join(SECTIONS)}"
        )
    arms = [plan.recording(arm) if kept else arm for arm in SECTIONS[name](target)]
    if not tails:
        return arms
    known = {arm.name.removesuffix("@records"): arm for arm in arms}
    wanted = [f"{target}/{tail}" for tail in tails.split(",")]
    unknown = [one for one in wanted if one not in known]
    if unknown:
        raise SectionError(f"{where} has no arm {', '.join(unknown)}; it has {', '.join(known)}")
    plain = {arm.name: arm for arm in (*plan.matrix(target), *arms)}
    references = [plain[name] for name in (reference_of(known[one]) for one in wanted) if name in plain]
    return list({arm.name: arm for arm in (*references, *(known[one] for one in wanted))}.values())


def gather(texts: Sequence[str]) -> list[Arm]:
    """The arms of all sections, each once, in the order asked for."""
    found: dict[str, Arm] = {}
    for text in texts:
        for arm in parse(text):
            found.setdefault(arm.name, arm)
    return list(found.values())
