"""What is asked of the numbers in a config: each check raises `RequestError` with the flag and what to give instead."""

from __future__ import annotations

import dataclasses
import math

from ..errors import RequestError

LONGEST_WAIT_S = 366 * 24 * 3600
"""A year: what torch and the operating system count time-outs in holds little more than centuries."""


def require(holds: bool, sentence: str) -> None:
    """Raise with `sentence` unless it `holds`."""
    if not holds:
        raise RequestError(sentence)


def check_whole(flag: str, value: int | None, least: int = 1, unit: str = "") -> None:
    """Raise where a whole number, if there is one, is below `least` or beyond what 64 bits hold."""
    if value is not None:
        require(value >= least, f"--{flag} {value}: give {least} or more{unit}.")
        require(value < 2**63, f"--{flag} {value}: give a number below 2**63.")


def check_finite(section: object) -> None:
    """Raise where a number is nan or infinite: nan slips through comparisons, infinity through those with one bound."""
    for item in dataclasses.fields(section):  # type: ignore[arg-type]
        value = getattr(section, item.name)
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, float) and not math.isfinite(number):
                raise RequestError(f"--{item.name.replace('_', '-')} {number}: give a finite number.")


def check_text(flag: str, value: object) -> None:
    """Raise where a text or a path is not UTF-8, which the run's config.toml could not hold."""
    try:
        str(value).encode()
    except UnicodeEncodeError:
        raise RequestError(f"--{flag} {str(value)!r} is not UTF-8: rename it, or make a link to it.") from None


def listed(numbers: tuple[float, ...]) -> str:
    """Return numbers as they are written after a flag."""
    return " ".join(f"{number:g}" for number in numbers) or "none"


def check_wait(flag: str, seconds: float) -> None:
    """Raise where nobody could wait so long."""
    require(0 < seconds <= LONGEST_WAIT_S, f"--{flag} {seconds:g}: give seconds above 0, and at most a year.")
