"""All variants by turns, A B C A B C …, until their ratios are known well enough, or the time is used.

Each trial is a command of its own: what differs from start to start, such as where memory lies, is part of the noise
that an interval has to hold. A first, short round finds out how long a step takes, and which variants fail.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import RequestError, RunError, counted
from ..files import own_folder
from . import numbers, trials
from .grid import Cell, Words
from .trials import Trial

FEWEST = 5
"""Rounds before an interval may be called narrow."""
_PILOT_STEPS = 4
_TIMED_S = 2.0
"""What the steps of a trial should take: long enough that their clock's noise is none."""
_MOST_STEPS = 2000
_LIMIT = 10.0
"""Times what the pilot took, after which a trial hangs."""
_LEAST_LIMIT_S = 120.0


@dataclass
class Series:
    """A variant, and its trials so far."""

    cell: Cell
    pilot: Trial | None = None
    trials: list[Trial] = field(default_factory=list)
    folder: Path = Path()

    @property
    def failed(self) -> str:
        """Why it is tried no more; "" while it is."""
        found = (each.failed for each in (self.pilot, *self.trials) if each is not None and each.failed)
        return self.cell.why_not or next(found, "")

    @property
    def rates(self) -> list[float]:
        """Steps a second, by round."""
        return [each.steps_a_second for each in self.trials if not each.failed]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How long the rounds go on."""

    budget_s: float
    width: float
    """Half an interval, relative to its ratio, that is narrow enough."""
    steps: int | None = None
    """Timed steps of a trial; None to find them out."""


def run(
    cells: Sequence[Cell],
    command: Callable[[Cell, Path], Words],
    folder: Path,
    plan: Plan,
    tell: Callable[[str], None],
) -> list[Series]:
    """Run the trials that `folder` does not hold yet, and return all.

    `command` returns the words of a cell's command that writes to the run's folder it is given. Raises `RequestError`
    where the budget is too small for a round, and `RunError` where no variant can be run.
    """
    begun_s = time.monotonic()
    series = [Series(cell, folder=folder / _safe(cell.name)) for cell in cells]
    living = [each for each in series if not each.failed]
    for number, each in enumerate(living, start=1):
        tell(f"trying {each.cell.name} ({number} of {len(living)})")
        each.pilot = _trial(each, 0, command, steps=_PILOT_STEPS, limit_s=max(plan.budget_s, _LEAST_LIMIT_S))
    living = [each for each in living if not each.failed]
    if not living:
        first = next(each for each in series if each.failed)
        raise RunError(f"None of {counted(len(series), 'variant')} can be run; {first.cell.name}: {first.failed}")
    pilots = {each.cell.name: each.pilot for each in living if each.pilot is not None}
    steps = plan.steps or _steps([*pilots.values()])
    round_s = sum(_expected_s(each, steps) for each in pilots.values())
    tried_s = time.monotonic() - begun_s
    if tried_s + round_s > plan.budget_s:
        raise RequestError(
            f"--budget {plan.budget_s:.0f}s is too small: trying each variant took {tried_s:.0f} s, and a round of "
            f"{counted(steps, 'step')} takes about {round_s:.0f} s; give {math.ceil(tried_s + FEWEST * round_s)}s for "
            f"{FEWEST} rounds."
        )
    number = 0
    while living and (number == 0 or not _is_over(living, plan, begun_s, number)):
        number += 1
        tell(f"round {number}: {counted(steps, 'step')} of {counted(len(living), 'variant')}{_known(living)}")
        for each in living:
            limit_s = max(_LEAST_LIMIT_S, _LIMIT * _expected_s(pilots[each.cell.name], steps))
            each.trials.append(_trial(each, number, command, steps=steps, limit_s=limit_s))
        living = [each for each in living if not each.failed]
    return series


def _trial(series: Series, number: int, command: Callable[[Cell, Path], Words], *, steps: int, limit_s: float) -> Trial:
    folder = series.folder / f"round-{number:02}"
    if found := trials.done(folder):
        return found
    own_folder(folder)
    return trials.run(series.cell.name, folder, command(series.cell, folder / trials.RUN), steps=steps, limit_s=limit_s)


def _steps(pilots: Sequence[Trial]) -> int:
    """Return how many steps fill the time of a trial, by the geometric mean of the variants' steps."""
    each_s = [numbers.of_rounds(trial.step_s).middle for trial in pilots]
    mean_s = numbers.of_rounds(each_s).middle
    return min(_MOST_STEPS, max(_PILOT_STEPS, math.ceil(_TIMED_S / mean_s)))


def _expected_s(pilot: Trial, steps: int) -> float:
    """Return what a trial of so many steps takes, the silent ones included."""
    return pilot.seconds + 1.5 * (steps - _PILOT_STEPS) * sum(pilot.step_s) / len(pilot.step_s)


def _is_over(living: Sequence[Series], plan: Plan, begun_s: float, rounds: int) -> bool:
    round_s = sum(each.trials[-1].seconds for each in living)
    if time.monotonic() - begun_s + round_s > plan.budget_s:
        return True
    return rounds >= FEWEST and _widest(living) <= plan.width


def _widest(living: Sequence[Series]) -> float:
    first, *others = living
    return max((numbers.ratio(each.rates, first.rates).half_width for each in others), default=0.0)


def _known(living: Sequence[Series]) -> str:
    if len(living[0].trials) < 2:
        return ""
    return f", ratios known to ±{_widest(living):.1%}"


def _safe(name: str) -> str:
    """Return the name as one of a folder's."""
    return "".join(each if each.isalnum() or each in "-_.+=" else "_" for each in name)
