"""Rules of the engine that planning needs, from the very sources that are shipped to the hosts.

These modules need the standard library alone, and are loaded without the package around them, which needs torch.
"""

from __future__ import annotations

import importlib.util
import sys
from functools import cache
from types import ModuleType

from ddtree_ops.data import data_dir


@cache
def engine_module(name: str) -> ModuleType:
    """The module ``sglang_ddtree.NAME``."""
    own, path = f"ddtree_ops._engine_{name}", data_dir("patches") / f"sglang-ddtree/src/sglang_ddtree/{name}.py"
    spec = importlib.util.spec_from_file_location(own, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[own] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
