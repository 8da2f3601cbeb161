"""State of a model that a forward pass may change: weights, buffers, and attributes of modules."""

from __future__ import annotations

import copy
from collections import deque
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_INTERNAL = frozenset(vars(nn.Module()))
"""Attributes that every module has of torch's."""


class ModelState:
    """A copy of a model's state. Objects of other kinds than tensors, arrays, containers and numbers are not copied."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._parameters, self._buffers = dict(model.named_parameters()), dict(model.named_buffers())
        parts = (*model.modules(), *self._parameters.values(), *self._buffers.values())
        self._memo: dict[int, Any] = {id(part): part for part in parts}  # which attributes may refer to
        tensors = self._parameters | self._buffers
        self._contents = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        self._attributes = {
            (name, key): self._copied(value)
            for name, module in model.named_modules()
            for key, value in vars(module).items()
            if key not in _INTERNAL
        }

    @torch.no_grad()
    def restore(self) -> None:
        """Give the model this state again."""
        for name in dict(self._model.named_buffers()).keys() - self._buffers.keys():
            parent, _, key = name.rpartition(".")
            delattr(self._model.get_submodule(parent), key)
        for name, buffer in self._buffers.items():
            parent, _, key = name.rpartition(".")
            setattr(self._model.get_submodule(parent), key, buffer)
        for name, tensor in (self._parameters | self._buffers).items():
            tensor.copy_(self._contents[name])
        for module in self._model.modules():
            for key in vars(module).keys() - _INTERNAL:
                del vars(module)[key]
        for (name, key), value in self._attributes.items():
            vars(self._model.get_submodule(name))[key] = self._copied(value)

    def differing(self, other: ModelState) -> list[str]:
        """Return the names of buffers, weights and attributes that differ from those of `other`."""
        state, other_state = self._by_name(), other._by_name()
        return [name for name in state | other_state if not _equal(state.get(name), other_state.get(name))]

    def _by_name(self) -> dict[str, Any]:
        attributes = {".".join(filter(None, place)): value for place, value in self._attributes.items()}
        return self._contents | attributes

    def _copied(self, value: Any) -> Any:
        if not isinstance(value, Tensor | np.ndarray | list | tuple | dict | set | deque):
            return value
        try:
            return copy.deepcopy(value, dict(self._memo))
        except Exception:  # of whatever the container holds
            return value


def _equal(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other)
    if isinstance(one, list | tuple | deque):
        return len(one) == len(other) and all(map(_equal, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    try:
        return bool(one == other)
    except Exception:  # of the user's own class
        return one is other
