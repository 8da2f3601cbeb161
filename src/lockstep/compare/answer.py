"""The recommendation in words: which variant, by how much, what is within the noise, and what limits it."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence

from . import numbers, rounds, whole
from .numbers import Interval
from .rounds import Series
from .rows import Row
from .whole import Trained

_LIMITS = {
    "data": ("waiting for data", "more --workers, or data that stay in memory, would lift that"),
    "compute": ("computation", "a lower --precision, another model, or more devices would lift that"),
    "communication": (
        "exchanging gradients and statistics",
        "a faster link would lift that; a larger --batch, or --accumulate, has less of it a sample",
    ),
    "optimizer": ("the optimizer's own step", "a larger --batch has less of it a sample"),
    "rest": ("what a step costs besides the model", "a larger --batch has less of it a sample"),
}
_WIDE = 0.15
"""Half of a ratio's interval, relative to it, from which on a larger budget is advised."""
_FULL = 0.4
"""Of the rate of large matrix products, from which on arithmetic limits a net; public nets reach 0.2 to 0.45."""


def sentences(
    found: Sequence[Row],
    series: Sequence[Series],
    command: Callable[[Sequence[str]], Sequence[str]],
    trained: Trained | None = None,
    target: float | None = None,
) -> list[str]:
    """Return the answer: the command line to take first, then why; `command` returns the job's own with more flags.

    With a `target` accuracy it is the variant that reaches it first, otherwise the fastest.
    """
    rows = [row for row in found if row.samples_per_s is not None]
    if not rows:
        return ["No variant could be measured."]
    by_name = {each.cell.name: each for each in series}
    trained = trained or {}
    tried = [row for row in rows if not row.failed]
    if not tried:
        return ["No variant could be trained to its end; the table says why."]
    if target is not None and (reaching := [row for row in tried if row.reached]):
        chosen, why = _soonest(reaching, trained, target)
        take = f"Take: {shlex.join(command(chosen.flags))}"
        return [take, why, *_unreached(rows, trained, target), _limit(chosen)]
    fair = [row for row in tried if row.same_model is not False] or tried
    worse = [row for row in fair if _is_less_accurate(row, fair, trained)] if target is None else []
    fair = [row for row in fair if row not in worse]
    best = max(fair, key=lambda row: _rate(row))
    equal = [row for row in fair if row is not best and not _is_slower(row, best, by_name)]
    chosen = min([best, *equal], key=lambda row: (row.devices, rows.index(row)))
    told = [f"Take: {shlex.join(command(chosen.flags))}", _why(chosen, best, equal, fair, len(rows), by_name)]
    told += [_widely(rows)]
    told += [
        f"{row.name} would be {_rate(row) / _rate(chosen):.2f}× as fast, but its model is another one."
        for row in rows
        if row.same_model is False and _is_slower(chosen, row, by_name)
    ]
    told += [
        f"{row.name} would be {_rate(row) / _rate(chosen):.2f}× as fast, but is less accurate."
        for row in worse
        if _is_slower(chosen, row, by_name)
    ]
    told += _unreached(rows, trained, target) if target is not None else _accuracies(chosen, rows, trained)
    told += [_same(rows), _others(rows), _limit(chosen)]
    return [each for each in told if each]


def _soonest(reaching: Sequence[Row], trained: Trained, target: float) -> tuple[Row, str]:
    """Return the variant that reaches the accuracy with most seeds, of those the soonest; and why it is that one."""

    def later(row: Row, than: Row) -> numbers.Interval:
        return whole.difference(trained[row.name], trained[than.name], 1, reached=True)

    def seconds(row: Row) -> float:
        return 0.0 if row.to_accuracy_s is None else row.to_accuracy_s.mean

    first, *others = sorted(reaching, key=lambda row: (-(row.reached or 0), seconds(row)))
    equal = [row for row in others if row.reached == first.reached and later(row, first).low <= 0]
    chosen = min([first, *equal], key=lambda row: (row.devices, reaching.index(row)))
    names = ", ".join(row.name for row in equal)
    told = f"{first.name} reaches {100 * target:g}% first, after {_plus_minus(first.to_accuracy_s)} s of training"
    if equal:
        few = "needs the fewest devices" if chosen.devices < max(row.devices for row in [first, *equal]) else "is first"
        return chosen, f"{told}; {_not_told_apart(names, first.seeds)}, and {chosen.name} {few}."
    if not others:
        return chosen, f"{told}, and is the only one that does."
    gap = later(others[0], first)
    sooner = f": {gap.middle:.3g} s ({gap.low:.3g}–{gap.high:.3g}) before {others[0].name}" if gap.low > 0 else ""
    return chosen, f"{told}{sooner}, and with {first.reached} of {first.seeds} seeds."


def _unreached(rows: Sequence[Row], trained: Trained, target: float) -> list[str]:
    """Return a sentence for each variant that some seeds, or all, did not bring to the accuracy."""
    told = []
    for row in rows:
        best = whole.best(trained.get(row.name, {}))
        if row.reached is not None and row.seeds and row.reached < row.seeds:
            ends = "" if best is None else f"; the best of its evaluations is {best:.2%}"
            told.append(f"{row.name}: {row.reached} of {row.seeds} seeds reached {100 * target:g}%{ends}.")
    return told


def _accuracies(chosen: Row, rows: Sequence[Row], trained: Trained) -> list[str]:
    """Return how accurate the variant to take becomes, and which others do beyond the spread over the seeds."""
    if chosen.accuracy is None:
        return []
    told, same = [f"{chosen.name} ends at an accuracy of {_plus_minus(chosen.accuracy, 100, 4)} %"], []
    for row in rows:
        if row is not chosen and row.accuracy is not None:
            gap = whole.difference(trained[row.name], trained[chosen.name], 2)
            if gap.holds(0.0):
                same.append(row.name)
            else:
                points = "–".join(f"{100 * abs(each):.2f}" for each in sorted(gap[1:], key=abs))
                told.append(f"{row.name} {points} points {'above' if gap.middle > 0 else 'below'} it")
    if same:
        told.append(_not_told_apart(", ".join(same), chosen.seeds))
    return [f"{'; '.join(told)}."]


def _same(rows: Sequence[Row]) -> str:
    """Return which variants are shown to be the same model; "" for none."""
    same = [row for row in rows if row.same_model]
    if len(same) < 2:
        return ""
    gap = max(row.loss_gap or 0.0 for row in same)
    ranks = " and all ranks hold the same bits" if any("replicas" in row.proved for row in same) else ""
    losses = f"differ by {gap:.1e} at most" if gap else "are equal"
    names = ", ".join(row.name for row in same)
    return f"The same model: {names}; their losses {losses} in the first steps{ranks}."


def _others(rows: Sequence[Row]) -> str:
    """Return which variants are other models, and why; "" for none."""
    found = [f"{row.name} ({row.another})" for row in rows if row.another]
    return f"Not the same model: {', '.join(found)}." if found else ""


def _is_less_accurate(row: Row, rows: Sequence[Row], trained: Trained) -> bool:
    """Whether another row is more accurate, beyond what seeds make."""
    known = [each for each in rows if each.accuracy is not None and each is not row]
    if row.accuracy is None or not known:
        return False
    return any(whole.difference(trained[row.name], trained[each.name], 2).high < 0 for each in known)


def _not_told_apart(names: str, seeds: int | None) -> str:
    if (seeds or 0) < 2:
        return f"one seed cannot tell {names} apart from it"
    return f"{seeds} seeds do not tell {names} apart from it at {numbers.CONFIDENCE:.0%}"


def _plus_minus(found: numbers.Spread | None, times: float = 1.0, digits: int = 3) -> str:
    if found is None:
        return ""
    return f"{times * found.mean:.{digits}g}" + ("" if found.sd is None else f" ± {times * found.sd:.2g}")


def _rate(row: Row) -> float:
    assert row.samples_per_s is not None
    return row.samples_per_s.middle


def _widely(rows: Sequence[Row]) -> str:
    """Return how little is known of the ratios; "" where it is enough."""
    width = max((row.ratio.half_width for row in rows if row.ratio is not None), default=0.0)
    if width > 1:
        return "There was no time for enough races to tell how much starts differ: give a larger --budget."
    return f"Ratios are known to ±{width:.0%} only: a larger --budget narrows them." if width > _WIDE else ""


def _is_slower(row: Row, best: Row, by_name: Mapping[str, Series]) -> bool:
    """Whether a variant has fewer samples a second than the best, beyond the noise of the turns that both had."""
    steps = rounds.ratio(by_name[row.name], by_name[best.name])
    return steps.high * (row.batch or 1) / (best.batch or 1) < 1


def _why(
    chosen: Row, best: Row, equal: Sequence[Row], rows: Sequence[Row], measured: int, by_name: Mapping[str, Series]
) -> str:
    """Return why it is to be taken of `rows`, which are those of the same model among all that were measured."""
    others = [row.name for row in [best, *equal] if row is not chosen]
    if others and len(rows) > 1:
        few = "it needs the fewest devices" if chosen.devices < best.devices else "it comes first"
        return f"The races do not tell it and {', '.join(others)} apart by speed; {few}."
    if len(rows) == 1:
        return "No other variant " + ("could be measured." if measured == 1 else "is the same model, and as accurate.")
    slower = [row for row in rows if row is not chosen]
    next_best = max(slower, key=_rate)
    per_step = rounds.ratio(by_name[chosen.name], by_name[next_best.name])
    times = Interval(*(each * (chosen.batch or 1) / (next_best.batch or 1) for each in per_step))
    told = f"It is {times.middle:.2f}× ({times.low:.2f}–{times.high:.2f}) as fast as {next_best.name}, the next"
    if chosen.devices > 1 and (alone := chosen.speed_up) is not None:
        told += f", and {alone.middle:.2f}× ({alone.low:.2f}–{alone.high:.2f}) as fast as one device"
    return f"{told}."


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
