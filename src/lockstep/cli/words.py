"""The flags that a verb has for itself: those of a run are options of a config, which `flags.parse` reads."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ..errors import RequestError


def take(given: list[str], own: Mapping[str, type]) -> tuple[dict[str, Any], list[str]]:
    """Return the values of the flags `own` (name → bool, float, str, or list for all of several), and the other words.

    Raises `RequestError` for a flag without its value, or one that is none.
    """
    values: dict[str, Any] = {}
    rest: list[str] = []
    words = iter(given)
    for word in words:
        name, equals, value = word.partition("=")
        name = name.replace("_", "-")
        if name not in own:
            rest.append(word)
            continue
        if own[name] is bool:
            if equals:
                raise RequestError(f"{name} takes no value, found {value!r}; write {name} alone.")
            values[name] = True
            continue
        text = value if equals else next(words, "")
        is_value = equals or own[name] is list or not text.startswith("--")
        if not text or not is_value:
            raise RequestError(f"{name} lacks its value.")
        if own[name] is list:
            values.setdefault(name, []).append(text)
        else:
            values[name] = tolerance(name, text) if own[name] is float else text
    return values, rest


def tolerance(name: str, text: str) -> float:
    """Return the number that `text` is. Raises `RequestError` where it is none, negative or not finite."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not (number >= 0 and math.isfinite(number)):
        raise RequestError(f"{name} {text}: give 0 or more.")
    return number
