"""Entry point in SGLang's plugin group: check, hook, register. Run once in each process that loads plugins."""

from __future__ import annotations

import logging
from typing import Any

from sglang_ddtree import args, compat

logger = logging.getLogger(__name__)


def register() -> None:
    """Add DDTREE to the running SGLang, or say why not and leave SGLang as it was.

    SGLang logs and swallows a plugin's exception; the algorithm stays unknown then, so a server asked to run it stops.
    """
    from sglang.version import __version__

    found = compat.problems(__version__)
    if found:
        raise RuntimeError("DDTREE is not registered: " + "; ".join(found))
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    from sglang_ddtree.algo import DDTreeSpecAlgo

    for target, hook, kind in table():
        HookRegistry.register(target, hook, HookType(kind))
    SpeculativeAlgorithm.register(args.NAME, supports_overlap=True, spec_class=DDTreeSpecAlgo)(worker_class)
    logger.info("DDTREE registered on SGLang %s", __version__)


def worker_class(server_args: Any) -> type:
    """Factory for SGLang's registry: the worker of the settings that the arguments were resolved to."""
    from sglang_ddtree import config, records, states
    from sglang_ddtree.auto.settings import AutoResolved

    if not isinstance(config.of(server_args), AutoResolved):
        return records.worker_class(server_args)
    if states.recording(server_args) is not None:
        from sglang_ddtree.auto.records import AutoRecordsWorker

        return AutoRecordsWorker
    from sglang_ddtree.auto.worker import AutoWorker

    return AutoWorker


def table() -> list[tuple[str, Any, str]]:
    """(target, hook, type) of every hook, one for each target: where records have one of their own, it calls the
    other.
    """
    from sglang_ddtree import hooks, ranks, records

    own = [*records.table(), *ranks.table()]
    targets = {target for target, _hook, _kind in own}
    return [*(row for row in hooks.table() if row[0] not in targets), *own]
