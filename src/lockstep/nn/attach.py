"""Attaching to a user's objects: a callable in place of a method, for one object alone.

The object keeps its class. Its pickles have the class's own method, and so do its copies unless asked otherwise.
"""

from __future__ import annotations

import copy
import functools
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
        # No bound method: a model that refers to itself would live until the garbage collector finds it.
        self.owner, self.name, self.by, self._copies = weakref.ref(owner), name, by, copies
        self._before = vars(owner).get(name)
        self.__name__, self.__doc__ = name, getattr(getattr(owner, name), "__doc__", None)

    @property
    def method(self) -> Any:
        """The method that it took the place of, or the class's function, partial in its object."""
        owner = self.owner()
        # Not a bound method, which torch's compiler cannot make.
        return functools.partial(getattr(type(owner), self.name), owner) if self._before is None else self._before

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.by(self.method, *args, **kwargs)

    @property
    def __func__(self) -> Any:  # as schedules ask of the step that they find
        return lambda _, *args, **kwargs: self(*args, **kwargs)

    def __reduce__(self) -> Any:
        return getattr, (self.owner(), self.name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        owner = memo.get(id(self.owner()))
        if owner is None:
            return self.method
        if self._copies:
            return self.moved_to(owner, copy.deepcopy(self._before, memo))
        method = getattr(type(owner), self.name, None)
        return self.method if method is None else types.MethodType(method, owner)

    def moved_to(self, owner: Any, before: Any = None) -> Attached:
        """Return the same for another object, in place of its class's method or of `before`."""
        anew = copy.copy(self.__dict__) | {"owner": weakref.ref(owner), "_before": before}
        attached = object.__new__(Attached)
        attached.__dict__.update(anew)
        return attached

    def remove(self) -> None:
        """Give the object its method back, unless another one has taken this one's place."""
        owner = self.owner()
        if owner is not None and vars(owner).get(self.name) is self:
            vars(owner).pop(self.name)
            if self._before is not None:
                vars(owner)[self.name] = self._before


def attach(owner: Any, name: str, by: By, *, copies: bool = False) -> Attached:
    """Have `owner.name(…)` call `by(the own method, …)`."""
    attached = Attached(owner, name, by, copies=copies)
    setattr(owner, name, attached)
    return attached


def gate_schedule(schedule: Any, is_open: Callable[[], bool]) -> None:
    """Have a schedule step only while `is_open()`. Its state is its own."""
    attach(schedule, "step", lambda step, *args, **kwargs: step(*args, **kwargs) if is_open() else None)
    attach(
        schedule,
        "state_dict",
        lambda state, *args: {key: item for key, item in state(*args).items() if not isinstance(item, Attached)},
    )
