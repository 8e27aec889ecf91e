"""Completion of TARGET in the shell, from every inventory the working directory offers. Never an error.

Bash splits words at the colon, so HOST:INSTANCE arrives as three and only what follows the colon may be offered.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator, MutableMapping

import platformdirs
import typer

from ddtree_ops.errors import DdtreeError
from ddtree_ops.inventory import load_fleet
from ddtree_ops.inventory.locate import candidates
from ddtree_ops.model import Fleet

VARIABLE = "_DDTREE_OPS_COMPLETE"


def complete_target(context: typer.Context, incomplete: str) -> list[str]:
    """Names that start as typed, without those that were typed already."""
    named = context.params.get("targets") or ()
    return [name for name in _names() if name.startswith(incomplete) and name not in named]


@contextlib.contextmanager
def whole_words(environ: MutableMapping[str, str]) -> Iterator[None]:
    """While bash asks: the words it split at a colon are whole again, and the answers are without what it keeps."""
    if environ.get(VARIABLE) != "complete_bash":
        yield
        return
    split, place = environ.get("COMP_WORDS", "").split(" "), int(environ.get("COMP_CWORD") or 0)
    words, current = joined(split, place)
    environ["COMP_WORDS"], environ["COMP_CWORD"] = " ".join(words), str(current)
    replaced = split[place] if place < len(split) and split[place] != ":" else ""
    kept = words[current].removesuffix(replaced) if current < len(words) else ""
    answers = io.StringIO()
    try:
        with contextlib.redirect_stdout(answers):
            yield
    finally:
        sys.stdout.write("".join(f"{line.removeprefix(kept)}\n" for line in answers.getvalue().splitlines()))


def joined(words: list[str], current: int) -> tuple[list[str], int]:
    """Words around a colon as one, and where the word that is being typed is then."""
    whole: list[str] = []
    at = 0
    for place, word in enumerate(words):
        if whole and (word == ":" or whole[-1].endswith(":")):
            whole[-1] += word
        else:
            whole.append(word)
        if place == current:
            at = len(whole) - 1
    return whole, at if current < len(words) else len(whole)


def _names() -> list[str]:
    names = ["all"]
    for fleet in _fleets():
        names += fleet.groups
        for host in fleet.hosts.values():
            names.append(host.name)
            names += [f"{host.name}:{instance}" for instance in host.instances]
    return sorted(dict.fromkeys(names))


def _fleets() -> Iterator[Fleet]:
    with contextlib.suppress(DdtreeError):
        for path in candidates(None, environ=os.environ, config_dir=platformdirs.user_config_path("ddtree-ops")):
            with contextlib.suppress(DdtreeError):
                yield load_fleet(path)
