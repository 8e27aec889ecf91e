"""A stand-in for torchvision, for tests only.

SGLang and transformers import some of its names at module level; none of these tests touches an image. PyPI's
torchvision wheels are built against one exact torch build and do not import beside another, so the real one is
not worth its pin.
"""

import importlib.machinery
import sys
import types

_MODULES = ("", ".io", ".ops", ".transforms", ".transforms.functional", ".transforms.v2", ".transforms.v2.functional")


class _Anything(type):
    """Classes whose every public attribute exists: enough for `class X(BASE)` and `Enum.MEMBER` at import time."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name, (), {})


class _Stub(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name, (), {})


def install():
    if "torchvision" in sys.modules:
        return
    for suffix in _MODULES:
        name = f"torchvision{suffix}"
        module = _Stub(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        module.__path__ = []
        module.__version__ = "0.0.0"
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
