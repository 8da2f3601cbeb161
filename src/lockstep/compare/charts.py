"""Bar and line charts as SVG, in the page's colours.

Sizes are in units of the drawing, which scales to the available width.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

from .numbers import Interval
from .tables import brief

_WIDTH, _HEIGHT, _LEFT, _ROW = 720, 260, 64, 44
_POINTS, _FEW = 400, 12  # points of a line that are drawn at most, and up to how many each has a dot and a number below
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c7a00", "#666666")
"""Okabe and Ito's, which people with any colour vision tell apart; the seventh is darkened for white paper."""
STYLE = (
    "text{font:13px system-ui,sans-serif;fill:currentColor}.grid{stroke:currentColor;opacity:.2}"
    ".whisker{stroke:currentColor;stroke-width:1.5;fill:none}"
    ".ideal{stroke:currentColor;stroke-dasharray:4 4;opacity:.6;fill:none}"
)


class Bar(NamedTuple):
    """A bar of several parts, with their sum's interval where known."""

    name: str
    parts: Mapping[str, float]
    interval: Interval | None = None

    @property
    def length(self) -> float:
        """The sum of all parts."""
        return sum(self.parts.values())


class Line(NamedTuple):
    """A line through points (x, y)."""

    name: str
    points: Sequence[tuple[float, float]]


def bars(title: str, given: Sequence[Bar], unit: str) -> str:
    """Return a chart of horizontal bars, one colour per part. "" without bars."""
    given = [bar for bar in given if bar.length > 0]
    kinds = list(dict.fromkeys(kind for bar in given for kind in bar.parts))
    drawn, top = _key(kinds) if len(kinds) > 1 else ([], 0)
    known = [bar.interval if bar.interval and bar.interval.low > 0 else None for bar in given]
    # An interval may be a thousand times as long as its bar: it goes on beyond the edge.
    most = 2 * max((bar.length for bar in given), default=1)
    longest = max((*(bar.length for bar in given), *(min(held.high, most) for held in known if held)), default=1)
    for number, (bar, held) in enumerate(zip(given, known, strict=True)):
        x, y = 0.0, top + number * _ROW + 20
        drawn.append(_text(0, y - 5, f"{bar.name}: {brief(bar.length)} {unit}"))
        for kind, length in bar.parts.items():
            wide = length / longest * _WIDTH
            colour, hint = COLOURS[kinds.index(kind) % len(COLOURS)], escape(f"{kind} {brief(length)} {unit}")
            size = f'x="{x:.1f}" y="{y}" width="{wide:.1f}" height="18"'
            drawn.append(f'<rect {size} fill="{colour}"><title>{hint}</title></rect>')
            x += wide
        if held:
            low, high = (each / longest * _WIDTH for each in held[1:])
            end = f"{high:.1f}m0 -5v10" if high <= _WIDTH else str(_WIDTH)
            drawn.append(f'<path class="whisker" d="M{low:.1f} {y + 4}v10m0 -5H{end}"/>')
    told = "; ".join(f"{bar.name} {brief(bar.length)} {unit}" for bar in given)
    return _svg(title, told, top + len(given) * _ROW, drawn) if given else ""


def lines(title: str, given: Sequence[Line], x_unit: str, y_unit: str, *, ideal: bool = False) -> str:
    """Return a chart of the finite points of lines; "" without any. `ideal` adds y = x."""
    finite = [Line(name, [each for each in points if all(map(math.isfinite, each))]) for name, points in given]
    finite = [Line(name, [*points[: -1 : max(1, len(points) // _POINTS)], *points[-1:]]) for name, points in finite]
    finite = [line for line in finite if line.points]
    if not finite:
        return ""
    xs, ys = ({point[axis] for line in finite for point in line.points} for axis in (0, 1))
    ys |= {*xs, 0.0} if ideal else set()
    drawn, top = _key([line.name for line in finite])
    x_low, x_span, y_low, y_span = min(xs), max(xs) - min(xs) or 1.0, min(ys), max(ys) - min(ys) or 1.0
    wide, bottom = _WIDTH - _LEFT - 20, top + _HEIGHT

    def at(x: float, y: float) -> tuple[float, float]:
        return _LEFT + (x - x_low) / x_span * wide, bottom - (y - y_low) / y_span * (_HEIGHT - 16)

    def path(points: Sequence[tuple[float, float]]) -> str:
        return "M" + "L".join("{:.1f} {:.1f}".format(*at(*point)) for point in points)

    for tick, shown in _ticks(y_low, y_span):
        y = at(x_low, tick)[1]
        drawn.append(f'<path class="grid" d="M{_LEFT} {y:.1f}h{wide}"/>')
        drawn.append(_text(_LEFT - 6, y + 4, shown, "end"))
    x_ticks = [(each, brief(each)) for each in sorted(xs)] if len(xs) <= _FEW else _ticks(x_low, x_span)
    for tick, shown in x_ticks:
        drawn.append(_text(at(tick, y_low)[0], bottom + 18, shown, "middle" if tick < max(xs) else "end"))
    drawn += [_text(_WIDTH - 20, bottom + 36, x_unit, "end"), _text(4, bottom + 36, y_unit)]
    if ideal:
        drawn.append(f'<path class="ideal" d="{path([(x, x) for x in sorted(xs)])}"/>')
    for number, (name, points) in enumerate(finite):
        colour = COLOURS[number % len(COLOURS)]
        style = f'fill="none" stroke="{colour}" stroke-width="2"'
        drawn.append(f'<path d="{path(points)}" {style}><title>{escape(name)}</title></path>')
        dots = [at(*point) for point in points] if len(points) <= _FEW else []
        drawn += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"/>' for x, y in dots]
    told = "; ".join(f"{name} ends at {brief(points[-1][1])}" for name, points in finite)
    return _svg(title, told, bottom + 44, drawn)


def _ticks(low: float, span: float) -> list[tuple[float, str]]:
    """Return two to six round values, and their texts. 1, 2, 2.5 or 5 × a power of ten apart."""
    power = 10.0 ** math.floor(math.log10(span / 5))
    step = next(power * each for each in (1, 2, 2.5, 5, 10) if span / (power * each) < 5.01)
    numbers = range(math.ceil(low / step - 1e-9), math.floor((low + span) / step + 1e-9) + 1)
    return [(number * step, f"{number * step:,.10g}") for number in numbers]


def _svg(title: str, told: str, height: float, drawn: Sequence[str]) -> str:
    size = f'xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height:.0f}"'
    label = f'role="img" aria-label="{escape(f"{title}: {told}")}"'
    return f"<svg {size} {label}><style>{STYLE}</style>{''.join(drawn)}</svg>"


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _key(kinds: Sequence[str]) -> tuple[list[str], int]:
    """Return a key of the colours, and its height."""
    drawn = []
    for number, kind in enumerate(kinds):
        drawn.append(
            f'<rect x="8" y="{3 + 20 * number}" width="12" height="12" fill="{COLOURS[number % len(COLOURS)]}"/>'
        )
        drawn.append(_text(26, 14 + 20 * number, kind))
    return drawn, 20 * len(kinds) + 8
