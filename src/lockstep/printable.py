"""Text that somebody else may have written, made fit for a terminal, a log or a page.

A file's, class's or tensor's name may hold what a terminal obeys (escape codes move the cursor, or type), what turns
the direction of reading, or the end of a line and a sentence of its own after it.
"""

from __future__ import annotations

import json
import re

_CONTROLS = {code: 0x2400 + code for code in range(0x20) if code not in (0x09, 0x0A)} | {0x7F: 0x2421}
"""Each to its picture in Unicode, \N{SYMBOL FOR ESCAPE} for escape; a line's end and a tab stay."""
_SPANS = (
    *((0x80, 0x9F), (0xAD, 0xAD), (0x34F, 0x34F), (0x600, 0x605), (0x61C, 0x61C), (0x6DD, 0x6DD), (0x70F, 0x70F)),
    *((0x115F, 0x1160), (0x17B4, 0x17B5), (0x180B, 0x180F), (0x200B, 0x200F), (0x2028, 0x202E), (0x2060, 0x206F)),
    *((0x2800, 0x2800), (0x3164, 0x3164), (0xFE00, 0xFE0F), (0xFEFF, 0xFEFF), (0xFFA0, 0xFFA0), (0xFFF9, 0xFFFB)),
    *((0x1D173, 0x1D17A), (0xE0000, 0xE01EF)),
)
_OTHERS = [code for first, last in _SPANS for code in range(first, last + 1)]
"""C1 controls, marks of direction, what has no width or no ink, and the ends of lines that are no newline."""
_VISIBLE = _CONTROLS | dict.fromkeys(_OTHERS, 0xFFFD)
_HIDDEN = re.compile(f"[{''.join(map(chr, sorted(_OTHERS)))}\x7f]")
_LINE_END = re.compile(r"\s*\n\s*")


def visible(text: str) -> str:
    """Return `text` with a visible character for each that a terminal would obey, or not show; lines stay lines."""
    return text.translate(_VISIBLE)


def one_line(text: str) -> str:
    """Return `text` as `visible` does, in one line."""
    return visible(_LINE_END.sub(" ", text.strip()))


def visible_json(text: str) -> str:
    """Return JSON `text` with an escape for each character that `visible` replaces: it says the same."""
    if text.isascii() and text.isprintable():  # as what a run records is: the expression takes a thousand times as long
        return text
    return _HIDDEN.sub(lambda found: json.dumps(found[0])[1:-1].replace("\x7f", "\\u007f"), text)


def told(sentence: str) -> str:
    """Return a sentence as the command says it: `lockstep: …`, one line."""
    return f"lockstep: {one_line(sentence)}\n"
