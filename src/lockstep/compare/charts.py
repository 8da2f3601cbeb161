"""Charts as SVG: text that can be selected, colours of the page around it, readable without it.

Sizes are in units of the drawing, which scales to the width that there is.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_WIDTH = 720
_LEFT, _RIGHT, _TOP, _BOTTOM = 150, 70, 12, 40
_BAR, _GAP = 22, 10
_HEIGHT = 260
_LETTER = 7.2
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c7a00", "#666666")
"""Okabe and Ito's, which people with any colour vision tell apart; the seventh is darkened for white paper."""
STYLE = (
    "text{font:13px system-ui,sans-serif;fill:currentColor}.axis{stroke:currentColor;opacity:.35}"
    ".grid{stroke:currentColor;opacity:.12}.whisker{stroke:currentColor;stroke-width:1.5}"
    ".ideal{stroke:currentColor;stroke-dasharray:4 4;opacity:.6;fill:none}"
)


@dataclass(frozen=True)
class Bar:
    """A bar of a chart: its name, its parts by what they are, its interval where there is one, and what it says."""

    name: str
    parts: Mapping[str, float]
    says: str
    low: float | None = None
    high: float | None = None

    @property
    def length(self) -> float:
        """Of all parts."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class Line:
    """A line of a chart: its name and its points (x, y)."""

    name: str
    points: Sequence[tuple[float, float]]


def bars(title: str, given: Sequence[Bar], unit: str) -> str:
    """Return a chart of horizontal bars; parts have one colour each, and a key where there are several."""
    kinds = list(dict.fromkeys(kind for bar in given for kind in bar.parts))
    key = len(kinds) > 1
    top = _TOP + 24 * key
    height = top + len(given) * (_BAR + _GAP) + _BOTTOM
    # An interval may be a thousand times as long as its bar: it goes on beyond the edge.
    longest = max((bar.length for bar in given), default=0.0)
    most = max([longest, *(min(bar.high or 0.0, 2 * longest) for bar in given)]) or 1.0
    ticks = _ticks(0, most)
    scale = (_WIDTH - _LEFT - _RIGHT) / max(most, ticks[-1])
    drawn = _key(kinds) if key else []
    for tick in ticks:
        x = _LEFT + tick * scale
        drawn.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{height - _BOTTOM}"/>')
        drawn.append(f'<text x="{x:.1f}" y="{height - _BOTTOM + 18}" text-anchor="middle">{short(tick)}</text>')
    drawn.append(f'<text x="{_LEFT}" y="{height - 6}">{html.escape(unit)}</text>')
    for number, bar in enumerate(given):
        y = top + number * (_BAR + _GAP) + _GAP / 2
        middle = y + _BAR / 2 + 4.5
        drawn.append(f'<text x="{_LEFT - 8}" y="{middle:.1f}" text-anchor="end">{html.escape(_cut(bar.name))}</text>')
        x = float(_LEFT)
        for kind, length in bar.parts.items():
            colour = COLOURS[kinds.index(kind) % len(COLOURS)] if key else COLOURS[0]
            wide = max(0.0, length * scale)
            told = html.escape(f"{bar.name}: {kind} {short(length)} {unit}" if key else f"{bar.name}: {bar.says}")
            drawn.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{_BAR}" fill="{colour}">'
                f"<title>{told}</title></rect>"
            )
            x += wide
        if bar.low is not None and bar.high is not None:
            low, high = (_LEFT + each * scale for each in (bar.low, min(bar.high, most)))
            line = y + _BAR / 2
            whisker = f"M{low:.1f} {line - 5}v10m0 -5H{high:.1f}" + "m0 -5v10" * (bar.high <= most)
            drawn.append(f'<path class="whisker" fill="none" d="{whisker}"/>')
            x = max(x, high)
        drawn.append(f'<text x="{x + 6:.1f}" y="{middle:.1f}">{html.escape(bar.says)}</text>')
    told = "; ".join(f"{bar.name} {bar.says}" for bar in given)
    return _svg(title, told, height, drawn)


def lines(title: str, given: Sequence[Line], x_unit: str, y_unit: str, *, ideal: bool = False) -> str:
    """Return a chart of lines; `ideal` draws y = x beside them."""
    points = [point for line in given for point in line.points if all(map(math.isfinite, point))]
    if not points:
        return ""
    xs, ys = [x for x, _ in points], [y for _, y in points]
    if ideal:
        ys = [*ys, *xs, 0.0]
    x_ticks, y_ticks = sorted(set(xs)) if ideal else _ticks(min(xs), max(xs)), _ticks(min(ys), max(ys))
    (x_low, x_high), (y_low, y_high) = _ends(x_ticks, xs), _ends(y_ticks, ys)
    top, left = _TOP + 24 * math.ceil(len(given) / 4), 64
    height = top + _HEIGHT
    wide, high = _WIDTH - left - 16, _HEIGHT - _BOTTOM

    def at(x: float, y: float) -> str:
        across, up = (x - x_low) / (x_high - x_low), (y - y_low) / (y_high - y_low)
        return f"{left + across * wide:.1f} {top + high - up * high:.1f}"

    drawn = _key([line.name for line in given], per_row=4)
    for tick in y_ticks:
        y = top + high - (tick - y_low) / (y_high - y_low) * high
        drawn.append(f'<line class="grid" x1="{left}" x2="{left + wide}" y1="{y:.1f}" y2="{y:.1f}"/>')
        drawn.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{short(tick)}</text>')
    for tick in x_ticks:
        x = left + (tick - x_low) / (x_high - x_low) * wide
        drawn.append(f'<text x="{x:.1f}" y="{top + high + 18}" text-anchor="middle">{short(tick)}</text>')
    drawn.append(f'<line class="axis" x1="{left}" x2="{left + wide}" y1="{top + high}" y2="{top + high}"/>')
    drawn.append(f'<text x="{left + wide}" y="{height - 4}" text-anchor="end">{html.escape(x_unit)}</text>')
    drawn.append(f'<text x="4" y="{height - 4}">{html.escape(y_unit)}</text>')
    if ideal:
        drawn.append(f'<path class="ideal" d="M{at(x_low, x_low)}L{at(x_high, x_high)}"><title>ideal</title></path>')
    for number, line in enumerate(given):
        whole = [point for point in line.points if all(map(math.isfinite, point))]
        path = "L".join(at(*point) for point in whole)
        colour = COLOURS[number % len(COLOURS)]
        name = html.escape(line.name)
        drawn.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2"><title>{name}</title></path>')
        if len(whole) <= 20:
            drawn += [
                f'<circle cx="{at(*point).split()[0]}" cy="{at(*point).split()[1]}" r="3.5" fill="{colour}">'
                f"<title>{name}: {html.escape(x_unit)} {short(point[0])}, {html.escape(y_unit)} "
                f"{short(point[1])}</title>"
                "</circle>"
                for point in whole
            ]
    ends = [(line.name, [y for _, y in line.points if math.isfinite(y)]) for line in given]
    told = "; ".join(f"{name} ends at {short(ys[-1])}" for name, ys in ends if ys)
    return _svg(title, told, height, drawn)


def _svg(title: str, told: str, height: float, drawn: Sequence[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height:.0f}" role="img" '
        f'aria-label="{html.escape(f"{title}: {told}")}"><style>{STYLE}</style>{"".join(drawn)}</svg>'
    )


def _key(kinds: Sequence[str], per_row: int = 5) -> list[str]:
    drawn, step = [], (_WIDTH - 16) / per_row
    for number, kind in enumerate(kinds):
        x, y = 8 + number % per_row * step, 12 + number // per_row * 22
        colour = COLOURS[number % len(COLOURS)]
        drawn.append(f'<rect x="{x:.1f}" y="{y - 9}" width="12" height="12" fill="{colour}"/>')
        drawn.append(f'<text x="{x + 17:.1f}" y="{y + 2}">{html.escape(_cut(kind))}</text>')
    return drawn


def _ticks(low: float, high: float) -> list[float]:
    """Return four to eight round numbers that span from low to high."""
    span = (high - low) or abs(high) or 1.0
    step = 10 ** math.floor(math.log10(span / 4))
    step *= next(factor for factor in (1, 2, 2.5, 5, 10) if span / (step * factor) <= 6)
    first = math.floor(low / step + 1e-9)
    return [step * number for number in range(first, math.ceil(high / step - 1e-9) + 1)]


def _ends(ticks: Sequence[float], given: Sequence[float]) -> tuple[float, float]:
    low, high = min([*ticks, *given]), max([*ticks, *given])
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def short(value: float) -> str:
    """Return a number in three digits, or in whole ones from a thousand on."""
    return f"{value:,.0f}" if abs(value) >= 999.5 or value == int(value) else f"{value:.3g}"


def _cut(name: str) -> str:
    most = int((_LEFT - 12) / _LETTER)
    return name if len(name) <= most else f"{name[: most - 1]}…"
