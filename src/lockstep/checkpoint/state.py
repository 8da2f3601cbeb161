"""A run's state, independent of the strategy: named tensors and JSON.

Tensors are named `model/fc.weight`, `optimizer/fc.weight/momentum_buffer`, `ema/fc.weight`: the model's own names,
without a wrapper's prefix or a parameter's index, so that every strategy loads the checkpoints of every other.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import RequestError, unknown
from .shards import is_shard, shard_as


@dataclass(frozen=True)
class State:
    """The state of a run: `tensors` by name, and JSON-able `meta`."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    meta: dict[str, Any] = field(default_factory=dict)
    origin: Path | None = field(default=None, compare=False)  # the checkpoint's folder, links resolved
    caution: str = field(default="", compare=False)  # why `origin` is not the newest checkpoint

    def part(self, name: str) -> dict[str, Tensor]:
        """Return the tensors named `name/…`, without that prefix."""
        return {key[len(name) + 1 :]: value for key, value in self.tensors.items() if key.startswith(f"{name}/")}


def model_state(model: nn.Module, *, under: str = "model") -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return a model's `state_dict`: tensors as `under/NAME`, and other values (extra states) by name."""
    state = model.state_dict()
    tensors = {f"{under}/{name}": value for name, value in state.items() if isinstance(value, Tensor)}
    return tensors, {name: value for name, value in state.items() if not isinstance(value, Tensor)}


def load_model(model: nn.Module, tensors: dict[str, Tensor], extra: dict[str, Any] | None = None) -> None:
    """Load the result of `model_state` by the model's own `load_state_dict`.

    Buffers take their saved shapes: a forward pass may have changed them. Raises `RequestError` for the state of
    another model.
    """
    for name, buffer in dict(model.named_buffers()).items():
        if name in tensors and tensors[name].shape != buffer.shape:
            set_buffer(model, name, torch.empty_like(tensors[name], dtype=buffer.dtype, device=buffer.device))
    sharded = {
        name: shard_as(parameter, tensors[name])
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if name in tensors
    }
    try:
        model.load_state_dict(tensors | sharded | (extra or {}))
    except Exception as error:  # a module may raise its own errors
        check_fits(model, tensors)
        raise RequestError(
            f"The checkpoint does not fit the model, whose load_state_dict raised {type(error).__name__}: "
            f"{' '.join(str(error).split())}. Give the model it was trained with."
        ) from error


def set_buffer(model: nn.Module, name: str, tensor: Tensor) -> None:
    """Make `tensor` the model's buffer of dotted name `name`."""
    parent, _, leaf = name.rpartition(".")
    module = model.get_submodule(parent)
    if hasattr(module, leaf):
        setattr(module, leaf, tensor)
    else:
        module.register_buffer(leaf, tensor)


def buffer_owners(model: nn.Module) -> dict[str, str]:
    """Return the class of the module that has each buffer, by the buffer's dotted name."""
    return {
        f"{path}.{name}" if path else name: type(module).__name__
        for path, module in model.named_modules()
        for name, _ in module.named_buffers(recurse=False)
    }


def add_buffers(model: nn.Module, tensors: dict[str, Tensor], owners: dict[str, str]) -> None:
    """Register buffers that the saved model had registered while it trained. `owners` is of `buffer_owners`."""
    modules, present = dict(model.named_modules()), dict(model.named_buffers())
    device = next((parameter.device for parameter in model.parameters()), None)
    for name in owners.keys() & tensors.keys() - present.keys():
        path, _, own_name = name.rpartition(".")
        module = modules.get(path)
        if module is None or type(module).__name__ != owners[name]:
            continue
        is_awaited = getattr(module, own_name, ...) is None and not type(module).__module__.startswith("torch.")
        if is_awaited or not hasattr(module, own_name):  # a BatchNorm without statistics stays so
            set_buffer(model, name, torch.empty_like(tensors[name], device=device))


def check_fits(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Raise `RequestError` if `tensors` do not fit the model. The message has names and shapes."""
    expected = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    missing, foreign, reshaped = misfits(expected, tensors)
    names_by_clause = {"it lacks ": missing, "the model lacks ": foreign, "": list(reshaped.values())}
    if differences := "; ".join(clause + few(names) for clause, names in names_by_clause.items() if names):
        raise RequestError(f"The checkpoint is of another model: {differences}. Give the model it was trained with.")


def misfits(expected: dict[str, Tensor], tensors: dict[str, Tensor]) -> tuple[list[str], list[str], dict[str, str]]:
    """Return names missing in `tensors`, names missing in `expected`, and {name: both shapes} where these differ."""
    reshaped = {
        name: f"{name} is {tuple(tensors[name].shape)}, the model's is {tuple(expected[name].shape)}"
        for name in sorted(expected.keys() & tensors.keys())
        if expected[name].shape != tensors[name].shape
    }
    return sorted(expected.keys() - tensors.keys()), sorted(tensors.keys() - expected.keys()), reshaped


def matching(flag: str, pattern: str, parameters: dict[str, nn.Parameter]) -> list[nn.Parameter]:
    """Return the parameters whose names match a shell `pattern`. `flag` is the pattern's option.

    Raises `RequestError` with similar names if none matches.
    """
    matches = [parameter for name, parameter in parameters.items() if fnmatchcase(name, pattern)]
    if not matches:
        parts = {name[:position] for name in parameters for position, letter in enumerate(name) if letter == "."}
        names = {*parameters, *(f"{part}.*" for part in parts)}
        raise unknown(f"{flag} pattern", pattern, names, f"Parameters that it may match: {few(list(parameters))}.")
    return matches


def laid_out_as(parameter: Tensor, tensor: Tensor) -> Tensor:
    """Return a copy of `tensor`, in the parameter's memory order if the shapes agree.

    torch's fused CPU optimizers traverse both in memory order: state in another order would silently apply to the wrong
    weights.
    """
    if tensor.shape != parameter.shape or is_shard(tensor):  # torch shards tensors in one memory order
        return tensor.clone()
    return torch.empty_like(parameter, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def few(names: list[str], most: int = 3) -> str:
    """Return the first `most` names, and the number of further ones."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """Return an optimizer's parameters in the order of its state."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def optimizer_tensors(model: nn.Module, optimizers: Iterable[Optimizer]) -> dict[str, Tensor]:
    """Return the tensors of the optimizers' states as `optimizer/PARAMETER/KEY`."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    return {
        f"optimizer/{names[parameter]}/{key}": value
        for optimizer in optimizers
        for parameter, entries in optimizer.state.items()
        if parameter in names  # else the optimizer's own key
        for key, value in entries.items()
        if isinstance(value, Tensor)
    }


def load_optimizer(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Load an optimizer's own `state_dict`. Raises `RequestError` for a misfit."""
    initialized = sum(bool(entries) for entries in optimizer.state.values())
    saved: Any = state.get("state")
    for index, parameter in enumerate(parameters_of(optimizer)) if isinstance(saved, dict) else ():
        entries = saved.get(index) or {}
        entries |= {key: shard_as(parameter, value) for key, value in entries.items()}
    try:
        optimizer.load_state_dict(state)
    except Exception as error:  # an optimizer may raise its own errors
        raise RequestError(
            f"The checkpoint does not fit the optimizer: {type(optimizer).__name__}.load_state_dict raised "
            f"{type(error).__name__}: {' '.join(str(error).split())}. Give the optimizer it was trained with."
        ) from error
    if sum(bool(entries) for entries in optimizer.state.values()) < initialized:
        raise RequestError("The checkpoint's optimizer lacks a part of its state; give another copy of it.")
    _keep_types(optimizer, state.get("state"))
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            entries = optimizer.state.get(parameter) or {}
            if group.get("fused"):
                _check_shapes(parameter, entries)
            for key, value in entries.items():
                if isinstance(value, Tensor) and value.dim():
                    entries[key] = laid_out_as(parameter, value)


def _keep_types(optimizer: Optimizer, saved: Any) -> None:
    """Give loaded entries the types that they were saved in: torch casts them to their parameter's.

    NAdam's products and ASGD's averages are float32 beside parameters of any type.
    """
    for index, parameter in enumerate(parameters_of(optimizer)):
        entries: dict[str, Any] = optimizer.state.get(parameter) or {}
        was = saved.get(index) if isinstance(saved, dict) else None
        for key, value in was.items() if isinstance(was, dict) else ():
            now = entries.get(key)
            if isinstance(value, Tensor) and isinstance(now, Tensor) and now.dtype != value.dtype:
                entries[key] = value.to(now.device)


def _check_shapes(parameter: Tensor, entries: dict[str, Any]) -> None:
    """Raise `RequestError` for state of another shape: fused kernels would read past its end."""
    for key, value in entries.items():
        if isinstance(value, Tensor) and value.dim() and value.shape != parameter.shape:
            shape, expected = tuple(value.shape), tuple(parameter.shape)
            raise RequestError(f"The checkpoint's optimizer has {key} {shape} for a parameter {expected}.")
