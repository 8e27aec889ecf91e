"""Where our own files lie: what is shipped beside the code, and what may be kept between runs."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs

CACHE_ENV = "DDTREE_OPS_CACHE"


def data_dir(name: str) -> Path:
    """The directory ``templates`` or ``patches``: in an installed wheel inside the package, else in the checkout."""
    package = Path(__file__).resolve().parent
    installed = package / "_data" / name
    if installed.is_dir():
        return installed
    checkout = package.parent
    if (checkout / "pyproject.toml").is_file() and (checkout / name).is_dir():
        return checkout / name
    raise FileNotFoundError(f"ddtree-ops was installed without its {name}: neither {installed} nor {checkout / name}")


def cache_dir() -> Path:
    """What may be deleted at any time and is built again: wheels, bundles, lab roots."""
    given = os.environ.get(CACHE_ENV)
    return Path(given).expanduser() if given else platformdirs.user_cache_path("ddtree-ops")
