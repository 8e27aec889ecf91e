"""A command's answer as the helper brings it: exit status and both outputs. 127: no such program, 124: no answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Answer:
    rc: int = 127
    out: str = ""
    err: str = ""

    @classmethod
    def of(cls, raw: Any) -> Answer:
        """From the helper's record; anything else is no answer."""
        if not isinstance(raw, Mapping) or not isinstance(raw.get("rc"), int):
            return cls()
        return cls(raw["rc"], str(raw.get("out") or ""), str(raw.get("err") or ""))

    @property
    def absent(self) -> bool:
        return self.rc == 127

    @property
    def silent(self) -> bool:
        """Cut off while it was still thinking."""
        return self.rc == 124

    @property
    def words(self) -> str:
        """What it said, in one line, for a person."""
        text = " ".join((self.err or self.out).split())
        return text[:200] or f"exit status {self.rc}"


def mapping(raw: Any) -> Mapping[str, Any]:
    """``raw`` if it is one; empty if the question could not be asked."""
    return raw if isinstance(raw, Mapping) else {}


def listing(raw: Any) -> list[Any]:
    """``raw`` if it is a list; empty otherwise."""
    return raw if isinstance(raw, list) else []
