"""The same data for every rank: what differs is named before training starts, instead of a hang or a wrong model.

Ranks that see data sets of different lengths take different numbers of steps, and wait for each other until the
time-out; ranks that see different labels, or the same ones in another order (files as the disk lists them, a set of
names), train on samples twice and on others never.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ..errors import RequestError
from .shared import Array

if TYPE_CHECKING:
    from ..world import World


COMPARED = 4
"""Samples, spread over the data set, that each rank reads before its first batch."""


def digest(*arrays: Array) -> str:
    """Return a hash of the arrays' contents."""
    found = hashlib.sha256()
    for array in arrays:
        found.update(array.tobytes())
    return found.hexdigest()[:16]


def content(value: Any) -> str:
    """Return a hash of samples or a batch: of the tensors, arrays, numbers and texts in it, at any depth."""
    found = hashlib.sha256()
    _add(value, found)
    return found.hexdigest()[:16]


def _add(value: Any, found: Any) -> None:
    found.update(type(value).__name__.encode())
    if isinstance(value, Tensor) and value.layout == torch.strided:
        found.update(str(tuple(value.shape)).encode())
        found.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    elif isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject:
        found.update(value.tobytes())
    elif value is None or isinstance(value, bool | int | float | complex | str | bytes):
        found.update(repr(value).encode())
    elif isinstance(value, Mapping):
        _add(list(value.items()), found)
    elif isinstance(value, list | tuple):
        for part in value:
            _add(part, found)
    elif dataclasses.is_dataclass(value):
        _add([getattr(value, field.name) for field in dataclasses.fields(value)], found)


def check_alike(world: World, asked: str, facts: dict[str, Any]) -> None:
    """Raise `RequestError`, on every rank, where one has other `facts` than rank 0 (*collective*).

    `facts` is {what it is: a number or text}, the same keys on each rank; `asked` is the data's name in the sentence.
    """
    if found := world.unlike(facts):
        rank, differ = found
        raise RequestError(
            f"{asked} is not the same on every rank: rank {rank} has {differ}; "
            "give every rank the same samples, in the same order (files sorted, a stream whole)."
        )
