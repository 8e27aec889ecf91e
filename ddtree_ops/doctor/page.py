"""docs/doctor.md, made of the findings' own text."""

from __future__ import annotations

from ddtree_ops.doctor.catalogue import CHECKS, Level

HEAD = """\
# What the doctor can find

`ddtree-ops doctor TARGET...` looks at hosts without changing anything, in one round trip each, and names everything
that would make a deploy fail or a server slow: what was seen, why it matters and one command that repairs it. Red
findings make `doctor` end with exit code 4; yellow ones warn. Nothing needs installing on a host: the facts come from
the programs that are there, from files and from the kernel.

This page is generated from the program's own text by `python -m ddtree_ops.doctor.page > docs/doctor.md`.
"""


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    for level, title in ((Level.RED, "## Red: a deploy would fail"), (Level.YELLOW, "## Yellow: worth knowing")):
        parts += [title, "", "| finding | what is wrong | why it matters | repair |", "| --- | --- | --- | --- |"]
        parts += [
            f"| `{check.id}` | {check.title} | {check.why} | `{check.repair.replace('|', chr(92) + '|')}` |"
            for check in CHECKS.values()
            if check.level is level
        ]
        parts.append("")
    return "\n".join(parts)


if __name__ == "__main__":
    print(page(), end="")
