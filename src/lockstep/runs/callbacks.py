"""Functions that a run calls at its events."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, get_args

from ..errors import RequestError, choose

Event = Literal["step", "epoch", "evaluate", "save", "end"]
Callback = Callable[[dict[str, Any]], dict[str, Any] | None]


class Callbacks:
    """Callbacks by event (see `Session.on`)."""

    def __init__(self) -> None:
        self._by_event: dict[str, list[Callback]] = {event: [] for event in get_args(Event)}

    def add(self, event: str, callback: Callback) -> None:
        """Add a callback. Raises `RequestError` for another event, or what cannot be called."""
        choose("session.on:", event, [*self._by_event])
        if not callable(callback):
            raise RequestError(f"session.on({event!r}) takes a function of the event's fields, a dict.")
        self._by_event[event].append(callback)

    def call(self, event: Event, **fields: Any) -> dict[str, Any]:
        """Call an event's callbacks in their order; return the fields that they return."""
        returned: dict[str, Any] = {}
        for callback in self._by_event[event]:
            returned |= callback(dict(fields)) or {}
        return returned
