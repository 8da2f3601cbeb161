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
    t = _T975[freedom - 1] if freedom <= len(_T975) else 1.96 + 2.6 / freedom
    reach = t * statistics.stdev(logs) / math.sqrt(len(logs))
    return Interval(*(math.exp(each) for each in (middle, middle - reach, middle + reach)))


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> Interval:
    """Return ours ÷ theirs, round by round: what slows the machine for a while slows both."""
    return of_rounds([a / b for a, b in zip(ours, theirs, strict=False)])
