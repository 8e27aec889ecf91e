"""Do this target and this drafter belong together? Answered from their two config.json before anything stops. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ddtree_ops.shapes import DrafterShape, ModelShape


@dataclass(frozen=True)
class Mismatch:
    """One reason why the pair cannot work (``fatal``), or works worse than one would think."""

    name: str
    found: str
    why: str
    fatal: bool = True


@dataclass(frozen=True)
class Proof:
    """What was compared, and what does not fit."""

    facts: tuple[tuple[str, str], ...]
    mismatches: tuple[Mismatch, ...]

    @property
    def fits(self) -> bool:
        return not any(m.fatal for m in self.mismatches)


def prove_pair(target: ModelShape, drafter: DrafterShape) -> Proof:
    """Compare the two; every mismatch is named, not only the first."""
    hybrid = target.recurrence.layers if target.recurrence else 0
    facts = (
        ("target", f"{target.architecture}, {target.layers} layers ({hybrid} recurrent), {target.dtype}"),
        ("drafter", f"{drafter.architecture}, {drafter.attention.layers} layers, {drafter.dtype}"),
        ("block", f"{drafter.block_size or '?'} tokens, {(drafter.block_size or 1) - 1} drafted"),
        ("listens to layers", ", ".join(map(str, drafter.target_layer_ids)) or "SGLang's default"),
        ("hidden size", f"{target.hidden} / {drafter.hidden}"),
        ("vocabulary", f"{target.vocab} / {drafter.vocab}"),
        ("rope theta", f"{_number(target.rope_theta)} / {_number(drafter.rope_theta)}"),
    )
    return Proof(facts, (*_sizes(target, drafter), *_layers(target, drafter), *_head(target, drafter)))


def _sizes(target: ModelShape, drafter: DrafterShape) -> Iterator[Mismatch]:
    if drafter.hidden != target.hidden:
        yield Mismatch(
            "hidden",
            f"the target's hidden size is {target.hidden}, the drafter's {drafter.hidden}",
            "the drafter reads the target's hidden states and uses its embedding and head",
        )
    if drafter.vocab != target.vocab:
        yield Mismatch(
            "vocab",
            f"the target has {target.vocab} tokens, the drafter {drafter.vocab}",
            "a drafted token id would mean another token to the target",
        )
    if drafter.dtype != target.dtype and target.quantized is None:
        yield Mismatch(
            "dtype",
            f"the target is {target.dtype}, the drafter {drafter.dtype}",
            "hidden states are converted every round",
            fatal=False,
        )
    if None not in (target.rope_theta, drafter.rope_theta) and target.rope_theta != drafter.rope_theta:
        yield Mismatch(
            "rope",
            f"rope theta is {_number(target.rope_theta)} in the target, {_number(drafter.rope_theta)} in the drafter",
            "a drafter is trained with its target's positions; accept length falls with the context",
            fatal=False,
        )


def _layers(target: ModelShape, drafter: DrafterShape) -> Iterator[Mismatch]:
    ids = drafter.target_layer_ids
    if drafter.target_layers is not None and drafter.target_layers != target.layers:
        yield Mismatch(
            "depth",
            f"the drafter was made for a target of {drafter.target_layers} layers, this one has {target.layers}",
            "it belongs to another model",
        )
    # SGLang captures before a layer, so the output of the last one is out of reach.
    beyond = [i for i in ids if not 0 <= i < target.layers - 1]
    if beyond:
        yield Mismatch(
            "target-layers",
            f"the drafter listens to layer {', '.join(map(str, beyond))}, the target offers 0 to {target.layers - 2}",
            "SGLang would stop after loading the weights",
        )
    if list(ids) != sorted(set(ids)):
        yield Mismatch(
            "target-layers",
            f"the drafter's target layers are not strictly increasing: {', '.join(map(str, ids))}",
            "the states would be concatenated in another order than it was trained with",
        )


def _head(target: ModelShape, drafter: DrafterShape) -> Iterator[Mismatch]:
    if drafter.block_size is None or drafter.block_size < 2:
        yield Mismatch(
            "block-size",
            f"the drafter's block size is {drafter.block_size or 'not given'}",
            "it says how many tokens one pass drafts; a block holds the last token and at least one more",
        )
    mask = drafter.mask_token_id
    if mask is None:
        yield Mismatch(
            "mask-token",
            "the drafter's configuration names no mask_token_id",
            "SGLang then looks for <|MASK|> in the tokenizer, which may not be what it was trained with",
            fatal=False,
        )
    elif not 0 <= mask < target.vocab:
        yield Mismatch(
            "mask-token",
            f"the mask token {mask} is outside the target's {target.vocab} tokens",
            "its embedding is read from the target's table",
        )
    if target.quantized is not None:
        yield Mismatch(
            "quantized",
            f"the target is quantized ({target.quantized})",
            "if its head is too, the drafter's head runs outside the CUDA graph",
            fatal=False,
        )


def _number(value: float | None) -> str:
    return "not given" if value is None else f"{value:g}"
