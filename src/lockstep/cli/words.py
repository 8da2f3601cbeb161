"""Parse a verb's own flags. `flags.parse` reads those of a run's config."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ..errors import RequestError


def take(given: list[str], own: Mapping[str, type]) -> tuple[dict[str, Any], list[str]]:
    """Return the values of the flags `own`, and the other words. Types are bool, float, str; list for several.

    Raises `RequestError` for a flag without its value, or with an invalid one.
    """
    values: dict[str, Any] = {}
    rest: list[str] = []
    words = iter(given)
    for word in words:
        name, equals, text = word.partition("=")
        kind = own.get(name := name.replace("_", "-"))
        if kind is None:
            rest.append(word)
        elif kind is bool:
            if equals:
                raise RequestError(f"{name} takes no value, found {text!r}; write {name} alone.")
            values[name] = True
        else:
            text = text if equals else next(words, "")
            if not text or (not equals and kind is not list and text.startswith("--")):
                raise RequestError(f"{name} lacks its value.")
            held = _number(name, text) if kind is float else text
            values[name] = [*values.get(name, []), held] if kind is list else held
    return values, rest


def _number(name: str, text: str) -> float:
    """Return the number in `text`. Raises `RequestError` for none, a negative or an infinite one."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise RequestError(f"{name} {text}: give 0 or more.")
    return number
