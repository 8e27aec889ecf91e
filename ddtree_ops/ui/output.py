"""What a person sees, or what a program reads: one object that every command writes through.

Results go to standard output; notices, progress and errors to standard error. Under ``--json`` standard output
holds exactly one JSON document, the result or the error.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from ddtree_ops.errors import DdtreeError
from ddtree_ops.ui.hint import repeat_in_data, repeat_inventory
from ddtree_ops.ui.problem import error_data, error_lines
from ddtree_ops.ui.streams import only_ascii


def _console(stderr: bool) -> Console:
    # rich decides by itself about terminals, NO_COLOR and width; a pipe must not be wrapped at 80 columns, and what
    # FORCE_COLOR asks for is colours, not a terminal whose lines can be drawn again
    if (sys.stderr if stderr else sys.stdout).isatty():
        return Console(stderr=stderr, highlight=False)
    colours: Literal["standard"] | None = "standard" if os.environ.get("FORCE_COLOR") else None
    return Console(
        stderr=stderr, highlight=False, width=4096, soft_wrap=True, force_terminal=False, color_system=colours
    )


@dataclass
class Output:
    """Where a command writes. ``json`` decides between people and programs.

    inventory: the file that an option named, which commands to run next must name as well.
    """

    json: bool = False
    inventory: Path | None = None
    out: Console = field(default_factory=lambda: _console(False))
    err: Console = field(default_factory=lambda: _console(True))

    @property
    def live(self) -> bool:
        """Whether progress may redraw: a terminal, and nobody reads JSON."""
        return self.err.is_terminal and not self.json

    def hint(self, text: str) -> str:
        """A text that may hold commands to run next, as it is to be shown."""
        return repeat_inventory(text, self.inventory)

    def data(self, value: Any) -> None:
        """The result, under ``--json``: models, dataclasses of plain values, lists and dictionaries."""
        value = repeat_in_data(plain(value), self.inventory)
        self.out.file.write(json.dumps(value, indent=2, ensure_ascii=only_ascii()) + "\n")

    def json_line(self, value: Any) -> None:
        """One JSON object on one line, for output that goes on (logs, watching)."""
        value = repeat_in_data(plain(value), self.inventory)
        self.out.file.write(json.dumps(value, ensure_ascii=only_ascii()) + "\n")
        self.out.file.flush()

    def line(self, text: str | Text = "", style: str = "") -> None:
        """One line of the result. Texts are never read as markup: names may hold brackets."""
        self.out.print(text if isinstance(text, Text) else Text(text), style=style)

    def raw(self, text: str) -> None:
        """Text as it is, byte for byte (a unit, a diff to save)."""
        self.out.file.write(text)

    def table(self, columns: Sequence[str], rows: Iterable[Sequence[str | Text]], title: str = "") -> None:
        """A table for a terminal, blocks where it is too narrow; tab-separated lines (with a header) for a pipe."""
        if not self.out.is_terminal:
            for row in (columns, *rows):
                self.out.file.write("\t".join(str(cell) for cell in row) + "\n")
            return
        texts = [[cell if isinstance(cell, Text) else Text(cell) for cell in row] for row in rows]
        widths = [max(_longest_word(str(cell)) for cell in column) for column in zip(columns, *texts, strict=True)]
        if sum(widths) + 2 * (len(widths) - 1) > self.out.width:
            self._blocks(columns, texts)
            return
        table = Table(title=escape(title) or None, box=None, pad_edge=False, header_style="bold")
        for column in columns:
            table.add_column(column)
        for row in texts:
            table.add_row(*row)
        self.out.print(table)

    def _blocks(self, columns: Sequence[str], rows: Sequence[Sequence[Text]]) -> None:
        """Each row as its first cell and, below it, the others with their heads: nothing is cut."""
        for first, *others in rows:
            self.out.print(first)
            for head, cell in zip(columns[1:], others, strict=True):
                self.out.print(Text.assemble(("  " + head.lower() + "  ", "bold"), cell), soft_wrap=True)

    def notice(self, text: str) -> None:
        """Something a person should know though nothing is wrong."""
        if not self.json:
            self.err.print(Text.assemble(("note: ", "yellow"), self.hint(text)), soft_wrap=True)

    def error(self, error: DdtreeError) -> None:
        """The error: one JSON document, or found / why / next."""
        if self.json:
            self.data({"error": error_data(error)})
            return
        for label, text in error_lines(error):
            style = "bold red" if label == "error" else "bold"
            text = self.hint(text) if label in ("why", "next") else text
            self.err.print(Text.assemble((f"{label}: ", style), text), soft_wrap=True)  # commands stay whole


def _longest_word(text: str) -> int:
    """A cell may be wrapped between words, not within one."""
    return max(map(len, text.split()), default=0)


def plain(value: Any) -> Any:
    """What JSON can hold, from models, enums, tuples and sets."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if hasattr(value, "__dataclass_fields__"):
        return {name: plain(getattr(value, name)) for name in value.__dataclass_fields__}
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    return value
