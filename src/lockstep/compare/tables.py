"""Tables for a console, a page and Markdown."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from .numbers import Interval, Spread


class Column(NamedTuple):
    """A column's head, value and format. A value is a number, text, `Spread` or `Interval`; None is blank."""

    head: str
    key: str | Callable[[Any], Any]  # the row's attribute, or a function of the row
    text: str | Callable[[Any], str] = "{}"

    def shown(self, row: Any) -> str:
        """Return the row's cell, such as 93.0% ± 0.2%, or 1.50 (1.49–1.51)."""
        value = getattr(row, self.key) if isinstance(self.key, str) else self.key(row)
        text = self.text.format if isinstance(self.text, str) else self.text
        if isinstance(value, Spread):
            return text(value.mean) + ("" if value.sd is None else f" ± {text(value.sd)}")
        if isinstance(value, Interval):
            return text(value.middle) + (f" ({text(value.low)}–{text(value.high)})" if value.low > 0 else "")
        return "" if value is None else text(value)


def gib(size_bytes: float) -> str:
    """Return bytes as GiB, for a cell."""
    return f"{size_bytes / 2**30:.2f} GiB"


def brief(value: float) -> str:
    """Return a number with three digits; from 1,000 on, a whole number."""
    return f"{value:,.0f}" if abs(value) >= 999.5 else f"{value:.3g}"


def filled(columns: Sequence[Column], rows: Sequence[Any]) -> list[Column]:
    """Return the columns with a value in any row."""
    return [column for column in columns if any(map(column.shown, rows))]


def cells(columns: Sequence[Column], rows: Sequence[Any]) -> list[list[str]]:
    """Return the rows' cells in these columns."""
    return [[column.shown(row) for column in columns] for row in rows]


def markdown(columns: Sequence[Column], rows: Sequence[Any]) -> list[str]:
    """Return a Markdown table; all columns but the first are numbers."""
    heads = [[column.head for column in columns], ["---", *("---:" for _ in columns[1:])]]
    lines = [*heads, *cells(columns, rows)]
    return [f"| {' | '.join(re.sub(r'[|<>]', ' ', cell) for cell in line)} |" for line in lines]
