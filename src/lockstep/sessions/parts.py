"""Preparation of a session's models, optimizers and loaders."""

from __future__ import annotations

import functools
import inspect
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from .. import _torch
from ..errors import RequestError
from ..nn.attach import attach
from ..runs.prepared import Source
from ..training.optim import zero_grad
from ..training.precision import Precision, cast
from ..world.world import World


def modules_from_now(resources: ExitStack) -> weakref.WeakSet[nn.Module]:
    """Return a set that each module joins when it gets a parameter, until `resources` close."""
    modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()
    hook = register_module_parameter_registration_hook(lambda module, name, parameter: modules.add(module))
    resources.callback(hook.remove)
    return modules


def check_plain(model: nn.Module) -> None:
    """Raise `RequestError` for a model that is distributed already."""
    for module in model.modules():
        if isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel):
            raise RequestError(
                f"session.prepare was given a model in {type(module).__name__}, and would exchange its gradients a "
                "second time: give it the unwrapped model."
            )
    for name, parameter in model.named_parameters():
        if isinstance(parameter, nn.UninitializedParameter):
            raise RequestError(
                f"session.prepare was given a model whose parameter {name} has no shape yet (a lazy layer): call the "
                "model on a batch first."
            )
        if hasattr(parameter, "placements"):
            raise RequestError(
                f"session.prepare was given a model whose parameter {name} is sharded (a DTensor, as of fully_shard), "
                "and each rank of a session has the whole model: give it the model before it is sharded."
            )


def place(model: nn.Module, world: World, precision: Precision, hooks: ExitStack) -> nn.Module:
    """Place the model on this rank's device with rank 0's weights (*collective*).

    `forward` and the class's other public methods compute in `precision`.
    """
    model = model.to(world.device)
    if precision.cast is not None:
        cast(model, precision.cast)
    with torch.no_grad():
        world.broadcast([*model.parameters(), *model.buffers()])

    def compute(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with precision.autocast():
            output = method(*args, **kwargs)
        return output if torch.is_autocast_enabled(world.device.type) else _as_float32(output)

    if precision.name in ("bf16", "fp16"):
        for owner in {id(module): module for module in (model, _torch.inner(model))}.values():
            for name in ("forward", *_methods(type(owner))):
                hooks.callback(attach(owner, name, compute, copies=True).remove)
    return model


def _methods(kind: type) -> list[str]:
    """Return the public methods that a class and its bases below nn.Module define, without `forward`."""
    names: dict[str, None] = {}
    for base in kind.__mro__:
        if base is nn.Module or base.__module__.startswith("torch."):
            continue
        for name, value in vars(base).items():
            if not name.startswith("_") and inspect.isfunction(value) and not hasattr(nn.Module, name):
                names[name] = None
    return [name for name in names if name != "forward"]


class ForwardHook:
    """Forward hook that passes a model's inputs or outputs to the session. Copies and pickles of it do nothing.

    As a pre-hook it receives the arguments of the model's forward; as a hook also the output.
    """

    def __init__(self, see: Callable[[Any], None] | None = None) -> None:
        self._see = see

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, *output: Any) -> None:
        if self._see is not None and not torch.compiler.is_compiling():
            self._see(output or (args, kwargs))

    def __reduce__(self) -> Any:
        return ForwardHook, ()

    def __deepcopy__(self, memo: dict[int, Any]) -> ForwardHook:
        return ForwardHook()


def replace_step(
    optimizer: Optimizer, wrapper: Callable[[Optimizer, Callable[[], Any], Any], Any]
) -> Callable[[], None]:
    """Make `optimizer.step(closure)` call `wrapper(optimizer, original step, closure)`; return how to undo that."""
    replaced = {name: vars(optimizer)[name] for name in ("step", "zero_grad") if name in vars(optimizer)}
    method = optimizer.step
    original = method if "step" in vars(optimizer) else functools.partial(_torch.step_with_hooks, optimizer)

    def step(optimizer: Optimizer, *args: Any, **options: Any) -> Any:
        inputs = [*args, *options.values()]
        closure = next(filter(callable, inputs), None)
        return wrapper(
            optimizer,
            functools.partial(original, *args, **options) if any(value is not None for value in inputs) else original,
            closure,
        )

    # A bound method of the object: schedules rebind the optimizer's `step` and mark it.
    optimizer.step = types.MethodType(functools.update_wrapper(step, method), optimizer)  # type: ignore[method-assign]
    if type(optimizer).zero_grad is Optimizer.zero_grad:
        optimizer.zero_grad = types.MethodType(zero_grad, optimizer)  # type: ignore[method-assign]
    installed = {name: vars(optimizer)[name] for name in ("step", "zero_grad") if name in vars(optimizer)}

    def restore() -> None:
        for name, method in installed.items():
            if vars(optimizer).get(name) is method:  # else a schedule, made later, has wrapped it
                vars(optimizer).pop(name)
                vars(optimizer).update({name: replaced[name]} if name in replaced else {})

    return restore


def with_inner(optimizer: Optimizer) -> list[Optimizer]:
    """Return the optimizers in this one's attributes, as of SAM and Lookahead, then itself."""
    inner = [item for item in vars(optimizer).values() if isinstance(item, Optimizer) and item is not optimizer]
    return [*(nested for item in inner for nested in with_inner(item)), optimizer]


class Loader:
    """Prepared DataLoader over this rank's shares. Has the attributes of the user's DataLoader."""

    def __init__(self, shared: Source, batches: Callable[[Source], Iterator[Any]]) -> None:
        self.loader: DataLoader[Any] | None = getattr(shared, "loader", None)
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
        if name in ("loader", "shared"):  # of an incomplete copy
            raise AttributeError(name)
        return getattr(self.loader, name)


def raw(loader: Any) -> Any:
    """Return the user's DataLoader of a prepared loader, or `loader` itself."""
    return loader.loader if isinstance(loader, Loader) else loader


def _as_float32(value: Any) -> Any:
    """Return a model's output with half-precision tensors in float32, at any depth of lists and dicts."""
    if isinstance(value, Tensor):
        return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value
    if isinstance(value, dict):
        for key in value:  # in place, which keeps the output's type, such as a dataclass that is a dict
            value[key] = _as_float32(value[key])
    elif isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return type(value)(_as_float32(item) for item in value)
    return value
