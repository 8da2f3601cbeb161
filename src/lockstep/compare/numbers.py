"""What can be said of a ratio of two rates that were measured by turns on a noisy machine."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

_T975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
"""Student's t, 97.5 %, for 1, 2, … degrees of freedom."""


class Interval(NamedTuple):
    """A number, and the interval that holds it with 95 %."""

    middle: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        """Half the interval, relative to the middle."""
        return (self.high - self.low) / 2 / self.middle

    def holds(self, value: float) -> bool:
        """Whether the value lies in it."""
        return self.low <= value <= self.high


def of_rounds(values: Sequence[float]) -> Interval:
    """Return the geometric mean of positive values, one a round, with its interval; infinite of a single one.

    Logarithms of ratios are near enough to normal; Student's t over them is meant for few rounds.
    """
    logs = [math.log(value) for value in values]
    middle = statistics.fmean(logs)
    if len(logs) < 2:
        return Interval(math.exp(middle), 0.0, math.inf)
    freedom = len(logs) - 1
    reach = _t(freedom) * statistics.stdev(logs) / math.sqrt(len(logs))
    return Interval(*(math.exp(each) for each in (middle, middle - reach, middle + reach)))


def of_groups(groups: Sequence[Sequence[float]]) -> Interval:
    """Return the geometric mean of positive values that come in groups, with its interval.

    What differs from group to group widens it, as a random effect: its variance is what the groups' means vary by
    beyond what their values make them (Searle, Casella & McCulloch, Variance Components, 1992, chapter 3).
    """
    logs = [[math.log(value) for value in group] for group in groups if group]
    if len(logs) == 1:
        return of_rounds([math.exp(each) for each in logs[0]])
    means = [statistics.fmean(group) for group in logs]
    middle = statistics.fmean(means)
    within = statistics.fmean(_variance(group) / len(group) for group in logs)
    between = max(0.0, statistics.variance(means) - within)
    freedom = len(logs) - 1 if between else sum(map(len, logs)) - len(logs)
    reach = _t(freedom) * math.sqrt((within + between) / len(logs))
    return Interval(*(math.exp(each) for each in (middle, middle - reach, middle + reach)))


def _variance(values: Sequence[float]) -> float:
    return statistics.variance(values) if len(values) > 1 else 0.0


def _t(freedom: int) -> float:
    return _T975[freedom - 1] if 0 < freedom <= len(_T975) else 1.96 + 2.6 / max(1, freedom)
