"""The paths whose file systems must be mounted before the server starts. Pure.

systemd starts units side by side at boot; a network or data mount may come later than a server that needs it.
"""

from __future__ import annotations

from ddtree_ops.model import Settings
from ddtree_ops.render.environment import CACHES
from ddtree_ops.render.quote import is_control

MODEL_CACHES = ("HF_HOME", "HF_HUB_CACHE")
"""Where a model that is a name and no path is found."""


def needed_paths(settings: Settings, root: str) -> list[str]:
    """Absolute paths, each once, in a fixed order. The unit's own cache directory is not among them: systemd knows it.

    A path that ``RequiresMountsFor=`` cannot hold is left out: systemd would ignore it with a warning.
    """
    drafter = (settings.drafter or "") if settings.mode.speculates else ""
    variables = [settings.env[name] for name in (*CACHES, *MODEL_CACHES) if name in settings.env]
    paths = [root, settings.venv, settings.model, drafter, *variables]
    return list(dict.fromkeys(path for path in paths if _holdable(path)))


def _holdable(path: str) -> bool:
    """There the escapes for control characters are not undone, and ``..`` is refused."""
    return path.startswith("/") and not any(map(is_control, path)) and ".." not in path.split("/")
