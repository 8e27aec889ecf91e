"""One command line that every login shell reads the same way. Pure.

sshd hands a command to the account's login shell, whatever that is: sh, bash, dash, zsh, tcsh, fish. They agree on
words of printable ASCII in single quotes, without ``'`` itself (fish undoes ``\\'``), ``!`` (tcsh's history, in quotes
too), newlines (tcsh), and ``\\`` before ``\\`` or ``'`` (fish). So the login shell only starts ``/bin/sh``, with a
short script and the real command as one word in which every other character is an octal escape of ``printf %b``.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

SCRIPT = 'eval "exec $(printf %b "$0")"'
_ESCAPED = b"\\'!"


def for_any_shell(argv: Sequence[str]) -> str:
    """``argv`` as one line for whatever shell the account has; the process it becomes is the command itself.

    Bytes that are no UTF-8, in names that came from a disk, arrive as they are.
    """
    words = shlex.join(argv).encode("utf-8", "surrogateescape")
    hidden = "".join(chr(b) if 0x20 <= b < 0x7F and b not in _ESCAPED else f"\\0{b:03o}" for b in words)
    return f"exec /bin/sh -c '{SCRIPT}' '{hidden}'"
