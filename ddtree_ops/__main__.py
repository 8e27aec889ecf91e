"""Entry point of ``ddtree-ops`` and ``python -m ddtree_ops``."""

from __future__ import annotations

import signal
from types import FrameType


def _interrupt(_signum: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def main() -> None:
    """Run the command line. SIGTERM and SIGHUP end a command as Ctrl-C does: what it holds is let go."""
    for name in ("SIGTERM", "SIGHUP"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), _interrupt)
    from ddtree_ops.cli.app import app

    app(prog_name="ddtree-ops")


if __name__ == "__main__":
    main()
