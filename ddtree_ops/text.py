"""What text can travel: a rule shared by those who check the inventory and those who quote for systemd."""

from __future__ import annotations


def unusable(text: str) -> str | None:
    """Why a text cannot be an argument or a variable of a unit; None when it can."""
    for char in text:
        code = ord(char)
        if code == 0:
            return "a NUL character ends every C string"
        if 0xD800 <= code <= 0xDFFF:
            return f"U+{code:04X} is half of a character"
        # Unicode's noncharacters: systemd drops a whole line that holds one, and what it escapes from one
        if 0xFDD0 <= code <= 0xFDEF or code & 0xFFFE == 0xFFFE:
            return f"U+{code:04X} is not a character, and systemd ignores the line that holds it"
    return None
