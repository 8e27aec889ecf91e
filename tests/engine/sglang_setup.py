"""The real SGLang modules with the plugin registered, once in a test process."""

from __future__ import annotations

import importlib.util
import sys
import warnings
from pathlib import Path
from types import ModuleType

import pytest
import torchvision_stub

# Imported by SGLang's modules at their top; tests/engine/requirements.txt installs them.
NEEDED = ("torch", "triton", "transformers", "msgspec", "orjson", "zmq", "fastapi", "uvicorn", "xgrammar", "dill")


def missing() -> list[str]:
    return [name for name in NEEDED if importlib.util.find_spec(name) is None]


def load(folder: Path) -> ModuleType:
    """Import SGLang from the folder, register the plugin and apply its hooks; idempotent."""
    absent = missing()
    if absent:
        pytest.skip(f"tests/engine/requirements.txt is not installed: no {', '.join(absent)}")
    torchvision_stub.install()
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SGLang's and its dependencies' import-time warnings are not ours
        import sglang
        from sglang.srt.plugins.hook_registry import HookRegistry
        from sglang.srt.speculative.spec_registry import _REGISTRY

        if "DDTREE" not in _REGISTRY:
            from sglang_ddtree import plugin

            plugin.register()
            HookRegistry.apply_hooks()
    return sglang
