"""Foreign text, made safe for a terminal, a log or a page.

A file's, class's or tensor's name may hold escape codes, which move a terminal's cursor or type, marks that turn the
direction of reading, or a line break and a forged sentence.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable

_ACTING = ("Cc", "Cf", "Zl", "Zp")
"""Unicode categories of control characters, invisible marks, and line and paragraph separators."""


def visible(text: str) -> str:
    """Replace characters that a terminal obeys by visible ones; keep lines."""
    return _replaced(text, lambda code: chr(0x2400 + code) if code < 0x20 else "␡" if code == 0x7F else "\ufffd")


def one_line(text: str) -> str:
    """Return `text` as `visible` does, in one line."""
    return visible(" ".join(filter(None, map(str.strip, text.splitlines()))))


def visible_json(text: str) -> str:
    """Escape, in JSON or TOML, the characters that `visible` replaces. The value stays the same."""
    return _replaced(text, lambda code: f"\\u{code:04x}" if code < 0x10000 else chr(code))


def format_message(sentence: str) -> str:
    """Return a sentence as commands print it: `lockstep: …`, one line."""
    return f"lockstep: {one_line(sentence)}\n"


def _replaced(text: str, replacement: Callable[[int], str]) -> str:
    def clean(line: str) -> str:
        if line.isprintable():
            return line
        acting = (char != "\t" and unicodedata.category(char) in _ACTING for char in line)
        return "".join(replacement(ord(char)) if acts else char for char, acts in zip(line, acting, strict=True))

    return "\n".join(map(clean, text.split("\n")))
