"""A run's state, the same whatever the strategy: named tensors, and everything else as JSON holds it.

Tensors are named by what they belong to and by the model's own parameter names: `model/fc.weight`,
`optimizer/fc.weight/momentum_buffer`, `ema/fc.weight`. Neither a wrapper's prefix nor a parameter's index is ever
part of a name, so that what one strategy saves another one loads.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .errors import RequestError


@dataclass(frozen=True)
class State:
    """`tensors` by name, and `meta`, which is JSON-able."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    meta: dict[str, Any] = field(default_factory=dict)
    origin: Path | None = field(default=None, compare=False)
    """The checkpoint that it was read from: the folder itself, not a link to it."""
    caution: str = field(default="", compare=False)
    """What is to be said of that: it is not the newest, because that one is damaged."""

    def part(self, name: str) -> dict[str, Tensor]:
        """Return the tensors below `name/`, by the rest of their names."""
        return {key[len(name) + 1 :]: value for key, value in self.tensors.items() if key.startswith(f"{name}/")}


def model_tensors(model: nn.Module, *, under: str = "model") -> dict[str, Tensor]:
    """Return the model's parameters and persistent buffers (not copies) as `under/NAME`."""
    return {f"{under}/{name}": value for name, value in model.state_dict().items()}


def load_model(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Copy `tensors` into the model, in place.

    Raises `RequestError` naming the keys and shapes that do not fit.
    """
    own = model.state_dict()
    missing, foreign = sorted(own.keys() - tensors.keys()), sorted(tensors.keys() - own.keys())
    reshaped = [
        f"{name} is {tuple(tensors[name].shape)}, the model's is {tuple(own[name].shape)}"
        for name in own.keys() & tensors.keys()
        if own[name].shape != tensors[name].shape
    ]
    differences = [
        *([f"it lacks {_few(missing)}"] if missing else []),
        *([f"the model lacks {_few(foreign)}"] if foreign else []),
        *([_few(sorted(reshaped))] if reshaped else []),
    ]
    if differences:
        raise RequestError(
            f"The checkpoint is of another model: {'; '.join(differences)}. Give the model it was trained with."
        )
    with torch.no_grad():
        for name, value in own.items():
            value.copy_(tensors[name])


def laid_out_as(parameter: Tensor, tensor: Tensor) -> Tensor:
    """Return `tensor` in the parameter's memory order, where it has its shape.

    torch's fused optimizers on a CPU walk through the memory of both side by side: state of another order, such as
    contiguous beside channels_last, is silently given to the wrong weights.
    """
    if tensor.shape != parameter.shape:
        return tensor
    return torch.empty_like(parameter, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _few(names: list[str], most: int = 3) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def optimizer_state(model: nn.Module, optimizers: Iterable[Optimizer]) -> State:
    """Return the optimizers' state by parameter name: tensors, and in `meta` the plain numbers.

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
    """Give the optimizers the state that `optimizer_state` returned, on each parameter's own device."""
    parameters = dict(model.named_parameters())
    entries: dict[str, dict[str, Any]] = {}
    for path, tensor in state.part("optimizer").items():
        name, key = path.rsplit("/", 1)
        entries.setdefault(name, {})[key] = laid_out_as(parameters[name], tensor)
    for path, number in state.meta.get("optimizer", {}).items():
        name, key = path.rsplit("/", 1)
        entries.setdefault(name, {})[key] = number
    names = {parameter: name for name, parameter in model.named_parameters()}
    for optimizer in optimizers:
        # load_state_dict speaks of parameters by their position, and moves tensors to the parameter's device and dtype.
        order = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        own = {index: entries[names[parameter]] for index, parameter in enumerate(order) if names[parameter] in entries}
        groups = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict({"state": own, "param_groups": groups})
