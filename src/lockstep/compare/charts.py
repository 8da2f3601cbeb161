"""Bar charts as SVG, as wide as the page: lengths are percentages, so that text keeps its size on a phone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

from .numbers import Interval
from .tables import brief

_KEY, _ROW, _BAR = 20, 44, 18  # pixels: a line of the key, a bar with its name, the bar alone
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00")
"""The palette of Okabe and Ito, distinguishable with any colour vision."""
_STYLE = "text{font:13px system-ui,sans-serif;fill:currentColor}line{stroke:currentColor;stroke-width:1.5}"


class Bar(NamedTuple):
    """A bar of several parts, with the interval of their sum if known."""

    name: str
    parts: Mapping[str, float]
    interval: Interval | None = None

    @property
    def length(self) -> float:
        """The sum of all parts."""
        return sum(self.parts.values())


def bars(title: str, bars: Sequence[Bar], unit: str) -> str:
    """Return a chart of horizontal bars, one colour per part."""
    kinds = list(dict.fromkeys(kind for bar in bars for kind in bar.parts))
    colours = dict(zip(kinds, _COLOURS, strict=False))
    elements, y = [], 0
    for kind in kinds if len(kinds) > 1 else ():
        elements.append(f'<rect x="0" y="{y + 3}" width="12" height="12" fill="{colours[kind]}"/>')
        elements.append(f'<text x="18" y="{y + 14}">{escape(kind)}</text>')
        y += _KEY
    intervals = [bar.interval for bar in bars if bar.interval is not None and bar.interval.low > 0]
    longest = max(bar.length for bar in bars)
    # An interval may be a thousand times as long as its bar: it continues past the edge.
    percent = 100 / min(2 * longest, max([longest, *(interval.high for interval in intervals)]))
    for bar in bars:
        elements.append(f'<text x="0" y="{y + 15}">{escape(bar.name)}: {brief(bar.length)} {unit}</text>')
        x = 0.0
        for kind, length in bar.parts.items():
            place = f'x="{x * percent:.2f}%" y="{y + 20}" width="{length * percent:.2f}%" height="{_BAR}"'
            hint = escape(f"{kind} {brief(length)} {unit}")
            elements.append(f'<rect {place} fill="{colours[kind]}"><title>{hint}</title></rect>')
            x += length
        if bar.interval in intervals:
            low, high = (value * percent for value in bar.interval[1:])
            elements.append(f'<line x1="{low:.2f}%" x2="{high:.2f}%" y1="{y + 29}" y2="{y + 29}"/>')
        y += _ROW
    label = escape("; ".join([title, *(f"{bar.name} {brief(bar.length)} {unit}" for bar in bars)]))
    start = f'<svg xmlns="http://www.w3.org/2000/svg" width="100%" height="{y}" role="img" aria-label="{label}">'
    return "\n".join([start, f"<style>{_STYLE}</style>", *elements, "</svg>"]) + "\n"
