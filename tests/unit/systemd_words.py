"""How systemd reads a unit's words, as a model written from its sources, not from our quoting.

Sources: systemd.syntax(7), "Quoting"; systemd.unit(5), "Specifiers"; systemd.service(5), "Command lines";
extract_first_word(), cunescape() and replace_env_full() of systemd 252.
"""

from __future__ import annotations

WHITE = " \t\n\r"
_ESCAPES = {"a": 7, "b": 8, "f": 12, "n": 10, "r": 13, "t": 9, "v": 11, "\\": 92, '"': 34, "'": 39, "s": 32}


def split_words(line: str) -> list[str]:
    """A line to its words: quotes and C escapes undone. Raises ValueError as systemd refuses the line."""
    words: list[str] = []
    at = 0
    while True:
        while at < len(line) and line[at] in WHITE:
            at += 1
        if at == len(line):
            return words
        if line[at] == ";" and (at + 1 == len(line) or line[at + 1] in WHITE):
            raise ValueError("a lone semicolon separates commands")
        word, at = _word(line, at)
        words.append(word)


def _word(line: str, at: int) -> tuple[str, int]:
    out = bytearray()
    quote = ""
    while at < len(line):
        char = line[at]
        if char == "\\":
            value, at = _unescape(line, at + 1)
            out += value
            continue
        if quote:
            if char == quote:
                quote = ""
            else:
                out += char.encode()
        elif char in "'\"":
            quote = char
        elif char in WHITE:
            break
        else:
            out += char.encode()
        at += 1
    if quote:
        raise ValueError("unterminated quote")
    return out.decode(), at


def _unescape(line: str, at: int) -> tuple[bytes, int]:
    char = line[at : at + 1]
    if char in _ESCAPES and char:
        return bytes([_ESCAPES[char]]), at + 1
    if char == "x":
        return bytes([int(line[at + 1 : at + 3], 16)]), at + 3
    if char in ("u", "U"):
        width = 4 if char == "u" else 8
        return chr(int(line[at + 1 : at + 1 + width], 16)).encode(), at + 1 + width
    return bytes([int(line[at : at + 3], 8)]), at + 3


def specifiers(word: str, known: dict[str, str] | None = None) -> str:
    """``%%`` to ``%``; any other ``%X`` must be in ``known``, since the real one would be replaced."""
    table = {"%": "%", **(known or {})}
    out, at = "", 0
    while at < len(word):
        if word[at] == "%":
            if word[at + 1 : at + 2] not in table:
                raise ValueError(f"specifier {word[at : at + 2]!r}")
            out += table[word[at + 1]]
            at += 2
        else:
            out += word[at]
            at += 1
    return out


def variables(word: str) -> str:
    """``$$`` to ``$``; a variable must not occur: it would be replaced, or split into words."""
    out, at = "", 0
    while at < len(word):
        if word[at] == "$":
            if word[at + 1 : at + 2] != "$":
                raise ValueError(f"variable at {word[at:]!r}")
            at += 1
        out += word[at]
        at += 1
    return out


def logical_lines(unit: str) -> list[str]:
    """Lines joined at trailing backslashes; comment lines vanish, also between joined ones. CR ends a line too."""
    joined: list[str] = []
    pending = ""
    for line in unit.replace("\r", "\n").split("\n"):
        if line.lstrip(WHITE)[:1] in ("#", ";"):
            continue
        if line.endswith("\\") and (len(line) - len(line.rstrip("\\"))) % 2:
            pending += line[:-1] + " "
            continue
        joined.append(pending + line)
        pending = ""
    return [line.strip(WHITE) for line in joined if line.strip(WHITE)]


def values(unit: str, key: str) -> list[str]:
    return [line.partition("=")[2] for line in logical_lines(unit) if line.startswith(f"{key}=")]


def mounts(unit: str) -> list[str]:
    """The paths of ``RequiresMountsFor=``: there a backslash only makes the next character plain (no C escapes)."""
    found: list[str] = []
    for line in values(unit, "RequiresMountsFor"):
        word, quote, plain = "", "", False
        for char in line:
            if plain or (char != "\\" and char != quote and (quote or char not in "'\" \t")):
                word, plain = word + char, False
            elif char == "\\":
                plain = True
            elif char in (quote, "'", '"'):
                quote = "" if quote else char
            else:
                found, word = [*found, word], ""
        found.append(word)
    return [specifiers(word) for word in found]


def exec_start(unit: str) -> list[str]:
    """The argv that a unit's ``ExecStart=`` runs."""
    [line] = values(unit, "ExecStart")
    program, *args = split_words(line)
    return [specifiers(program), *(variables(specifiers(word)) for word in args)]


def environment(unit: str) -> dict[str, str]:
    """What a unit's ``Environment=`` lines set."""
    found: dict[str, str] = {}
    for line in values(unit, "Environment"):
        for word in split_words(line):
            name, _, value = specifiers(word, {"C": "/var/cache"}).partition("=")
            found[name] = value
    return found
