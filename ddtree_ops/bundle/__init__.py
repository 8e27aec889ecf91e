"""The engine bundle: pinned SGLang wheel + patch series + plugin, built on the operator's machine, one digest."""

from ddtree_ops.bundle.build import Bundle, build_bundle, read_archive, write_archive
from ddtree_ops.bundle.manifest import EngineManifest
from ddtree_ops.bundle.stage import EngineState, StagedEngine, check_engine, stage_engine
from ddtree_ops.bundle.wheel import SGLANG_VERSION, fetch_wheel

__all__ = [
    "SGLANG_VERSION",
    "Bundle",
    "EngineManifest",
    "EngineState",
    "StagedEngine",
    "build_bundle",
    "check_engine",
    "fetch_wheel",
    "read_archive",
    "stage_engine",
    "write_archive",
]
