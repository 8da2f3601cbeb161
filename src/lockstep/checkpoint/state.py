"""A run's state, independent of the strategy: named tensors and JSON.

Tensors are called `model/fc.weight`, `optimizer/fc.weight/momentum_buffer`, `ema/fc.weight`: by the model's own names,
without a wrapper's prefix or a parameter's index, so that what one strategy saves another one loads.
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


@dataclass(frozen=True)
class State:
    """The state of a run: `tensors` by name, and JSON-able `meta`."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    meta: dict[str, Any] = field(default_factory=dict)
    origin: Path | None = field(default=None, compare=False)  # the checkpoint's folder itself, not a link to it
    caution: str = field(default="", compare=False)  # why that is not the newest one, in words

    def part(self, name: str) -> dict[str, Tensor]:
        """Return the tensors below `name/`, without that prefix."""
        return {key[len(name) + 1 :]: value for key, value in self.tensors.items() if key.startswith(f"{name}/")}


def model_state(model: nn.Module, *, under: str = "model") -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return what the model's `state_dict` holds: tensors as `under/NAME`, and other values (extra states) by name."""
    state = model.state_dict()
    tensors = {f"{under}/{name}": value for name, value in state.items() if isinstance(value, Tensor)}
    return tensors, {name: value for name, value in state.items() if not isinstance(value, Tensor)}


def load_model(model: nn.Module, tensors: dict[str, Tensor], extra: dict[str, Any] | None = None) -> None:
    """Load what `model_state` returned, by the model's own `load_state_dict`.

    Buffers get the shapes that they are saved in: a forward pass may have changed them. Raises `RequestError` where it
    does not fit the model.
    """
    for name, buffer in dict(model.named_buffers()).items():
        if name in tensors and tensors[name].shape != buffer.shape:
            set_buffer(model, name, torch.empty_like(tensors[name], dtype=buffer.dtype, device=buffer.device))
    try:
        model.load_state_dict(tensors | (extra or {}))
    except Exception as error:  # a module's own, too
        check_fits(model, tensors)
        raise RequestError(
            f"The checkpoint does not fit the model, whose load_state_dict raised {type(error).__name__}: "
            f"{' '.join(str(error).split())}. Give the model it was trained with."
        ) from error


def set_buffer(model: nn.Module, name: str, tensor: Tensor) -> None:
    """Make `tensor` the model's buffer of that dotted name."""
    parent, _, own_name = name.rpartition(".")
    module = model.get_submodule(parent)
    if hasattr(module, own_name):
        setattr(module, own_name, tensor)
    else:
        module.register_buffer(own_name, tensor)


def buffer_owners(model: nn.Module) -> dict[str, str]:
    """Return the class of the module that has each buffer, by the buffer's dotted name."""
    return {
        f"{path}.{name}" if path else name: type(module).__name__
        for path, module in model.named_modules()
        for name, _ in module.named_buffers(recurse=False)
    }


def add_buffers(model: nn.Module, tensors: dict[str, Tensor], owners: dict[str, str]) -> None:
    """Register buffers that the saved model had registered while it trained. `owners` is of `buffer_owners`."""
    modules, own = dict(model.named_modules()), model.state_dict()
    device = next((parameter.device for parameter in model.parameters()), None)
    for name in owners.keys() & tensors.keys() - own.keys():
        path, _, own_name = name.rpartition(".")
        module = modules.get(path)
        if module is None or type(module).__name__ != owners[name]:
            continue
        is_awaited = getattr(module, own_name, ...) is None and not type(module).__module__.startswith("torch.")
        if is_awaited or not hasattr(module, own_name):  # a BatchNorm without statistics stays so
            set_buffer(model, name, torch.empty_like(tensors[name], device=device))


def check_fits(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Raise `RequestError` where `tensors` do not fit the model. The message names keys and shapes."""
    own = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    missing, foreign, reshaped = misfits(own, tensors)
    named = {"it lacks ": missing, "the model lacks ": foreign, "": list(reshaped.values())}
    if differences := "; ".join(words + few(names) for words, names in named.items() if names):
        raise RequestError(f"The checkpoint is of another model: {differences}. Give the model it was trained with.")


def misfits(own: dict[str, Tensor], tensors: dict[str, Tensor]) -> tuple[list[str], list[str], dict[str, str]]:
    """Return names missing in `tensors`, in `own`, and {name: both shapes}. Sorted; the last of differing shapes."""
    reshaped = {
        name: f"{name} is {tuple(tensors[name].shape)}, the model's is {tuple(own[name].shape)}"
        for name in sorted(own.keys() & tensors.keys())
        if own[name].shape != tensors[name].shape
    }
    return sorted(own.keys() - tensors.keys()), sorted(tensors.keys() - own.keys()), reshaped


def matching(flag: str, pattern: str, named: dict[str, nn.Parameter]) -> list[nn.Parameter]:
    """Return the parameters whose names match a shell `pattern`. `flag` is the pattern's option.

    Raises `RequestError` with similar names where none does.
    """
    found = [parameter for name, parameter in named.items() if fnmatchcase(name, pattern)]
    if not found:
        parts = {name[:at] for name in named for at, letter in enumerate(name) if letter == "."}
        names = {*named, *(f"{part}.*" for part in parts)}
        raise unknown(f"{flag} pattern", pattern, names, f"Parameters that it may match: {few(list(named))}.")
    return found


def laid_out_as(parameter: Tensor, tensor: Tensor) -> Tensor:
    """Return a copy of `tensor` in the parameter's memory order. If it has the parameter's shape.

    torch's fused optimizers on a CPU walk through the memory of both side by side: state of another order would
    silently apply to the wrong weights.
    """
    if tensor.shape != parameter.shape:
        return tensor.clone()
    return torch.empty_like(parameter, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def few(names: list[str], most: int = 3) -> str:
    """Return the first names, and the number of others."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def optimizer_state(model: nn.Module, optimizers: Iterable[Optimizer]) -> State:
    """Return the optimizers' state by parameter name. Tensors, and plain numbers in `meta`.

    Learning rates and other settings are not part of it: they follow from the config and the step.
    """
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    tensors: dict[str, Tensor] = {}
    numbers: dict[str, Any] = {}
    for optimizer in optimizers:
        for parameter, entries in optimizer.state.items():
            if parameter not in names:  # a key of the optimizer's own
                continue
            for key, value in entries.items():
                name = f"{names[parameter]}/{key}"
                if isinstance(value, Tensor):
                    tensors[f"optimizer/{name}"] = value
                elif value is not None:
                    numbers[name] = value
    return State(tensors, {"optimizer": numbers})


def load_optimizer(model: nn.Module, optimizers: Iterable[Optimizer], state: State) -> None:
    """Load the result of `optimizer_state`, on each parameter's device. Raises `RequestError` for a misfit."""
    parameters = dict(model.named_parameters())
    entries: dict[str, dict[str, Any]] = {name: {} for name in parameters}
    for path, value in (state.part("optimizer") | state.meta.get("optimizer", {})).items():
        name, _, key = path.rpartition("/")
        if name not in parameters:
            raise RequestError(f"The checkpoint's optimizer has {path}, and the model no such parameter.")
        if not isinstance(value, Tensor) and type(value) not in (int, float):
            raise RequestError(f"The checkpoint's optimizer has {path}, which is no number.")
        entries[name][key] = laid_out_as(parameters[name], value) if isinstance(value, Tensor) else value
    names = {parameter: name for name, parameter in parameters.items()}
    for optimizer in optimizers:
        # load_state_dict speaks of parameters by their position, and moves tensors to the parameter's device and dtype.
        order = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        own = {index: entry for index, parameter in enumerate(order) if (entry := entries[names[parameter]])}
        made = [optimizer.state[parameter].keys() for parameter in order if optimizer.state.get(parameter)]
        kinds = {frozenset(each) for each in (*made, *(entry.keys() for entry in own.values()))}
        if len(own) < len(made) or len(kinds) > 1:
            raise RequestError("The checkpoint's optimizer lacks a part of its state; give another copy of it.")
        for parameter in order:
            _check_shapes(parameter, entries[names[parameter]])
        groups = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict({"state": own, "param_groups": groups})
        _keep_types(optimizer, own)


def load_own_optimizer(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Load an optimizer's own `state_dict`. Raises `RequestError` for a misfit."""
    made = sum(bool(entries) for entries in optimizer.state.values())
    try:
        optimizer.load_state_dict(state)
    except Exception as error:  # an optimizer's own, too
        raise RequestError(
            f"The checkpoint does not fit the optimizer: {type(optimizer).__name__}.load_state_dict raised "
            f"{type(error).__name__}: {' '.join(str(error).split())}. Give the optimizer it was trained with."
        ) from error
    if sum(bool(entries) for entries in optimizer.state.values()) < made:
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
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, parameter in enumerate(parameters):
        entries: dict[str, Any] = optimizer.state.get(parameter) or {}
        was = saved.get(index) if isinstance(saved, dict) else None
        for key, value in was.items() if isinstance(was, dict) else ():
            now = entries.get(key)
            if isinstance(value, Tensor) and isinstance(now, Tensor) and now.dtype != value.dtype:
                entries[key] = value.to(now.device)


def _check_shapes(parameter: Tensor, entries: dict[str, Any]) -> None:
    """Raise `RequestError` for a state of another shape: fused kernels walk through it by its parameter's size."""
    for key, value in entries.items():
        if isinstance(value, Tensor) and value.dim() and value.shape != parameter.shape:
            found, wanted = tuple(value.shape), tuple(parameter.shape)
            raise RequestError(f"The checkpoint's optimizer has {key} {found} for a parameter {wanted}.")
