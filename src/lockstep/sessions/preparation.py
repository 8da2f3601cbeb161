"""A loop's objects in a session: what `session.prepare` makes of them, and what it attaches to them until it ends."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import LBFGS, Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, Dataset

from .. import _torch
from ..checkpoint.shards import is_shard
from ..config.registry import UNSCALED
from ..errors import RequestError
from ..nn import sync_batchnorm
from ..nn.attach import attach, gate_schedule
from ..runs.prepared import Prepared, Source
from ..training.optim import Average
from . import parts
from .passes import Passes
from .stepper import Stepper


class Preparation:
    """Takes a loop's objects into `prepared`. `resources` detaches from them when the session ends."""

    def __init__(
        self,
        prepared: Prepared,
        stepper: Stepper,
        passes: Passes,
        resources: ExitStack,
        *,
        own_modules: weakref.WeakSet[nn.Module] | None,
    ) -> None:
        """`own_modules` are those that got a parameter within the session; None where that does not matter."""
        self._prepared, self._stepper, self._passes, self._resources = prepared, stepper, passes, resources
        self._own_modules = own_modules
        self._scaled: tuple[weakref.ref[Tensor], Tensor] | None = None  # the user's GradScaler's output, and its input

    def take(self, part: Any) -> Any:
        """Return a prepared object (*collective*). See `Session.prepare`."""
        prepared = self._prepared
        if isinstance(part, nn.Module):
            parts.check_plain(part)
            if self._own_modules is not None and not _follows_seed(part, self._own_modules):
                prepared.cautions.append(
                    "the model was made before lockstep.session(), or loaded whole: its weights do not follow from the "
                    "seed, and another start may draw others; call lockstep.session() first"
                )
            if sync_batchnorm.has_batchnorm(part):
                is_local = prepared.config.parallel.batchnorm == "local" or prepared.exchange.every > 0
                prepared.batchnorm = "local" if is_local else "sync"
                if prepared.batchnorm == "sync":
                    sync_batchnorm.convert(part, prepared.world)
                    self._resources.callback(sync_batchnorm.restore, part)
            for attached in prepared.recomputation.attach(part):
                self._resources.callback(attached.remove)
            number = len(prepared.models) + 1
            part = parts.place(part, prepared.world, prepared.precision, self._resources)
            prepared.models["model" if number == 1 else f"model_{number}"] = _torch.inner(part)
            prepared.exchange.attach(part)
            self._watch(part)
        elif isinstance(part, Optimizer):
            self._take_optimizers(part)
        elif isinstance(part, DataLoader):
            return self._passes.prepare(part)
        elif isinstance(part, Source):
            return parts.Loader(part, self._passes.over)
        elif isinstance(part, parts.Loader):
            raise RequestError("session.prepare was given a loader that it had returned; prepare each loader once.")
        elif isinstance(part, Dataset):
            raise RequestError(
                f"session.prepare was given a data set, a {type(part).__name__}: give it the DataLoader over that, "
                "whose position it saves."
            )
        elif hasattr(part, "state_dict") and hasattr(part, "load_state_dict"):
            prepared.stateful_objects.append(part)
            if isinstance(part, GradScaler):
                self._take_scaler(part)
            if not isinstance(part, LRScheduler):
                for value in vars(part).values() if hasattr(part, "__dict__") else ():
                    if isinstance(value, Optimizer):
                        self._take_optimizers(value)
        else:
            raise RequestError(
                "session.prepare takes models, optimizers, DataLoaders, schedules, and objects with state_dict and "
                f"load_state_dict; found a {type(part).__name__}."
            )
        return part

    def average(self, model: nn.Module, decay: float | None, start: int, every: int, *, has_begun: bool) -> nn.Module:
        """Return a model's average. See `Session.average`."""
        original = _torch.inner(model)
        if has_begun or original not in self._prepared.models.values():
            raise RequestError(
                "session.average takes a model that session.prepare has returned, and has to be called before the loop."
            )
        are_whole = isinstance(start, int) and isinstance(every, int)
        if not (are_whole and (decay is None or 0 < decay < 1) and start >= 0 and every >= 1):
            raise RequestError(
                "session.average takes a decay between 0 and 1 or none, and whole numbers of steps, start= from 0 and "
                f"every= from 1; found decay={decay}, start={start}, every={every}."
            )
        if any(map(is_shard, original.parameters())):
            raise RequestError(
                "session.average copies a model, and --strategy fsdp has divided this one; take --strategy zero1, or "
                "average its parameters yourself."
            )
        self._prepared.averages.append(Average(original, decay, start=start, every=every))
        return self._prepared.averages[-1].module

    def _take_optimizers(self, outer: Optimizer) -> None:
        """Add an optimizer, and the optimizers that it wraps and steps."""
        prepared = self._prepared
        for optimizer in parts.with_inner(outer):
            if isinstance(optimizer, LBFGS):
                raise RequestError(
                    "LBFGS evaluates the loss several times in one step, and no rank could sum those gradients: take "
                    "another optimizer."
                )
            if optimizer not in prepared.optimizers:
                prepared.optimizers.append(optimizer)
                self._resources.callback(parts.replace_step(optimizer, self._stepper.step))
            if optimizer is not outer:
                prepared.inner.add(optimizer)

    def _take_scaler(self, scaler: GradScaler) -> None:
        """Note each loss before a user's GradScaler scales it, for the records."""
        if self._prepared.precision.scaler is not None:
            raise RequestError(
                "session.prepare was given a GradScaler, and precision='fp16' scales losses already: leave the "
                "GradScaler out, or precision='fp16'."
            )
        exchange, size = self._prepared.config.parallel.exchange, self._prepared.world.size
        if exchange in UNSCALED and size > 1 and scaler.is_enabled():
            raise RequestError(
                f"session.prepare was given a GradScaler, and --exchange {exchange} cannot work with a loss scale, "
                "which varies; compute in bf16, without one."
            )

        def scale(method: Callable[..., Any], outputs: Any) -> Any:
            scaled = method(outputs)
            if isinstance(scaled, Tensor):
                self._scaled = weakref.ref(scaled), outputs.detach()
            return scaled

        self._attach(scaler, "scale", scale)

    def _watch(self, model: nn.Module) -> None:
        """Report the inputs and outputs of the model's forward to the passes over loaders."""
        pre_hook, hook = parts.ForwardHook(self._passes.see), parts.ForwardHook(self._passes.mark)
        self._resources.callback(model.register_forward_pre_hook(pre_hook, with_kwargs=True).remove)
        self._resources.callback(model.register_forward_hook(hook, with_kwargs=True).remove)

    def before_scaling(self, loss: Tensor) -> Tensor:
        """Return the loss that a user's GradScaler has scaled to this one, or the loss itself."""
        return self._scaled[1] if self._scaled is not None and self._scaled[0]() is loss else loss

    def gate(self) -> None:
        """Have methods that a loop calls once per global batch act at its end, as optimizers do."""
        for optimizer in self._prepared.optimizers:
            self._attach(optimizer, "zero_grad", self._at_last)
        for model in self._prepared.models.values():
            self._attach(model, "zero_grad", self._at_last)
        for part in (*self._prepared.stateful_objects, *self._prepared.models.values()):
            if isinstance(part, LRScheduler):
                for attached in gate_schedule(part, lambda: self._stepper.is_whole):
                    self._resources.callback(attached.remove)
            for name in ("update_parameters", "unscale_", "update"):
                if isinstance(part, AveragedModel | GradScaler) and hasattr(part, name):
                    self._attach(part, name, self._at_last)
            if isinstance(part, GradScaler):
                self._attach(part, "step", self._at_last)

    def _attach(self, owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
        """Replace a method of a user's object until the session ends."""
        self._resources.callback(attach(owner, name, wrapper).remove)

    def _at_last(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return method(*args, **kwargs) if self._stepper.is_whole else None


def _follows_seed(model: nn.Module, seeded: Collection[nn.Module]) -> bool:
    """Return whether a part of the model is one of these modules, or has the weights of one, as a deep copy does."""
    owners = [module for module in model.modules() if next(module.parameters(recurse=False), None) is not None]
    if not owners or any(module in seeded for module in owners):
        return True
    part = max(owners, key=lambda module: max(parameter.dim() for parameter in module.parameters(recurse=False)))
    return any(type(module) is type(part) and _has_weights_of(module, part) for module in seeded)


def _has_weights_of(one: nn.Module, other: nn.Module) -> bool:
    first, second = ([*module.parameters(recurse=False)] for module in (one, other))
    kinds = [[(part.shape, part.dtype, part.device, is_shard(part)) for part in parts] for parts in (first, second)]
    return kinds[0] == kinds[1] and all(map(torch.equal, first, second))
