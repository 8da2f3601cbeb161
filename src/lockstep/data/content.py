"""What samples are made of, in a hash: so that ranks can tell whether they read the same."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

COMPARED = 4
"""Samples, spread over the data set, that each rank reads before its first batch."""


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
