"""The engine's tests run on the CPU: kernels in Triton's interpreter, SGLang from its pinned wheel."""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest
import sglang_source

# Triton reads this when a kernel is decorated, that is, before anything imports one.
os.environ["TRITON_INTERPRET"] = "1"
# Read when NumPy is first imported. The pair's matrices are small: more threads wait for each other than help.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

ENGINE_SRC = Path(__file__).parents[2] / "patches" / "sglang-ddtree" / "src"
if str(ENGINE_SRC) not in sys.path:
    sys.path.insert(0, str(ENGINE_SRC))


def pytest_configure(config: pytest.Config) -> None:
    """The interpreter turns one-element arrays into scalars in a way NumPy will drop; nothing else is let pass."""
    config.addinivalue_line(
        "filterwarnings", "ignore:Conversion of an array with ndim > 0 to a scalar:DeprecationWarning"
    )


@pytest.fixture(scope="session")
def sglang_src() -> Path:
    """A folder that holds the package ``sglang`` in the pinned version, for sys.path or to read files."""
    return sglang_source.pinned()


@pytest.fixture(autouse=True)
def process_of_its_own() -> Iterator[None]:
    """SGLang takes the process for its own: its modules set variables as they are first imported, a server leaves its
    settings in the environment for the processes it starts, and the root logger becomes its log.
    """
    level, handlers = logging.root.level, list(logging.root.handlers)
    with mock.patch.dict(os.environ):
        yield
    logging.root.setLevel(level)
    for added in set(logging.root.handlers).difference(handlers):
        logging.root.removeHandler(added)


@pytest.fixture(scope="session")
def real_site(sglang_src: Path) -> Path:
    """SGLang under our patches, with the plugin's entry point: what real_engine.run starts."""
    import real_engine
    import sglang_setup

    from ddtree_ops.data import cache_dir

    if absent := sglang_setup.missing():
        pytest.skip(f"tests/engine/requirements.txt is not installed: no {', '.join(absent)}")
    return real_engine.overlay(sglang_src, cache_dir())


@pytest.fixture(scope="session")
def stock_kernel(sglang_src: Path) -> Callable[[str], types.ModuleType]:
    """Load one of SGLang's kernel files alone: ``stock_kernel("mamba/causal_conv1d_triton")``.

    Importing it through the package would need the whole server's dependencies. The kernels need
    nothing of it but one question about the GPU, answered here.
    """

    def load(name: str) -> types.ModuleType:
        path = sglang_src / "sglang" / "kernels" / "ops" / f"{name}.py"
        names = ["sglang", "sglang.kernels", "sglang.kernels.jit", "sglang.kernels.jit.utils"]
        before = {n: sys.modules.get(n) for n in names}
        for n in names:
            sys.modules[n] = types.ModuleType(n)
        sys.modules[names[-1]].is_arch_support_pdl = lambda: False  # type: ignore[attr-defined]
        try:
            spec = importlib.util.spec_from_file_location("stock_" + path.stem, path)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = module
            spec.loader.exec_module(module)
        finally:
            for n, old in before.items():
                if old is None:
                    del sys.modules[n]
                else:
                    sys.modules[n] = old
        return module

    return load
