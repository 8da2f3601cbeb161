"""Attachment to user objects: a callable replaces a method of one object.

The object keeps its class. Its pickles have the class's method, as do its copies unless `copies` is set.
"""

from __future__ import annotations

import copy
import functools
import types
import weakref
from collections.abc import Callable
from typing import Any

Wrapper = Callable[..., Any]
"""wrapper(method, *args, **kwargs)"""


class Attached:
    """Callable in place of a method, among the attributes of one object."""

    def __init__(self, owner: Any, name: str, wrapper: Wrapper, *, copies: bool = False) -> None:
        """Replace `owner.name`. With `copies`, deep copies of `owner` have the replacement too."""
        # No bound method: a model that refers to itself would live until the garbage collector finds it.
        self.owner, self.name, self.wrapper, self._copies = weakref.ref(owner), name, wrapper, copies
        self._replaced = vars(owner).get(name)
        self.__name__, self.__doc__ = name, getattr(getattr(owner, name), "__doc__", None)

    @property
    def method(self) -> Any:
        """The replaced method, or the class's function, partial in its object."""
        owner = self.owner()
        # Not a bound method, which torch's compiler cannot make.
        return functools.partial(getattr(type(owner), self.name), owner) if self._replaced is None else self._replaced

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.wrapper(self.method, *args, **kwargs)

    @property
    def __func__(self) -> Any:  # schedules read it from an optimizer's step
        return lambda _, *args, **kwargs: self(*args, **kwargs)

    def __reduce__(self) -> Any:
        return getattr, (self.owner(), self.name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        owner = memo.get(id(self.owner()))
        if owner is None:
            return self.method
        if self._copies:
            return self.moved_to(owner, copy.deepcopy(self._replaced, memo))
        method = getattr(type(owner), self.name, None)
        return self.method if method is None else types.MethodType(method, owner)

    def moved_to(self, owner: Any, replaced: Any = None) -> Attached:
        """Return the same attachment for another object, in place of its class's method or of `replaced`."""
        attributes = copy.copy(self.__dict__) | {"owner": weakref.ref(owner), "_replaced": replaced}
        attached = object.__new__(Attached)
        attached.__dict__.update(attributes)
        return attached

    def remove(self) -> None:
        """Restore the object's method, unless another callable has replaced this one."""
        owner = self.owner()
        if owner is not None and vars(owner).get(self.name) is self:
            vars(owner).pop(self.name)
            if self._replaced is not None:
                vars(owner)[self.name] = self._replaced


def attach(owner: Any, name: str, wrapper: Wrapper, *, copies: bool = False) -> Attached:
    """Make `owner.name(…)` call `wrapper(replaced method, …)`."""
    attached = Attached(owner, name, wrapper, copies=copies)
    setattr(owner, name, attached)
    return attached


def gate_schedule(schedule: Any, is_open: Callable[[], bool]) -> list[Attached]:
    """Make a schedule step only while `is_open()`. Its state stays unchanged."""
    return [
        attach(schedule, "step", lambda step, *args, **kwargs: step(*args, **kwargs) if is_open() else None),
        attach(
            schedule,
            "state_dict",
            lambda state, *args: {key: item for key, item in state(*args).items() if not isinstance(item, Attached)},
        ),
    ]
