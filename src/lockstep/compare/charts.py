"""Charts as SVG: text that can be selected, colours of the page around it, readable without it.

Sizes are in units of the drawing, which scales to the width that there is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

from .numbers import Interval

_WIDTH, _HEIGHT = 720, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 150, 70, 12, 40
_BAR, _GAP = 22, 10
_LONGEST = 19
"""Letters of a name that fit into `_LEFT`."""
_POINTS, _DOTTED = 400, 20
"""Points of a line that are drawn, and those that each have a dot, at most."""
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c7a00", "#666666")
"""Okabe and Ito's, which people with any colour vision tell apart; the seventh is darkened for white paper."""
STYLE = (
    "text{font:13px system-ui,sans-serif;fill:currentColor}.axis{stroke:currentColor;opacity:.35}"
    ".grid{stroke:currentColor;opacity:.12}.whisker{stroke:currentColor;stroke-width:1.5}"
    ".ideal{stroke:currentColor;stroke-dasharray:4 4;opacity:.6;fill:none}"
)


class Bar(NamedTuple):
    """A bar of a chart: its name, the lengths of its parts, and the interval of their sum where that is known."""

    name: str
    parts: Mapping[str, float]
    interval: Interval | None = None


class Line(NamedTuple):
    """A line of a chart: its name and its points (x, y)."""

    name: str
    points: Sequence[tuple[float, float]]


def bars(title: str, given: Sequence[Bar], unit: str) -> str:
    """Return a chart of horizontal bars, "" of none; parts have one colour each, and a key where there are several."""
    given = [bar for bar in given if any(bar.parts.values())]
    if not given:
        return ""
    kinds = list(dict.fromkeys(kind for bar in given for kind in bar.parts))
    drawn = _key(kinds, 5) if len(kinds) > 1 else []
    top = _TOP + 24 * bool(drawn)
    bottom = top + len(given) * (_BAR + _GAP)
    known = [bar.interval if bar.interval and bar.interval.low > 0 else None for bar in given]
    ends = [held.high if held else sum(bar.parts.values()) for bar, held in zip(given, known, strict=True)]
    ticks = _ticks(0, max(ends) or 1.0)
    scale = (_WIDTH - _LEFT - _RIGHT) / max(*ends, ticks[-1])
    for tick in ticks:
        drawn += _tick_x(_LEFT + tick * scale, top, bottom, tick)
    drawn.append(_text(_LEFT, bottom + _BOTTOM - 6, unit))
    for number, (bar, held, end) in enumerate(zip(given, known, ends, strict=True)):
        y = top + number * (_BAR + _GAP) + _GAP / 2
        drawn.append(_text(_LEFT - 8, y + _BAR / 2 + 4.5, _cut(bar.name), "end"))
        x = float(_LEFT)
        for kind, length in bar.parts.items():
            wide = max(0.0, length * scale)
            colour = COLOURS[kinds.index(kind) % len(COLOURS)]
            hint = escape(f"{bar.name}: {kind} {_short(length)} {unit}")
            size = f'x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{_BAR}"'
            drawn.append(f'<rect {size} fill="{colour}"><title>{hint}</title></rect>')
            x += wide
        if held:
            whisker = f"M{_LEFT + held.low * scale:.1f} {y + _BAR / 2 - 5}v10m0 -5H{_LEFT + held.high * scale:.1f}"
            drawn.append(f'<path class="whisker" fill="none" d="{whisker}m0 -5v10"/>')
        drawn.append(_text(_LEFT + end * scale + 6, y + _BAR / 2 + 4.5, _short(sum(bar.parts.values()))))
    told = "; ".join(f"{bar.name} {_short(sum(bar.parts.values()))} {unit}" for bar in given)
    return _svg(title, told, bottom + _BOTTOM, drawn)


def lines(title: str, given: Sequence[Line], x_unit: str, y_unit: str, *, ideal: bool = False) -> str:
    """Return a chart of lines, "" of none; `ideal` draws y = x beside them. Points that are not finite are left out."""
    finite = [Line(name, [each for each in _thin(points) if all(map(math.isfinite, each))]) for name, points in given]
    finite = [line for line in finite if line.points]
    if not finite:
        return ""
    xs, ys = ([point[axis] for line in finite for point in line.points] for axis in (0, 1))
    ys = [*ys, *xs, 0.0] if ideal else ys
    x_ticks, y_ticks = sorted(set(xs)) if ideal else _ticks(min(xs), max(xs)), _ticks(min(ys), max(ys))
    (x_low, x_high), (y_low, y_high) = _ends([*x_ticks, *xs]), _ends([*y_ticks, *ys])
    top, left, right = _TOP + 24 * math.ceil(len(finite) / 4), 64, _WIDTH - 16
    bottom = top + _HEIGHT - _BOTTOM

    def at(x: float, y: float) -> tuple[float, float]:
        across, up = (x - x_low) / (x_high - x_low), (y - y_low) / (y_high - y_low)
        return left + across * (right - left), bottom - up * (bottom - top)

    def path(points: Sequence[tuple[float, float]]) -> str:
        return "M" + "L".join("{:.1f} {:.1f}".format(*at(*point)) for point in points)

    drawn = _key([line.name for line in finite], 4)
    for tick in y_ticks:
        y = at(x_low, tick)[1]
        drawn.append(f'<line class="grid" x1="{left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        drawn.append(_text(left - 6, y + 4, _short(tick), "end"))
    for tick in x_ticks:
        drawn += _tick_x(at(tick, y_low)[0], bottom - 4, bottom, tick)
    drawn.append(f'<line class="axis" x1="{left}" x2="{right}" y1="{bottom}" y2="{bottom}"/>')
    drawn += [_text(right, bottom + _BOTTOM - 4, x_unit, "end"), _text(4, bottom + _BOTTOM - 4, y_unit)]
    if ideal:
        drawn.append(f'<path class="ideal" d="{path([(x_low, x_low), (x_high, x_high)])}"><title>ideal</title></path>')
    for number, (name, points) in enumerate(finite):
        colour = COLOURS[number % len(COLOURS)]
        style = f'fill="none" stroke="{colour}" stroke-width="2"'
        drawn.append(f'<path d="{path(points)}" {style}><title>{escape(name)}</title></path>')
        for x, y in points if len(points) <= _DOTTED else ():
            cx, cy = at(x, y)
            hint = escape(f"{name}: {x_unit} {_short(x)}, {y_unit} {_short(y)}")
            dot = f'<circle cx="{cx:.1f}" cy="{cy:.1f}" r="3.5" fill="{colour}">'
            drawn.append(f"{dot}<title>{hint}</title></circle>")
    told = "; ".join(f"{name} ends at {_short(points[-1][1])}" for name, points in finite)
    return _svg(title, told, bottom + _BOTTOM, drawn)


def _thin(points: Sequence[tuple[float, float]]) -> Sequence[tuple[float, float]]:
    every = -(-len(points) // _POINTS)
    return [*points[::every], *points[-1:]] if every > 1 else points


def _svg(title: str, told: str, height: float, drawn: Sequence[str]) -> str:
    size = f'xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height:.0f}"'
    label = f'role="img" aria-label="{escape(f"{title}: {told}")}"'
    return f"<svg {size} {label}><style>{STYLE}</style>{''.join(drawn)}</svg>"


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _tick_x(x: float, top: float, bottom: float, value: float) -> list[str]:
    line = f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{bottom}"/>'
    return [line, _text(x, bottom + 18, _short(value), "middle")]


def _key(kinds: Sequence[str], per_row: int) -> list[str]:
    drawn = []
    for number, kind in enumerate(kinds):
        x, y = 8 + number % per_row * (_WIDTH - 16) / per_row, 12 + number // per_row * 22
        colour = COLOURS[number % len(COLOURS)]
        drawn.append(f'<rect x="{x:.1f}" y="{y - 9}" width="12" height="12" fill="{colour}"/>')
        drawn.append(_text(x + 17, y + 2, _cut(kind)))
    return drawn


def _ticks(low: float, high: float) -> list[float]:
    """Return four to eight round numbers that span from low to high."""
    span = (high - low) or abs(high) or 1.0
    step = 10 ** math.floor(math.log10(span / 4))
    step *= next(factor for factor in (1, 2, 2.5, 5, 10) if span / (step * factor) <= 6)
    first = math.floor(low / step + 1e-9)
    return [step * number for number in range(first, math.ceil(high / step - 1e-9) + 1)]


def _ends(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.3g}"


def _cut(name: str) -> str:
    return name if len(name) <= _LONGEST else f"{name[: _LONGEST - 1]}…"
