"""Plain data of user objects' states: JSON, and tensors by name.

A checkpoint has no pickles. It has tensors, arrays, numbers, texts and containers of them.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator
from typing import Any

import numpy as np
from torch import Tensor

from ..errors import RequestError

_EXTRA_GROUP = "own"  # group of the tensors in the states of schedules and other user objects
_CONTAINERS: dict[str, Any] = {
    "counter": Counter,
    "ordered": OrderedDict,
    "dict": dict,
    "list": list,
    "tuple": tuple,
    "set": set,
}
_SUBCLASSES = ("dict", "list", "tuple")  # their subclasses, such as defaultdict, are restored as plain containers


def pack(value: Any, tensors: dict[str, Tensor], names: dict[int, str]) -> Any:
    """Return plain data for JSON. Adds tensors to `tensors` unless `names` has their id.

    Raises `RequestError` for other objects.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        group = f"{_EXTRA_GROUP}/"
        name = names.get(id(value)) or f"{group}{sum(key.startswith(group) for key in tensors)}"
        tensors[name] = value.detach()
        return {"tensor": name}
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biuf":
        kind = "array" if isinstance(value, np.ndarray) else "number"
        return {kind: [str(value.dtype), value.tolist()]}
    for name, kind in _CONTAINERS.items():
        if type(value) is kind or (name in _SUBCLASSES and isinstance(value, kind)):
            items = [list(pair) for pair in value.items()] if isinstance(value, dict) else list(value)
            return {name: [pack(item, tensors, names) for item in items]}
    raise RequestError(
        f"The state of an object in session.prepare has a {type(value).__name__}, and checkpoints hold no pickles: "
        "use tensors, arrays, numbers, texts, lists, tuples, sets and dicts."
    )


def names_in(packed: Any) -> Iterator[str]:
    """Yield the names of the tensors in a result of `pack`."""
    if isinstance(packed, list):
        for item in packed:
            yield from names_in(item)
    elif isinstance(packed, dict):
        ((kind, content),) = packed.items()
        if kind == "tensor":
            yield content
        elif isinstance(content, list) and kind in _CONTAINERS:
            yield from names_in(content)


def unpack(value: Any, tensors: dict[str, Tensor]) -> Any:
    """Return the value that `pack` was given, with copies of its tensors."""
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return tensors[content].clone()
    if kind in ("array", "number"):
        array = np.array(content[1], content[0])
        return array if kind == "array" else array[()]
    items = [unpack(item, tensors) for item in content]
    return Counter(dict(items)) if kind == "counter" else _CONTAINERS[kind](items)
