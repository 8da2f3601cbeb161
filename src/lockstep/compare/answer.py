"""The recommendation in words: which variant, by how much, what is within the noise, and what limits it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from . import rounds
from .rounds import Series
from .rows import Row

_LIMITS = {
    "data": "waiting for data: more --workers, or data that stay in memory, would help",
    "compute": "the computation itself: a lower --precision, another model, or more devices would help",
    "communication": "exchanging gradients and statistics: a larger --batch, or --accumulate, has less of it a sample",
    "optimizer": "the optimizer's own step: a fused one, or a larger --batch, has less of it a sample",
    "rest": "what a step costs besides the model: a larger --batch has less of it a sample",
}


def sentences(found: Sequence[Row], series: Sequence[Series], command: Sequence[str]) -> list[str]:
    """Return the answer: the command line to take first, then why; `command` is the job's own without what varies."""
    rows = [row for row in found if row.samples_per_s is not None]
    if not rows:
        return ["No variant could be measured."]
    by_name = {each.cell.name: each for each in series}
    fair = [row for row in rows if row.same_model is not False] or rows
    best = max(fair, key=lambda row: _rate(row))
    equal = [row for row in fair if row is not best and not _is_slower(row, best, by_name)]
    chosen = min([best, *equal], key=lambda row: (row.devices, rows.index(row)))
    told = [f"Take: {shlex.join([*command, *chosen.flags])}"]
    told.append(_why(chosen, best, equal, rows))
    told += [
        f"{row.name} would be {_rate(row) / _rate(chosen):.2f}× as fast, but its model is another one: its losses "
        f"differ by {row.loss_gap:.1e}."
        for row in rows
        if row.same_model is False and _rate(row) > _rate(chosen)
    ]
    told.append(_limit(chosen))
    return told


def _rate(row: Row) -> float:
    assert row.samples_per_s is not None
    return row.samples_per_s.middle


def _is_slower(row: Row, best: Row, by_name: Mapping[str, Series]) -> bool:
    """Whether a variant has fewer samples a second than the best, beyond the noise of the turns that both had."""
    steps = rounds.ratio(by_name[row.name], by_name[best.name])
    return steps.high * (row.batch or 1) / (best.batch or 1) < 1


def _why(chosen: Row, best: Row, equal: Sequence[Row], rows: Sequence[Row]) -> str:
    others = [row.name for row in [best, *equal] if row is not chosen]
    if others and len(rows) > 1:
        few = "it needs the fewest devices" if chosen.devices < best.devices else "it comes first"
        return f"Within the noise it is as fast as {', '.join(others)}; {few}."
    assert chosen.ratio is not None
    if len(rows) == 1:
        return "It is the only variant that could be measured."
    slower = [row for row in rows if row is not chosen]
    next_best = max(slower, key=_rate)
    told = f"It is {_rate(chosen) / _rate(next_best):.2f}× as fast as {next_best.name}, the next"
    if chosen.devices > 1:
        told += (
            f", and {chosen.ratio.middle:.2f}× ({chosen.ratio.low:.2f}–{chosen.ratio.high:.2f}) as fast as one device"
        )
    return f"{told}."


def _limit(row: Row) -> str:
    total_s = sum(row.parts_s.values())
    part, seconds = max(row.parts_s.items(), key=lambda each: each[1])
    return f"{seconds / total_s:.0%} of its step is {_LIMITS[part]}."
