"""What a session attaches to a user's objects: a method in place of one of theirs, for this object alone.

The object keeps its class. Its pickles and copies have the class's own method.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable
from typing import Any

By = Callable[..., Any]
"""by(method, *args, **kwargs)"""


class Attached:
    """Callable in place of a method, among the attributes of one object."""

    def __init__(self, owner: Any, name: str, by: By, *, copies: bool = False) -> None:
        """Take the place of `owner.name`. With `copies`, deep copies of `owner` have the same."""
        self._owner, self._name, self._by, self._copies = weakref.ref(owner), name, by, copies
        self.method = getattr(owner, name)
        self.__name__, self.__doc__ = name, getattr(self.method, "__doc__", None)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._by(self.method, *args, **kwargs)

    @property
    def __func__(self) -> Any:  # as schedules ask of the step that they find
        return lambda _, *args, **kwargs: self(*args, **kwargs)

    def __reduce__(self) -> Any:
        return getattr, (self._owner(), self._name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copy = memo.get(id(self._owner()))
        if copy is None:
            return self.method
        plain = getattr(type(copy), self._name, None)
        method = self.method if plain is None else types.MethodType(plain, copy)
        if not self._copies:
            return method
        attached = object.__new__(Attached)
        attached._owner, attached._name, attached._by, attached._copies = weakref.ref(copy), self._name, self._by, True
        attached.method, attached.__name__, attached.__doc__ = method, self._name, self.__doc__
        return attached


def attach(owner: Any, name: str, by: By, *, copies: bool = False) -> None:
    """Have `owner.name(…)` call `by(the own method, …)`."""
    setattr(owner, name, Attached(owner, name, by, copies=copies))


def gate_schedule(schedule: Any, is_open: Callable[[], bool]) -> None:
    """Have a schedule step only while `is_open()`. Its state is its own."""
    attach(schedule, "step", lambda step, *args, **kwargs: step(*args, **kwargs) if is_open() else None)
    attach(
        schedule,
        "state_dict",
        lambda state, *args: {key: item for key, item in state(*args).items() if not isinstance(item, Attached)},
    )
