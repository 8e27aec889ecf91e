"""Findings that need the models' configurations: folders, the pair, backends, proofs and memory. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from ddtree_ops.backends import Case, parse_capability, parse_flags, prefix_cache_refusal, refusals
from ddtree_ops.doctor.catalogue import Finding, finding
from ddtree_ops.doctor.machine import Machine
from ddtree_ops.errors import RefusedError
from ddtree_ops.facts.folders import ModelFolder
from ddtree_ops.keeping import dtypes
from ddtree_ops.model import HostSpec, Mode, Settings, most_nodes
from ddtree_ops.pair import prove_pair
from ddtree_ops.planner import GIB, MIB, Ask, MemoryPlan, image_pool, largest_budget, largest_running, plan_memory
from ddtree_ops.proofs import needs_proof, proven_by
from ddtree_ops.render.argv import server_argv
from ddtree_ops.shapes import DrafterShape, ModelShape, parse_drafter, parse_model

DEFAULT_CONTEXT = 32768


def check_models(host: HostSpec, settings: Settings, machine: Machine) -> Iterator[Finding]:
    """The instance's model and drafter: there, readable, whole; fit for each other, for the GPU and its memory."""
    target = f"{host.name}:{settings.instance}"
    wanted = [settings.model] + ([settings.drafter] if settings.drafter and settings.mode.speculates else [])
    for path in wanted:
        if path in machine.models:
            yield from _folder(target, path, settings, machine.models[path])
    try:
        model, drafter = shapes(settings, machine)
    except RefusedError as error:
        path = settings.drafter if settings.drafter and settings.drafter in error.found else settings.model
        yield finding("model-config", target, error.found, path=path)
        return
    if model is not None and drafter is not None:
        for mismatch in prove_pair(model, drafter).mismatches:
            yield finding("pair" if mismatch.fatal else "pair-odd", target, f"{mismatch.found} ({mismatch.why})")
    yield from _backends(target, settings, machine, model)
    yield from _tree(target, settings, drafter)
    plan = memory_plan(settings, machine)
    if plan is not None:
        yield from _memory(target, plan)


def shapes(settings: Settings, machine: Machine) -> tuple[ModelShape | None, DrafterShape | None]:
    """The shapes of target and drafter, as far as their configurations were read. Raises RefusedError on a bad one."""
    folder = machine.models.get(settings.model)
    model = parse_model(folder.config, f"{settings.model}/config.json") if folder and folder.config else None
    other = machine.models.get(settings.drafter or "") if settings.mode.speculates else None
    drafter = parse_drafter(other.config, f"{settings.drafter}/config.json") if other and other.config else None
    return model, drafter


def memory_plan(settings: Settings, machine: Machine) -> MemoryPlan | None:
    """The memory of this instance on its GPUs; None while its weights or its GPU are not known."""
    try:
        model, drafter = shapes(settings, machine)
    except RefusedError:
        return None
    cards = [card for index in settings.gpus if (card := machine.gpus.card(index)) and card.memory_mib]
    folder = machine.models.get(settings.model)
    if model is None or folder is None or not folder.parts or not cards:
        return None
    flags = parse_flags(settings.extra_args)
    radix = flags.get("--mamba-radix-cache-strategy", "extra_buffer")
    other = machine.models.get(settings.drafter or "")
    return plan_memory(
        Ask(
            target=model,
            weights=folder.weights(vision=model.sees),
            gpu_bytes=min(card.memory_mib or 0 for card in cards) * MIB,
            mode=settings.mode,
            drafter=drafter,
            drafter_weights=other.weights(vision=False) if other else 0,
            budget=settings.nodes,
            running=settings.max_running_requests,
            context=settings.context_length or min(model.context or DEFAULT_CONTEXT, DEFAULT_CONTEXT),
            tp=max(1, len(settings.gpus)),
            mem_fraction=settings.mem_fraction_static,
            tokens_given=int(given) if (given := flags.get("--max-total-tokens", "")).isdigit() else None,
            image_pool=image_pool(model, flags, settings.env),
            states=settings.states,
            dtypes=dtypes(model, flags, settings.env),
            state_dtype=flags.get("--mamba-ssm-dtype"),
            radix="off" if "--disable-radix-cache" in flags else radix if radix == "no_buffer" else "extra_buffer",
        )
    )


def _folder(target: str, path: str, settings: Settings, folder: ModelFolder) -> Iterator[Finding]:
    if not folder.exists:
        yield finding("model-absent", target, f"there is no {path}", path=path)
    elif not folder.readable:
        who = settings.user or "the helper's user"
        yield finding("model-unreadable", target, f"{who} cannot read {path}/config.json", path=path)
    elif folder.missing:
        seen = f"{len(folder.missing)} files that {path} lists are missing, {folder.missing[0]} first"
        yield finding("model-incomplete", target, seen, path=path)
    elif folder.damaged:
        seen = f"{', '.join(folder.damaged)} in {path}: cut short, or no header"
        yield finding("model-incomplete", target, seen, path=path)


def _backends(target: str, settings: Settings, machine: Machine, model: ModelShape | None) -> Iterator[Finding]:
    cards = [card for index in settings.gpus if (card := machine.gpus.card(index))]
    card = cards[0] if cards else None
    capability = parse_capability(card.capability if card else None)
    case = Case(settings.mode, parse_flags(server_argv(settings, release="")), model, capability, env=settings.env)
    for reason in refusals(case):
        yield finding("backend", target, reason)
    if model is None or card is None or not needs_proof(case):
        return
    kinds = sorted({each.capability or "unknown" for each in cards})
    known = settings.nodes, card.driver, machine.proofs
    trees = len(kinds) == 1 and proven_by(case, *known) is not None
    if trees and (prefix_cache_refusal(case) or proven_by(case, *known, cached=True)):
        return
    several = f" with {case.tp} GPUs to a model" if case.tp > 1 else ""
    admitted = ", admitted by the instance's settings" if settings.allow_hybrid_unsafe else ""
    where = f"{card.name} (compute capability {' and '.join(kinds)}){several}"
    states = f", {case.kept(settings.nodes).line}" if model.hybrid else ""
    cache = ", with the prefix cache (without it, --disable-radix-cache, it is proven)" if trees else ""
    yield finding("unproven", target, f"{model.architecture} on {where}{states}{cache}{admitted}")


def _tree(target: str, settings: Settings, drafter: DrafterShape | None) -> Iterator[Finding]:
    """A budget that no tree of this cap and depth can fill is verified and never used. Mode auto chooses
    among its widths and the drafter's chain, and is refused where that is the longest.
    """
    if not settings.mode.builds_trees or drafter is None or not drafter.block_size:
        return
    chain = drafter.block_size - 1
    if settings.mode is Mode.AUTO and settings.nodes < chain:
        seen = f"the drafter's chain has {chain} nodes and the widest width {settings.nodes}: add --width {chain}"
        yield finding("backend", target, seen)
    most = most_nodes(settings.topk_cap, drafter.block_size)
    if 0 < most < settings.nodes:
        each = "1 child" if settings.topk_cap == 1 else f"{settings.topk_cap} children"
        shape = f"a block of {drafter.block_size} and {each} a node make {most} nodes at most"
        yield finding("tree-size", target, f"budget {settings.nodes}, but {shape}", budget=str(most))


def _memory(target: str, plan: MemoryPlan) -> Iterator[Finding]:
    """Red if not one request fits; else SGLang starts and quietly serves fewer than were asked for."""
    if plan.fits:
        return
    ask, gpu = plan.ask, f"{plan.ask.gpu_bytes / GIB:.0f} GiB GPU"
    trees = ask.mode.verifies_trees
    asked = f"{ask.running} requests of {ask.context} tokens" + (f" with budget {ask.budget}" if trees else "")
    running, budget = largest_running(ask, ask.running), largest_budget(ask, ask.budget) if trees else 0
    short = f"need {-plan.left / GIB:.1f} GiB more than a {gpu} has" if plan.left <= 0 else f"are too much for a {gpu}"
    fits = [f"{running} of them"] if running else []
    fits += [f"budget {budget}"] if budget else []
    seen = f"{asked} {short}; {' or '.join(fits) or 'not even one'} would fit"
    change = f"--mode tree --budget {budget}" if ask.mode is Mode.AUTO else f"--budget {budget}"
    option = change if budget else "--mode ar"
    yield finding("memory-tight" if running else "memory-short", target, seen, option=option)
