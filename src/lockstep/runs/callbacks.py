"""Functions that a run calls at its events."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from typing import Any, Literal, get_args

from ..errors import RequestError, choose

Event = Literal["step", "epoch", "evaluate", "save", "end"]
Callback = Callable[[dict[str, Any]], Any]


class Callbacks:
    """Callbacks by event (see `Session.on`)."""

    def __init__(self) -> None:
        self._by_event: dict[str, list[Callback]] = {event: [] for event in get_args(Event)}

    def add(self, event: str, callback: Callback) -> None:
        """Add a callback. Raises `RequestError` for another event, or what cannot be called with its fields."""
        if not isinstance(event, str):
            raise RequestError(f"session.on takes an event and a function; found {event!r} for the event.")
        choose("session.on:", event, [*self._by_event])
        takes_one = callable(callback)
        with contextlib.suppress(ValueError, TypeError):  # not written in Python
            parameters = inspect.signature(callback)
            try:
                parameters.bind({})
            except TypeError:
                takes_one = False
        if not takes_one:
            raise RequestError(f"session.on({event!r}) takes a function of one argument, the event's fields, a dict.")
        self._by_event[event].append(callback)

    def call(self, event: Event, **fields: Any) -> dict[str, Any]:
        """Call an event's callbacks in their order; return the fields that those of "end" return."""
        returned: dict[str, Any] = {}
        for callback in self._by_event[event]:
            result = callback(dict(fields))
            if event == "end" and isinstance(result, dict):
                returned |= result
        return returned
