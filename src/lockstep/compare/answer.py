"""The recommendation in words: which variant to take, and why."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Sequence

from .numbers import CONFIDENCE, Spread
from .records import ACCURACY, SECONDS
from .rows import Row, difference

_PARTS = {
    "data": "waiting for data: more --workers, or data that stay in memory, reduce it",
    "compute": "computation: a larger --batch, a lower --precision, --compile, or more devices reduce it",
    "communication": "exchanging gradients and statistics: a faster link, or a larger --batch, reduces it",
    "optimizer": "the optimizer's step: a larger --batch reduces it per sample",
    "rest": "work outside the model: a larger --batch reduces it per sample",
}
TAKE = "Take: "
"""The beginning of the sentence with the recommended command line."""
_WIDE = 0.15  # half of a ratio's interval, relative to the ratio, above which a larger budget is advised


def sentences(
    rows: Sequence[Row], command: Callable[[Sequence[str]], Sequence[str]], target: float | None = None
) -> list[str]:
    """Return what is known of the best variant, its command line, and the reasons; then what is not known.

    `command` returns the job's command with more flags. With a `target` accuracy, the recommended variant is the one
    that reaches it first; otherwise the fastest variant of the same model among the most accurate.
    """
    rows = [row for row in rows if row.samples_per_s is not None]
    working = [row for row in rows if not row.failed]
    if not working:
        return ["No variant could be measured and trained to its end; the table says why."]
    reaching = [row for row in working if row.reached]
    best, ties, fact = _soonest(reaching, target) if target is not None and reaching else _fastest(working)
    chosen = min([best, *ties], key=lambda row: (row.devices, rows.index(row)))
    lines = [f"{fact}.", f"{TAKE}{shlex.join(command(chosen.flags))}"]
    if len(same := [row for row in rows if row.same_model]) > 1:
        gap = max(row.loss_gap or 0.0 for row in same)
        losses = f"differ by {gap:.1e} at most" if gap else "are equal"
        ranks = " and all ranks hold the same bits" if any("replicas" in row.proved for row in same) else ""
        lines.append(f"The same model: {_names(same)}; their losses {losses} in the first steps{ranks}.")
    if different := [row for row in rows if row.same_model is False]:
        lines.append(f"Not the same model: {', '.join(f'{row.name} ({row.another})' for row in different)}.")
    if chosen.accuracy is not None:
        title = "Accuracies" if (chosen.seeds or 0) > 1 else "Accuracies of one seed, without a spread to judge them by"
        lines.append(f"{title}: {', '.join(_accuracy(row, chosen) for row in rows if row.accuracy)}.")
    if target is not None:
        lines += [
            f"{row.name}: {row.reached} of {row.seeds} seeds reached {100 * target:g}%."
            for row in rows
            if (row.reached or 0) < (row.seeds or 0)
        ]
    return [*lines, _limit(chosen), *_unknowns(rows, best, ties, chosen)]


def _unknowns(rows: Sequence[Row], best: Row, ties: Sequence[Row], chosen: Row) -> list[str]:
    """Return sentences on what the measurements do not decide."""
    lines = []
    if ties:
        has_fewest = chosen.devices < max(row.devices for row in [best, *ties])
        lines.append(
            f"Not known with {CONFIDENCE:.0%} confidence: whether {best.name} is faster than {_names(ties)}; "
            f"{chosen.name} {'needs the fewest devices' if has_fewest else 'comes first'}."
        )
    width = max((row.ratio.half_width for row in rows if row.ratio is not None), default=0.0)
    if width > _WIDE:
        precision = (
            f"known to ±{width:.0%} only" if width < 1 else "hardly known: the budget had no time for more races"
        )
        lines.append(f"Ratios are {precision}; a larger --budget narrows them.")
    return lines


def _soonest(reaching: Sequence[Row], target: float) -> tuple[Row, list[Row], str]:
    """Return the first variant to reach the accuracy with most seeds; its ties; the reason."""
    most = max(row.reached or 0 for row in reaching)
    rows = [row for row in reaching if row.reached == most]
    best = min(rows, key=lambda row: row.to_accuracy_s or Spread(0, None, 0))
    ties = [row for row in rows if row is not best and difference(row, best, SECONDS, reached=True).low <= 0]
    timing = f"after {_plus_minus(best.to_accuracy_s)} s of training, with {most} of {best.seeds} seeds"
    return best, ties, f"{best.name} reaches {100 * target:g}% first, {timing}"


def _fastest(working: Sequence[Row]) -> tuple[Row, list[Row], str]:
    """Return the fastest variant of the same model and accuracy; its ties; the reason."""
    rows = [row for row in working if row.same_model is not False] or [*working]
    rows = [row for row in rows if not any(difference(row, other, ACCURACY).high < 0 for other in rows)]
    best, *slower = sorted(rows, key=lambda row: row.samples_per_s or (0.0,), reverse=True)
    ties = [row for row in slower if row.series.ratio(best.series).high >= 1]
    if not slower:
        return best, ties, f"{best.name} is the only variant that is the same model and as accurate"
    ratio = best.series.ratio(slower[0].series)
    interval = f" ({ratio.low:.2f}–{ratio.high:.2f} with {CONFIDENCE:.0%} confidence)" if ratio.low > 0 else ""
    return best, ties, f"{best.name} is {ratio.middle:.2f} × as fast as {slower[0].name}, the next{interval}"


def _accuracy(row: Row, chosen: Row) -> str:
    """Return a row's accuracy and its comparison with the chosen row's."""
    gap = difference(row, chosen, ACCURACY)
    verdict = " (higher)" if gap.low > 0 else " (lower)" if gap.high < 0 else " (a tie)"
    is_judged = row is not chosen and (row.seeds or 0) > 1
    return f"{row.name} {_plus_minus(row.accuracy, 100)} %" + (verdict if is_judged else "")


def _limit(row: Row) -> str:
    part, seconds = max(row.parts_s.items(), key=lambda item: item[1])
    rate = f" It computes at {row.matrix_share:.0%} of the rate of large matrix products." if row.matrix_share else ""
    return f"{seconds / sum(row.parts_s.values()):.0%} of {row.name}'s step is {_PARTS[part]}.{rate}"


def _names(rows: Iterable[Row]) -> str:
    return ", ".join(row.name for row in rows)


def _plus_minus(spread: Spread | None, factor: float = 1.0) -> str:
    mean, sd = spread[:2] if spread else (0.0, None)
    return f"{factor * mean:.4g}" + ("" if sd is None else f" ± {factor * sd:.2g}")
