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


def model_tensors(model: nn.Module, *, under: str = "model") -> dict[str, Tensor]:
    """Return the model's parameters and persistent buffers (not copies) as `under/NAME`."""
    return {f"{under}/{name}": value for name, value in model.state_dict().items()}


def load_model(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Copy `tensors` into the model, in place. Raises what `check_fits` does.

    Buffers get the shapes that they are saved in: a forward pass may have changed them.
    """
    for name, buffer in dict(model.named_buffers()).items():
        if name in tensors and tensors[name].shape != buffer.shape:
            set_buffer(model, name, torch.empty_like(tensors[name], dtype=buffer.dtype, device=buffer.device))
    check_fits(model, tensors)
    with torch.no_grad():
        for name, value in model.state_dict().items():
            value.copy_(tensors[name])


def set_buffer(model: nn.Module, name: str, tensor: Tensor) -> None:
    """Make `tensor` the model's buffer of that dotted name."""
    parent, _, own_name = name.rpartition(".")
    module = model.get_submodule(parent)
    if hasattr(module, own_name):
        setattr(module, own_name, tensor)
    else:
        module.register_buffer(own_name, tensor)


def check_fits(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Raise `RequestError` where `tensors` do not fit the model. The message names keys and shapes."""
    missing, foreign, reshaped = misfits(model.state_dict(), tensors)
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
    is_own = "groups" in state.meta  # of a loop of the user's, whose optimizers may keep what they like
    entries: dict[str, dict[str, Any]] = {name: {} for name in parameters}
    for path, value in (state.part("optimizer") | state.meta.get("optimizer", {})).items():
        name, _, key = path.rpartition("/")
        if name not in parameters:
            raise RequestError(f"The checkpoint's optimizer has {path}, and the model no such parameter.")
        if not is_own and not isinstance(value, Tensor) and type(value) not in (int, float):
            raise RequestError(f"The checkpoint's optimizer has {path}, which is no number.")
        entries[name][key] = laid_out_as(parameters[name], value) if isinstance(value, Tensor) else value
    names = {parameter: name for name, parameter in parameters.items()}
    for optimizer in optimizers:
        # load_state_dict speaks of parameters by their position, and moves tensors to the parameter's device and dtype.
        order = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        own = {index: entry for index, parameter in enumerate(order) if (entry := entries[names[parameter]])}
        made = [optimizer.state[parameter].keys() for parameter in order if optimizer.state.get(parameter)]
        kinds = {frozenset(each) for each in (*made, *(entry.keys() for entry in own.values()))}
        is_plain = not is_own or any(group.get("fused") for group in optimizer.param_groups)
        if len(own) < len(made) or (is_plain and len(kinds) > 1):
            raise RequestError("The checkpoint's optimizer lacks a part of its state; give another copy of it.")
        # Fused kernels walk through a state by its parameter's size; others, such as Adafactor, keep other shapes.
        for parameter in order if is_plain else ():
            for key, value in entries[names[parameter]].items():
                if isinstance(value, Tensor) and value.dim() and value.shape != parameter.shape:
                    found, wanted = tuple(value.shape), tuple(parameter.shape)
                    raise RequestError(f"The checkpoint's optimizer has {key} {found} for a parameter {wanted}.")
        groups = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict({"state": own, "param_groups": groups})
