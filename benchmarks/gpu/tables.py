"""From a session's report to the tables of a page: pure functions, one for each marked part.

A part stands between `<!-- gpu-NAME -->` and `<!-- /gpu-NAME -->`; what is around it is written by hand.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

Report = dict[str, Any]
STAGES_US = ("draft", "head", "build", "verify", "commit", "gaps")
PARITY = ("parity-records", "parity", "parity-rest", "parity-long")
COSTS = ("costs", "costs-slice", "costs-of-eight")
SERVERS = ("server", "server-records")
TWO = ("parity-two", "selftest-two", "selftest-two-records")
COLOUR = re.compile("\x1b\\[[0-9;]*m")
INTERPRETER = re.compile(r"^/\S*/python[0-9.]*$")
# The session's folder: where its stages worked, and as the command names it.
FOLDER = re.compile(r"/[^\s=]*(?=/work/)|(?<=--out )/\S+")
NOT_STARTED = "not started"
# A memory report's lines that only tell how far a capture has got, or that requests came.
PROGRESS = ("Capturing batches", "Prefill batch")


def table(heads: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table; None is an empty cell, a number stands as it is."""
    lines = [f"| {' | '.join(heads)} |", "| " + " | ".join("---" for _ in heads) + " |"]
    lines += [
        "| " + " | ".join("" if cell is None else str(cell).replace("|", "\\|") for cell in row) + " |" for row in rows
    ]
    return "\n".join(lines)


def result(report: Report, name: str) -> Any:
    """What a stage found, None if it did not get so far."""
    return report["stages"].get(name, {}).get("result")


def rows_of(report: Report, names: Sequence[str]) -> list[dict[str, Any]]:
    """Rows of the parity suite over several stages. An arm that stands in two of them is told once: the later of those
    that ran to their end.
    """
    found: dict[str, tuple[tuple[bool, str], dict[str, Any]]] = {}
    for name in names:
        when = str(report["stages"].get(name, {}).get("when", ""))
        for row in result(report, name) or []:
            rank = (not row.get("late"), when)
            if row["arm"] not in found or rank > found[row["arm"]][0]:
                found[row["arm"]] = (rank, row)
    return [row for _rank, row in found.values()]


def host(report: Report) -> str:
    facts, about = result(report, "host"), report["about"]
    if not facts:
        return "Where this was taken is not known: the stage `host` did not run."
    gpus = facts["torch"].get("gpus", 1)
    several = f", {gpus} of them" if gpus > 1 else ""
    packages = ", ".join(f"{name} {version}" for name, version in facts["packages"].items() if version)
    gpu = facts["smi"][0] if facts["smi"] else facts["torch"].get("gpu")
    return (
        f"{gpu}{several}; Python {facts['python']}, CUDA {facts['torch'].get('cuda')}, {packages}, with "
        f"{len(about.get('patches', []))} patches. The last command: `{about['command']}`, commit "
        f"{about.get('commit') or 'unknown'}, sources {about['sources'][:16]}."
    )


def stages(report: Report) -> str:
    return table(
        ["stage", "commit", "verdict", "seconds", "what it is about", "reasons"],
        (
            (name, one.get("commit"), one["status"], one.get("seconds"), one["why"], "; ".join(one["reasons"][:4]))
            for name, one in report["stages"].items()
        ),
    )


def verdict(row: dict[str, Any], good: str) -> str:
    if not row["wrong"]:
        return good
    return ("not run to its end: " if row.get("late") else "**wrong**: ") + "; ".join(row["wrong"])[:160]


def unstarted(row: dict[str, Any]) -> bool:
    return bool(row.get("late")) and all(reason.startswith(NOT_STARTED) for reason in row["wrong"])


def kept(row: dict[str, Any]) -> str | None:
    """How the arm kept recurrent states, None where it verifies no tree."""
    return row.get("states") if row["kind"] in ("tree", "auto") else None


def parity(report: Report) -> str:
    """Each arm against plain decoding; the arms that the time did not reach are listed behind the table."""
    rows = [row for row in rows_of(report, PARITY) if "dtype" in row]
    missing = ", ".join(f"`{row['arm']}`" for row in rows if unstarted(row))
    told = table(
        ["arm", "states", "dtype", "verdict", "accept length", "informed", "off spine"],
        (
            (row["arm"], kept(row), row["dtype"], verdict(row, "equal"),
             row.get("accept_length"), ", ".join(map(str, row.get("informed", {}).get("accept_length", []))),
             row.get("off_spine"))
            for row in rows if not unstarted(row)
        ),
    )  # fmt: skip
    return f"{told}\n\nNot started, the time was up: {missing}." if missing else told


def laws(report: Report) -> str:
    """Every recorded node against a prefill of its own path."""
    return table(
        ["arm", "nodes", "with an elder sibling", "largest difference", "verdict"],
        (
            (row["arm"], *([row["laws"][key] for key in ("nodes", "nodes_with_elder_sibling")] if "laws" in row else
                           (None, None)),
             f"{row['laws']['max_error']:.5f}" if "laws" in row else None, verdict(row, "holds"))
            for row in rows_of(report, PARITY) if row["kind"] == "oracle"
        ),
    )  # fmt: skip


def ties(report: Report) -> str:
    """In bfloat16: how near to a tie the tokens were at which an arm left plain decoding."""

    def line(row: dict[str, Any]) -> tuple[Any, ...]:
        gaps = [one["gap"] for one in row["differences"] if "gap" in one]
        return row["arm"], len(row["differences"]), max(gaps, default=None), verdict(row, "near ties")

    return table(["arm", "requests that differ", "largest gap, nats", "verdict"],
                 (line(row) for row in rows_of(report, PARITY) if row["kind"] == "ties"))  # fmt: skip


def figures(row: dict[str, Any], job: str) -> dict[int, dict[str, Any]]:
    """What an arm measured, by batch."""
    return {one["batch"]: one for one in row.get("measured", []) if one["job"] == job}


def cost_rows(report: Report) -> Iterable[tuple[Any, ...]]:
    rows = [row for row in rows_of(report, COSTS) if "dtype" in row]
    linear: dict[tuple[str, int], float] = {}
    for row in rows:
        for batch, one in figures(row, "timed").items():
            if row["kind"] == "linear":
                linear[(row["arm"].partition("/")[0], batch)] = one["ms_per_round"]
    for row in rows:
        target = row["arm"].partition("/")[0]
        profiles = figures(row, "profiled")
        for batch, one in figures(row, "timed").items():
            base = linear.get((target, batch))
            split = (profiles.get(batch) or {}).get("stages_us")
            spread = one["spread_ms"]
            wide = 1 if row["kind"] == "ar" else 16 if row["kind"] == "linear" else row["budget"] + 1
            yield (
                row["arm"], batch, wide, f"{one['ms_per_round']:.2f}", f"{min(spread):.2f} to {max(spread):.2f}",
                f"{one['ms_per_round'] / base:.2f}" if base else None,
                *((f"{split[stage]:,.0f}" for stage in STAGES_US) if split else [None] * len(STAGES_US)),
            )  # fmt: skip
        if not figures(row, "timed"):
            yield (row["arm"], None, None, verdict(row, "nothing"), *[None] * (2 + len(STAGES_US)))


def costs(report: Report) -> str:
    """Milliseconds of a round; and microseconds of its stages on the GPU, from a profile, which slows the host."""
    heads = ["arm", "requests", "rows", "ms a round", "samples", "against linear", *(f"{s}, µs" for s in STAGES_US)]
    return table(heads, cost_rows(report))


def agreed(row: dict[str, Any]) -> str | None:
    """Tree rounds in which the ranks of an arm were compared, and were the same; what parted is in its verdict."""
    return str(row["rounds_compared"]) if row.get("rounds_compared") and not row["wrong"] else None


def two_rows(report: Report) -> list[dict[str, Any]]:
    """The arms with two GPUs to a model, and those on one that they are compared with."""
    found = [{**row, "stage": "parity-two"} for row in result(report, "parity-two") or []]
    for name in TWO[1:]:
        suite = (result(report, name) or {}).get("suite", {})
        found += [{**row, "stage": name} for row in suite.get("rows", [])]
    return found


def two(report: Report) -> str:
    """Two GPUs to a model: float32 tokens against one GPU's plain decoding, laws, and rounds that ranks share."""
    return table(
        ["stage", "arm", "GPUs", "verdict", "accept length", "off spine", "rounds the same on both", "law"],
        (
            (row["stage"], row["arm"], row.get("ranks", 1) if "dtype" in row else None, verdict(row, "holds"),
             row.get("accept_length"), row.get("off_spine"), agreed(row),
             f"{row['laws']['max_error']:.5f}" if "laws" in row else None)
            for row in two_rows(report)
        ),
    )  # fmt: skip


PAIR_FIGURES = (("tokens_per_round", "accept length", ".2f"), ("ms_per_round", "ms a round", ".2f"),
                ("tok_per_s", "tok/s", ".0f"))  # fmt: skip


def pair_two(report: Report) -> str:
    """The pair on one and on two GPUs, mode by mode: a line for each number of requests at once."""
    heads = [f"{shown}, {gpus}" for _key, shown, _form in PAIR_FIGURES for gpus in ("one", "two")]
    rows = result(report, "pair-two") or []
    lines = (
        line
        for mode in dict.fromkeys(row["mode"] for row in rows)
        for line in pair_lines(mode, {row["gpus"]: row for row in rows if row["mode"] == mode})
    )
    return table(
        ["mode", "requests", *heads, "tok/s, two to one", "requests that part", "rounds the same on both", "verdict"],
        lines,
    )


def pair_lines(mode: str, arms: dict[int, dict[str, Any]]) -> Iterable[tuple[Any, ...]]:
    """arms: the mode's row by its number of GPUs."""
    timed = {gpus: figures(row, "timed") for gpus, row in arms.items()}
    wrong = [f"{gpus}: {verdict(row, '')}" for gpus, row in arms.items() if row["wrong"]]
    words = [parting(arms[2]), agreed(arms[2])] if 2 in arms else [None, None]
    for batch in sorted(set().union(*timed.values())) or [None]:
        cells = [timed.get(gpus, {}).get(batch, {}) for gpus in (1, 2)]
        shown = [format(cell[key], form) if key in cell else None for key, _, form in PAIR_FIGURES for cell in cells]
        ratio = f"{cells[1]['tok_per_s'] / cells[0]['tok_per_s']:.2f}" if all(cells) else None
        yield (mode, batch, *shown, ratio, *words, "; ".join(wrong) or "holds")


def parting(row: dict[str, Any]) -> str | None:
    """How many requests left one GPU's tokens, and how far plain decoding was from a tie there at most."""
    if "differences" not in row:
        return None
    gaps = [one["gap"] for one in row["differences"] if "gap" in one]
    return f"{len(row['differences'])} of {row['compared']}" + (f", at most {max(gaps):.3f} nats" if gaps else "")


def kernels(report: Report) -> str:
    found = result(report, "kernel-times")
    lines = found["kernels"] if found else []
    return table(
        ["kernel", "requests", "rows", "µs", "bound, µs", "torch, µs"],
        (
            (" ".join(filter(None, [one["kernel"], one.get("state")])), one.get("batch"), one.get("rows"), one["us"],
             one["bound_us"], one.get("torch_us"))
            for one in lines
        ),
    )  # fmt: skip


def benchmark(report: Report) -> str:
    found = result(report, "benchmark")

    def line(cell: dict[str, Any]) -> tuple[Any, ...]:
        ratio = cell["speedup"]
        return (
            cell["arm"], f"{cell['temperature']:g}", cell["concurrency"], f"{cell['user_tok_s']:.0f}",
            f"{cell['total_tok_s']:.0f}", f"{cell['round_ms']:.2f}" if cell["round_ms"] else None,
            f"{cell['accept_length']:.2f}" if cell["accept_length"] else None,
            f"{ratio['value']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})" if ratio else None,
        )  # fmt: skip

    heads = ["arm", "temperature", "clients", "tok/s a client", "tok/s in all", "ms a round", "accept length"]
    return table(
        [*heads, f"against {found['baseline'] if found else 'linear'}"], map(line, found["cells"] if found else [])
    )


def memory(report: Report) -> str:
    """What the servers' logs say about memory on the way up."""
    return "\n\n".join(
        "\n".join([f"Stage `{name}`:", "", "```", *(line for line in found["memory"] if told(line)), "```"])
        for name in SERVERS
        if (found := result(report, name))
    )


def told(line: str) -> bool:
    return not any(word in line for word in PROGRESS)


PARTS: dict[str, Callable[[Report], str]] = {
    "host": host,
    "stages": stages,
    "parity": parity,
    "laws": laws,
    "ties": ties,
    "costs": costs,
    "two": two,
    "pair-two": pair_two,
    "kernels": kernels,
    "benchmark": benchmark,
    "memory": memory,
}
# The stages that fill a part; one whose stages all found nothing says so in the place of an empty table.
FILLED_BY: dict[str, Sequence[str]] = {
    "parity": PARITY, "laws": PARITY, "ties": PARITY, "costs": COSTS, "two": TWO, "pair-two": ("pair-two",),
    "kernels": ("kernel-times",), "benchmark": ("benchmark",), "memory": SERVERS,
}  # fmt: skip
TITLES = {
    "host": "Where", "stages": "Stages", "parity": "Parity", "laws": "Every node's law", "ties": "Ties in bfloat16",
    "costs": "Cost of a round", "two": "Two GPUs to a model", "pair-two": "The pair on two GPUs", "kernels": "Kernels",
    "benchmark": "The pair over HTTP", "memory": "Memory",
}  # fmt: skip


def part(name: str, report: Report) -> str:
    """The text between the marks of a part."""
    names = FILLED_BY.get(name, ())
    if names and not any(result(report, one) for one in names):
        return "\n".join(missing(one, report["stages"].get(one)) for one in names)
    return PARTS[name](report)


def missing(name: str, stage: dict[str, Any] | None) -> str:
    if stage is None:
        return f"* `{name}` did not run."
    return f"* `{name}`: {stage['status']}; {'; '.join(stage['reasons'][:2]) or 'it found nothing'}."


def blank() -> str:
    """A page with every part, empty."""
    parts = "\n\n".join(f"## {TITLES[name]}\n\n<!-- gpu-{name} -->\n<!-- /gpu-{name} -->" for name in PARTS)
    return f"# A session on a GPU\n\nMade by `python -m benchmarks.gpu.collect`; the data lies beside it.\n\n{parts}\n"


def fill(page: str, report: Report) -> str:
    """The page with every marked part replaced. Raises ValueError for a mark of no known part."""
    for name in re.findall(r"<!-- gpu-([\w-]+) -->", page):
        if name not in PARTS:
            raise ValueError(f"the page has a part gpu-{name}; there are {', '.join(PARTS)}")
        whole = re.compile(rf"<!-- gpu-{name} -->\n.*?<!-- /gpu-{name} -->", re.DOTALL)
        if whole.search(page) is None:
            raise ValueError(f"the part gpu-{name} has no end: write <!-- /gpu-{name} --> behind it")
        text = f"<!-- gpu-{name} -->\n{part(name, report)}\n<!-- /gpu-{name} -->"
        page = whole.sub(lambda _match, text=text: text, page)  # type: ignore[misc]
    return page


def trimmed(report: Report) -> Report:
    """The report without profiles' timelines, which stay in the archive of answers."""

    def strip(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: strip(inner) for key, inner in value.items() if key not in ("timeline", "names")}
        return [strip(inner) for inner in value] if isinstance(value, list) else value

    return pathless(strip(report))  # type: ignore[no-any-return]


def pathless(value: Any) -> Any:
    """The same without what tells nothing: colours of a terminal, the paths of an interpreter and of the session's
    folder, here DIR.
    """
    if isinstance(value, dict):
        return {key: pathless(inner) for key, inner in value.items()}
    if isinstance(value, str):
        return FOLDER.sub("DIR", INTERPRETER.sub("python", COLOUR.sub("", value)))
    return [pathless(inner) for inner in value] if isinstance(value, list) else value
