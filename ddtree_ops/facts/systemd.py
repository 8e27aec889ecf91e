"""systemd itself: its version, whether it runs, whether the clock is kept. Pure."""

from __future__ import annotations

import re

from ddtree_ops.facts.answer import Answer


def parse_systemd_version(answer: Answer) -> int | None:
    """The number in ``systemctl --version``."""
    found = re.match(r"systemd (\d+)", answer.out)
    return int(found[1]) if found else None


def parse_synchronized(answer: Answer) -> bool | None:
    """Whether ``timedatectl show`` says that the clock follows others; None if it does not say."""
    found = re.search(r"^NTPSynchronized=(yes|no)$", answer.out, re.M)
    return found[1] == "yes" if found else None
