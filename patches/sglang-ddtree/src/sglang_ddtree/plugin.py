"""Entry point in SGLang's plugin group: check, hook, register. Run once in each process that loads plugins."""

from __future__ import annotations

import logging

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
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    from sglang_ddtree import hooks
    from sglang_ddtree.algo import DDTreeSpecAlgo, worker_class

    hooks.register_all()
    SpeculativeAlgorithm.register(args.NAME, supports_overlap=True, spec_class=DDTreeSpecAlgo)(worker_class)
    logger.info("DDTREE registered on SGLang %s", __version__)
