"""The arguments of one SGLang server. Pure.

``mode`` decides the speculative flags. Every mode but ``ar`` runs the DDTREE algorithm of the shipped plugin, linear
too: there it is SGLang's own DFLASH, step by step, with the plugin's metrics beside it, so that two modes differ in
nothing but the mode.
"""

from __future__ import annotations

from ddtree_ops.model import Mode, Settings

ALGORITHM = "DDTREE"


def server_argv(settings: Settings, release: str, config: str | None = None) -> list[str]:
    """The whole command line, program first. ``release`` comes back in ``/model_info`` as the weight version.

    ``config`` is the file that holds the server's keys; the keys themselves are in no argument.
    """
    return [
        f"{settings.venv}/bin/python",
        "-m",
        settings.launch_module,
        *_server(settings, release),
        *_limits(settings),
        *_speculation(settings),
        *(("--config", config) if config is not None else ()),
        *settings.extra_args,
    ]


def _server(settings: Settings, release: str) -> list[str]:
    argv = ["--model-path", settings.model]
    if settings.served_model_name is not None:
        argv += ["--served-model-name", settings.served_model_name]
    argv += ["--host", settings.bind, "--port", str(settings.port)]
    if settings.gpus:
        argv += ["--tp-size", str(len(settings.gpus))]
    return [*argv, "--weight-version", release, "--enable-metrics"]


def _limits(settings: Settings) -> list[str]:
    argv = ["--max-running-requests", str(settings.max_running_requests)]
    # batches above the captured sizes run eager, which no figure of ours is about: capture all that can occur
    argv += ["--cuda-graph-max-bs-decode", str(settings.max_running_requests)]
    if settings.context_length is not None:
        argv += ["--context-length", str(settings.context_length)]
    if settings.mem_fraction_static is not None:
        argv += ["--mem-fraction-static", str(settings.mem_fraction_static)]
    return argv


def _speculation(settings: Settings) -> list[str]:
    if not settings.mode.speculates:
        return []
    argv = ["--speculative-algorithm", ALGORITHM, "--speculative-draft-model-path", str(settings.drafter)]
    argv += ["--speculative-ddtree-mode", settings.mode.value]
    if settings.mode.builds_trees:
        if settings.mode is Mode.AUTO:
            argv += ["--speculative-ddtree-widths", ",".join(map(str, settings.widths))]
        else:
            argv += ["--speculative-ddtree-budget", str(settings.budget)]
        argv += ["--speculative-ddtree-topk-cap", str(settings.topk_cap)]
    if settings.mode.verifies_trees and settings.states is not None:
        argv += ["--speculative-ddtree-states", settings.states]
    if settings.allow_hybrid_unsafe:
        argv += ["--speculative-ddtree-allow-hybrid-unsafe"]
    return argv
