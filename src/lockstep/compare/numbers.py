"""Statistics of measurements on a noisy machine: intervals and spreads."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

CONFIDENCE = 0.98
"""Confidence of an interval. At this level, it contains the result of a repeated comparison 9 times in 10."""


class Interval(NamedTuple):
    """A number and its interval, of `CONFIDENCE`."""

    middle: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        """Half the interval, relative to the middle."""
        return (self.high - self.low) / 2 / self.middle

    def holds(self, value: float) -> bool:
        """Return whether the interval contains the value."""
        return self.low <= value <= self.high

    def times(self, factor: float) -> Interval:
        """Return all three multiplied."""
        return Interval(*(value * factor for value in self))


class Spread(NamedTuple):
    """Mean, sample standard deviation (None for one value), number of values."""

    mean: float
    sd: float | None
    n: int


def mean(values: Sequence[float]) -> Interval:
    """Return the mean and its interval, infinite for fewer than two values."""
    middle = statistics.fmean(values) if values else 0.0
    reach = math.inf
    if len(values) > 1:
        reach = student((1 + CONFIDENCE) / 2, len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return Interval(middle, middle - reach, middle + reach)


def geometric_mean(values: Sequence[float]) -> Interval:
    """Return the geometric mean of positive values, and its interval."""
    return Interval(*map(math.exp, mean([math.log(value) for value in values])))


def spread(values: Sequence[float]) -> Spread | None:
    """Return the spread of values; None without values."""
    if not values:
        return None
    return Spread(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None, len(values))


def of_next(groups: Sequence[Sequence[float]]) -> float:
    """Bound the relative deviation of a next value from its group's mean, with 90 % confidence.

    A prediction interval with a variance pooled over all groups; 0 if each has a single value.
    """
    samples = [[math.log(value) for value in group] for group in groups if len(group) > 1]
    freedom = sum(len(group) - 1 for group in samples)
    if not freedom:
        return 0.0
    variance = sum((len(group) - 1) * statistics.variance(group) for group in samples) / freedom
    count = statistics.fmean(map(len, samples))
    return math.expm1(student(0.95, freedom) * math.sqrt(variance * (1 + 1 / count)))


def student(part: float, freedom: int) -> float:
    """Return a quantile of Student's t distribution.

    Exact to 2 degrees of freedom; above, to 1 %, by Fisher's expansion (Abramowitz & Stegun, 26.7.5).
    """
    if freedom == 1:
        return math.tan(math.pi * (part - 0.5))
    if freedom == 2:
        above = 2 * part - 1
        return above * math.sqrt(2 / (1 - above * above))
    z = statistics.NormalDist().inv_cdf(part)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return math.fsum(term / freedom**power for power, term in enumerate(terms))
