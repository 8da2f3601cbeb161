"""Tables for a console, a page, Markdown and CSV."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from .numbers import Interval, Spread


class Column(NamedTuple):
    """A column's head, value and format.

    A value is a number, text, `Spread` or `Interval`; None is blank.
    """

    head: str
    key: str | Callable[[Any], Any]  # the row's attribute, or what returns the value
    text: str | Callable[[Any], str] = "{}"
    more: tuple[str, ...] = ()  # heads of further CSV columns: the deviation of a `Spread`, the ends of an `Interval`

    def values(self, row: Any) -> list[Any]:
        """Return the value and those of `more`; None where unknown."""
        value = getattr(row, self.key) if isinstance(self.key, str) else self.key(row)
        if isinstance(value, Spread):
            return [value.mean, value.sd]
        if isinstance(value, Interval):
            return [*value] if value.low > 0 else [value.middle, None, None]
        return [value, *(None for _ in self.more)]

    def shown(self, row: Any) -> str:
        """Return the row's cell, such as 93.0% ± 0.2%, or 1.50 (1.49–1.51)."""
        text = self.text.format if isinstance(self.text, str) else self.text
        first, *more = ["" if each is None else text(each) for each in self.values(row)]
        if not any(more):
            return first
        return f"{first} ± {more[0]}" if len(more) == 1 else f"{first} ({more[0]}–{more[1]})"


def gib(size_bytes: float) -> str:
    """Return bytes as GiB, for a cell."""
    return f"{size_bytes / 2**30:.2f} GiB"


def brief(value: float) -> str:
    """Return a number in three digits. From 1,000 on, as a whole number."""
    return f"{value:,.0f}" if abs(value) >= 999.5 else f"{value:.3g}"


def filled(columns: Sequence[Column], rows: Sequence[Any]) -> list[Column]:
    """Return the columns with a value in any row."""
    return [each for each in columns if any(map(each.shown, rows))]


def cells(columns: Sequence[Column], rows: Sequence[Any]) -> list[list[str]]:
    """Return the rows' cells in these columns."""
    return [[column.shown(row) for column in columns] for row in rows]


def markdown(columns: Sequence[Column], rows: Sequence[Any]) -> list[str]:
    """Return a Markdown table; all columns but the first are numbers."""
    heads = [[column.head for column in columns], ["---", *("---:" for _ in columns[1:])]]
    lines = [*heads, *cells(columns, rows)]
    return [f"| {' | '.join(re.sub(r'[|<>]', ' ', cell) for cell in line)} |" for line in lines]


def as_csv(columns: Sequence[Column], rows: Sequence[Any]) -> str:
    """Return all columns as CSV, with unformatted numbers."""
    text = io.StringIO()
    out = csv.writer(text, lineterminator="\n")
    out.writerow(head for column in columns for head in (column.head, *column.more))
    out.writerows([value for column in columns for value in column.values(row)] for row in rows)
    return text.getvalue()
