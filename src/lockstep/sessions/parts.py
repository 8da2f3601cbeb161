"""Preparation of a session's models, optimizers, schedules and loaders."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from .. import _torch
from ..data.share import SharedLoader
from ..training.optim import zero_grad
from ..training.precision import Precision
from ..world.world import World


def place(model: nn.Module, world: World, precision: Precision) -> nn.Module:
    """Place the model on this rank's device (*collective*). Weights are rank 0's; forward runs in `precision`."""
    model = model.to(world.device, precision.cast)
    with torch.no_grad():
        world.broadcast([*model.parameters(), *model.buffers()])

    def forward(own: Any, *given: Any, **named: Any) -> Any:
        with precision.autocast():
            found = own(*given, **named)
        return found if torch.is_autocast_enabled(world.device.type) else _as_float32(found)

    if precision.name in ("bf16", "fp16"):
        refine(model, "forward", forward)
    return model


def refine(owner: Any, name: str, by: Callable[..., Any]) -> None:
    """Have `owner.name(…)` call `by(original, …)`. Only its class changes: copies are independent, state stays."""
    kind: Any = type(owner)

    def refined(self: Any, *given: Any, **named: Any) -> Any:
        return by(types.MethodType(getattr(kind, name), self), *given, **named)

    owner.__class__ = type(kind.__name__, (kind,), {name: refined, "__module__": kind.__module__})


def step_by(optimizer: Optimizer, by: Callable[[Optimizer, Callable[[], Any], Any], Any]) -> None:
    """Have `optimizer.step(closure)` call `by(optimizer, original step, closure)`."""
    own = optimizer.step
    before = own if "step" in vars(optimizer) else functools.partial(_torch.step_with_hooks, optimizer)

    def step(optimizer: Optimizer, closure: Any = None) -> Any:
        return by(optimizer, before, closure)

    # A bound method of the object: schedules rebind the `step` that they find, and look for their own mark.
    optimizer.step = types.MethodType(functools.update_wrapper(step, own), optimizer)  # type: ignore[method-assign]
    if type(optimizer).zero_grad is Optimizer.zero_grad:
        optimizer.zero_grad = types.MethodType(zero_grad, optimizer)  # type: ignore[method-assign]


class Loader:
    """Prepared DataLoader over this rank's shares. Other attributes are those of the user's DataLoader."""

    def __init__(self, shared: SharedLoader, batches: Callable[[SharedLoader], Iterator[Any]]) -> None:
        self.loader: DataLoader[Any] = shared.loader
        self.shared, self._batches = shared, batches

    def __iter__(self) -> Iterator[Any]:
        return self._batches(self.shared)

    def __len__(self) -> int:
        """Return the number of optimizer steps per epoch, for schedules."""
        steps = self.shared.steps()
        if steps is None:
            raise TypeError("the length of this loader's data set is not known")
        return steps

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)


def _as_float32(value: Any) -> Any:
    """Return a model's output with half-precision tensors in float32. Covers any depth of lists and dicts."""
    if isinstance(value, Tensor):
        return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value
    if isinstance(value, dict):
        for key in value:  # in place: a model's own type of output, such as a dataclass that is a dict, stays
            value[key] = _as_float32(value[key])
    elif isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return type(value)(_as_float32(each) for each in value)
    return value
