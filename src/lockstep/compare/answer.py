"""The recommendation in words: which variant to take, and why."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Sequence

from .numbers import CONFIDENCE, Interval, Spread
from .records import ACCURACY, SECONDS
from .rows import Row, difference

_LARGER = "a larger --batch has less of it a sample"
_LIMITS = {
    "data": ("waiting for data", "more --workers, or data that stay in memory, would lift that"),
    "compute": ("computation", "a lower --precision, another model, or more devices would lift that"),
    "communication": ("exchanging gradients and statistics", f"a faster link would lift that; {_LARGER}"),
    "optimizer": ("the optimizer's own step", _LARGER),
    "rest": ("what a step costs besides the model", _LARGER),
}
_WIDE = 0.15  # half of a ratio's interval, relative to the ratio, above which a larger budget is advised
_FULL = 0.4
"""Share of the rate of large matrix products above which arithmetic limits a net; public nets reach 0.2 to 0.45."""


def sentences(
    rows: Sequence[Row], command: Callable[[Sequence[str]], Sequence[str]], target: float | None = None
) -> list[str]:
    """Return the answer: the command line to take first, then the reasons.

    `command` returns the job's own with more flags. With a `target` accuracy the answer is the variant that reaches it
    first, otherwise the fastest.
    """
    rows = [row for row in rows if row.samples_per_s is not None]
    tried = [row for row in rows if not row.failed]
    if not tried:
        return [f"No variant could be {'trained to its end; the table says why' if rows else 'measured'}."]
    if target is not None and (reaching := [row for row in tried if row.reached]):
        chosen, told = _soonest(reaching, target)
    else:
        chosen, told = _fastest(tried, rows, by_accuracy=target is None)
    for row in rows:
        if target is not None and (row.reached or 0) < (row.seeds or 0):
            told.append(f"{row.name}: {row.reached} of {row.seeds} seeds reached {100 * target:g}%.")
    return [f"Take: {shlex.join(command(chosen.flags))}", *told, _limit(chosen)]


def _soonest(reaching: Sequence[Row], target: float) -> tuple[Row, list[str]]:
    """Choose the variant that most seeds, then soonest, bring to the accuracy."""
    first, *others = sorted(reaching, key=lambda row: (-(row.reached or 0), row.to_accuracy_s or Spread(0, None, 0)))
    later = {row.name: difference(row, first, SECONDS, reached=True) for row in others}
    equal = [row for row in others if row.reached == first.reached and later[row.name].low <= 0]
    told = f"{first.name} reaches {100 * target:g}% first, after {_plus_minus(first.to_accuracy_s)} s of training"
    if equal:
        chosen = min([first, *equal], key=lambda row: (row.devices, reaching.index(row)))
        few = "needs the fewest devices" if chosen.devices < max(row.devices for row in [first, *equal]) else "is first"
        return chosen, [f"{told}; {_not_told_apart(equal, first.seeds)}, and {chosen.name} {few}."]
    if not others:
        return first, [f"{told}, and is the only one that does."]
    second, (middle, low, high) = others[0].name, later[others[0].name]
    sooner = f": {middle:.3g} s ({low:.3g}–{high:.3g}) before {second}" if low > 0 else ""
    return first, [f"{told}{sooner}, and with {first.reached} of {first.seeds} seeds."]


def _fastest(tried: Sequence[Row], rows: Sequence[Row], *, by_accuracy: bool) -> tuple[Row, list[str]]:
    """Choose the fastest variant of the same model and accuracy."""
    fair = [row for row in tried if row.same_model is not False] or [*tried]
    worse = [row for row in fair if by_accuracy and any(difference(row, each, ACCURACY).high < 0 for each in fair)]
    fair = [row for row in fair if row not in worse]
    best = max(fair, key=_rate)
    equal = [row for row in fair if row is best or row.series.ratio(best.series).high >= 1]
    chosen = min(equal, key=lambda row: (row.devices, rows.index(row)))
    slower = [row for row in fair if row is not chosen]
    if len(equal) > 1:
        few = "it needs the fewest devices" if chosen.devices < best.devices else "it comes first"
        names = _names(row for row in equal if row is not chosen)
        told = [f"The races do not tell it and {names} apart by speed; {few}."]
    elif slower:
        second = max(slower, key=_rate)
        alone = f", and {_times(chosen.speed_up)} one device" if chosen.devices > 1 and chosen.speed_up else ""
        told = [f"It is {_times(chosen.series.ratio(second.series))} {second.name}, the next{alone}."]
    else:
        told = [f"No other variant {'could be measured' if len(rows) == 1 else 'is the same model, and as accurate'}."]
    width = max((row.ratio.half_width for row in rows if row.ratio is not None), default=0.0)
    if width > _WIDE:
        known = f"known to ±{width:.0%} only" if width < 1 else "not known: there was no time for enough races"
        told.append(f"Ratios are {known}; a larger --budget narrows them.")
    others = [(row, "its model is another one") for row in rows if row.same_model is False]
    for row, reason in [*others, *((row, "is less accurate") for row in worse)]:
        if chosen.series.ratio(row.series).high < 1:
            told.append(f"{row.name} would be {_rate(row) / _rate(chosen):.2f}× as fast, but {reason}.")
    told += _accuracies(chosen, rows) if by_accuracy and chosen.accuracy else []
    if len(same := [row for row in rows if row.same_model]) > 1:
        gap = max(row.loss_gap or 0.0 for row in same)
        losses = f"differ by {gap:.1e} at most" if gap else "are equal"
        ranks = " and all ranks hold the same bits" if any("replicas" in row.proved for row in same) else ""
        told.append(f"The same model: {_names(same)}; their losses {losses} in the first steps{ranks}.")
    if another := ", ".join(f"{row.name} ({row.another})" for row in rows if row.another):
        told.append(f"Not the same model: {another}.")
    return chosen, told


def _accuracies(chosen: Row, rows: Sequence[Row]) -> list[str]:
    """Compare accuracies with the chosen variant's, beyond the spread over seeds."""
    told, same = [f"{chosen.name} ends at an accuracy of {_plus_minus(chosen.accuracy, 100, 4)} %"], []
    for row in (row for row in rows if row is not chosen and row.accuracy is not None):
        gap = difference(row, chosen, ACCURACY)
        if gap.holds(0.0):
            same.append(row)
        else:
            points = "–".join(f"{100 * abs(each):.2f}" for each in sorted(gap[1:], key=abs))
            told.append(f"{row.name} {points} points {'above' if gap.middle > 0 else 'below'} it")
    told += [_not_told_apart(same, chosen.seeds)] if same else []
    return [f"{'; '.join(told)}."]


def _limit(row: Row) -> str:
    total_s = sum(row.parts_s.values())
    part, seconds = max(row.parts_s.items(), key=lambda each: each[1])
    what, lift = _LIMITS[part]
    told = f"{seconds / total_s:.0%} of its step is {what}"
    if part != "compute":
        return f"{told}, without which it would be up to {total_s / max(total_s - seconds, 1e-9):.2g}× as fast: {lift}."
    if row.matrix_share is None:
        return f"{told}: {lift}."
    told += f", at {row.matrix_share:.0%} of the rate at which its processors multiply large matrices"
    if row.matrix_share < _FULL:
        return f"{told}: memory traffic and small operations limit it; a larger --batch, or --compile, may lift that."
    return f"{told}: their arithmetic limits it; {lift}."


def _not_told_apart(rows: Sequence[Row], seeds: int | None) -> str:
    if (seeds or 0) < 2:
        return f"one seed cannot tell {_names(rows)} apart from it"
    return f"{seeds} seeds do not tell {_names(rows)} apart from it at {CONFIDENCE:.0%}"


def _names(rows: Iterable[Row]) -> str:
    return ", ".join(row.name for row in rows)


def _plus_minus(found: Spread | None, factor: float = 1.0, digits: int = 3) -> str:
    mean, sd = found[:2] if found else (0.0, None)
    return f"{factor * mean:.{digits}g}" + ("" if sd is None else f" ± {factor * sd:.2g}")


def _times(found: Interval) -> str:
    return f"{found.middle:.2f}× ({found.low:.2f}–{found.high:.2f}) as fast as"


def _rate(row: Row) -> float:
    return row.samples_per_s.middle if row.samples_per_s else 0.0
