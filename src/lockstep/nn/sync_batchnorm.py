"""BatchNorm over all ranks: each global micro-batch is normalised as one process would normalise it.

Ordinary BatchNorm takes mean and variance of the samples that its own rank holds, so that the model changes with
the number of ranks. Here each rank hears the others' count, mean and variance of each channel: one all-gather
forward. The gradient of the input needs two sums over the whole micro-batch: one all-reduce backward. With dy the
gradient of the output, x̂ the normalised input, s the standard deviation, w the weight and n the global count of
values per channel,

    dx = w/s · (dy - Σdy/n - x̂ · Σ(dy·x̂)/n).

The gradients of weight and bias stay those of the rank's own samples, like every other parameter's: the strategy
reduces them. A rank whose share is empty joins both collectives with zeros.

torch's own `SyncBatchNorm` refuses a CPU, and on a GPU the host waits once a layer for it, to find the ranks without
a sample. Here the global count stays on the device, so that nobody waits. All of it travels in float64.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import ModuleType
from typing import Any, ClassVar

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from .._torch import BatchNorm
from ..errors import RequestError
from ..world.world import World
from . import cpu_kernels, cuda_kernels

_PLAIN = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


_EAGER: list[Callable[..., Tensor]] = []
"""`SyncBatchNorm._synchronised` as a compiler leaves it alone."""


class SyncBatchNorm(BatchNorm):
    """BatchNorm1d, 2d and 3d over the samples of all ranks of `world`.

    Input and output (N, C) or (N, C, …), N may differ between ranks and be 0. In training `forward` and the
    backward pass are *collective*; in evaluation nothing is communicated. It cannot be differentiated twice.

    `--compile` leaves the layer as it is and compiles what lies between such layers: ranks whose shares differ have
    different programs, and only Python's order makes sure that these exchange the same thing at the same time.
    """

    world: World
    stand_in: ClassVar[bool] = False
    """Whether this rank's samples stand in for an empty share, and are left out of all statistics."""

    @classmethod
    def of(cls, norm: BatchNorm, world: World) -> SyncBatchNorm:
        """Return `norm` made synchronous: the same parameter and buffer objects, hooks and settings."""
        sync = cls.__new__(cls)
        sync.__dict__ = {**norm.__dict__, "world": world}
        return sync

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` normalised with the statistics of the global micro-batch (*collective* in training)."""
        # torch's kernels do not check it, and would read beyond the weights.
        if x.dim() < 2 or x.shape[1] != self.num_features:
            asked = f"(N, {self.num_features}) or (N, {self.num_features}, …)"
            raise ValueError(f"BatchNorm of {self.num_features} channels takes {asked}, found {tuple(x.shape)}")
        if not self.training:
            batch_statistics = self.running_mean is None
            return functional.batch_norm(
                x, self.running_mean, self.running_var, self.weight, self.bias, batch_statistics, 0.0, self.eps
            )
        # Only where there is a compiler to keep out.
        return self._eager(x) if torch.compiler.is_compiling() else self._synchronised(x)

    def _synchronised(self, x: Tensor) -> Tensor:
        if x.numel() == 0 and self.world.size == 1:
            return self._of_nothing(x)
        if x.is_cuda:
            x = cuda_kernels.dense(x)
        mean, var, count = _global_statistics(x.detach(), self.world, self.eps)
        # Only what ranks have exchanged on a CPU are arrays.
        numbers = _kernels(x) if self.world.size > 1 else cuda_kernels
        mean, var, unbiased = numbers.tensors(x.dtype, (mean, var, var * (count / (count - 1))))
        self._track(mean, unbiased)
        y: Tensor = _Normalise.apply(x, self.weight, self.bias, mean, var, count, self.eps, self.world)
        return y

    def _eager(self, x: Tensor) -> Tensor:
        if not _EAGER:  # made where there is a compiler: importing it takes as long as torch itself
            _EAGER.append(torch.compiler.disable(SyncBatchNorm._synchronised))  # type: ignore[no-untyped-call]
        y: Tensor = _EAGER[0](self, x)
        return y

    def _of_nothing(self, x: Tensor) -> Tensor:
        """Return the output of a layer that shares its statistics with no other rank, for no sample: as torch does."""
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        return functional.batch_norm(x, None, None, self.weight, self.bias, True, 0.0, self.eps)

    def _track(self, mean: Tensor, var: Tensor) -> None:
        """Move the running statistics towards those of this global micro-batch, of which `var` is the unbiased one."""
        running_mean, running_var, batches = self.running_mean, self.running_var, self.num_batches_tracked
        if running_mean is None or running_var is None or batches is None:
            return
        batches.add_(1)
        # Without a momentum the running statistics are the plain average over all batches so far.
        momentum = 1 / batches.to(running_mean.dtype) if self.momentum is None else self.momentum
        running_mean.lerp_(mean.to(running_mean.dtype), momentum)
        running_var.lerp_(var.to(running_var.dtype), momentum)

    def __deepcopy__(self, memo: dict[int, Any]) -> SyncBatchNorm:
        # A process group cannot be copied; a copy of the layer belongs to the same world.
        memo[id(self.world)] = self.world
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__dict__ = copy.deepcopy(self.__dict__, memo)
        return copied


def _global_statistics(x: Tensor, world: World, eps: float) -> tuple[Any, Any, Tensor | int]:
    """Return all ranks' mean and biased variance per channel (C,), and values per channel (0-dim) (*collective*).

    They are tensors on a GPU and of one rank, NumPy's arrays of several on a CPU. There a single value raises
    `ValueError`. On a GPU the host would have to wait to know it: the running variance becomes NaN there.
    """
    kernels = _kernels(x)
    channels = x.shape[1]
    local_count = 0 if SyncBatchNorm.stand_in else x.numel() // channels
    if world.size == 1:
        _check_count(local_count, "on this rank")
        return *kernels.statistics(x, eps), local_count
    own = kernels.statistics(x, eps) if local_count else 2 * [torch.zeros(channels, device=x.device)]
    found = kernels.exchanged(world, *own, local_count)
    means, counts = found[:, :channels], found[:, -1:]
    count = counts.sum()
    if not x.is_cuda:
        count = int(count)
        _check_count(count, "on all ranks")
    shares = counts / count
    pooled = (found * shares).sum(0)
    mean, within = pooled[:channels], pooled[channels:-1]
    # Around the common mean, not the mean of squares less the square of the mean, which loses a small variance.
    var = within + ((means - mean) ** 2 * shares).sum(0)
    return mean, var, count


def _check_count(count: int, where: str) -> None:
    if count <= 1:
        raise ValueError(f"BatchNorm needs more than 1 value per channel in training, found {count} {where}")


def _kernels(x: Tensor) -> ModuleType:
    return cuda_kernels if x.is_cuda else cpu_kernels


class _Normalise(torch.autograd.Function):
    """y = (x - mean) / √(var + eps) · weight + bias, with the gradient through the global mean and variance."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        var: Tensor,
        count: Tensor | int,
        eps: float,
        world: World,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, mean, var)
        ctx.count, ctx.eps, ctx.world, ctx.stand_in = count, eps, world, SyncBatchNorm.stand_in
        y: Tensor = _kernels(x).normalise(x, mean, var, weight, bias, eps)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError("synchronised BatchNorm cannot be differentiated twice; use --batchnorm local")
        x, weight, mean, var = ctx.saved_tensors
        if x.is_cuda:
            dy = cuda_kernels.dense(dy, like=x)
        kernels = _kernels(x)
        dot, total = kernels.sums(dy, x, weight, mean, var, ctx.eps)
        dx = None
        if ctx.needs_input_grad[0]:
            means = kernels.summed(ctx.world, dot, total) / ctx.count
            dx = kernels.input_gradient(dy, x, weight, mean, var, ctx.eps, means)
            if ctx.stand_in:  # which has no part in the statistics
                dx.zero_()
        return dx, dot if ctx.needs_input_grad[1] else None, total if ctx.needs_input_grad[2] else None, *[None] * 5


def statistics(model: nn.Module) -> dict[str, Tensor]:
    """Return the running statistics of the BatchNorm layers by their names in `model`."""
    return {
        f"{name}.{key}" if name else key: held
        for name, each in model.named_modules()
        if isinstance(each, BatchNorm)
        for key, held in each.named_buffers(recurse=False)
    }


def untracked(model: nn.Module) -> list[str]:
    """Return the names of BatchNorm layers that keep no running statistics, and so take an evaluation batch's own."""
    return [name for name, each in model.named_modules() if isinstance(each, BatchNorm) and each.running_mean is None]


def has_batchnorm(model: nn.Module) -> bool:
    """Return whether `model` has a layer whose output depends on the whole batch in training."""
    return any(isinstance(module, BatchNorm) for module in model.modules())


def convert(model: nn.Module, world: World) -> nn.Module:
    """Return `model` with every BatchNorm made synchronous over `world`; unchanged where the world has one rank.

    Layers stay the objects that they are, and of their kinds; what they compute changes. torch's `SyncBatchNorm`
    changes too, unless it has a process group of its own.

    Raises `RequestError` where a layer is a kind of BatchNorm whose own behaviour the exchange would drop.
    """
    if world.size == 1:
        return model
    for name, module in model.named_modules():
        if isinstance(module, BatchNorm) and not isinstance(module, SyncBatchNorm) and not _replaceable(module):
            raise RequestError(
                f"Layer {name!r} is a {type(module).__name__}, a BatchNorm of its own kind, which cannot be made "
                f"synchronous; use --batchnorm local, or nn.BatchNorm in the model."
            )
    for norm in [each for each in model.modules() if isinstance(each, BatchNorm) and _replaceable(each)]:
        # The very object, and still of its kind: whoever holds it, or looks for nn.BatchNorm2d, finds it.
        norm.__class__ = _SYNCHRONOUS.get(type(norm), SyncBatchNorm)
        norm.world = world  # type: ignore[assignment]
    return model


class SyncBatchNorm1d(SyncBatchNorm, nn.BatchNorm1d):
    """BatchNorm1d over the samples of all ranks."""


class SyncBatchNorm2d(SyncBatchNorm, nn.BatchNorm2d):
    """BatchNorm2d over the samples of all ranks."""


class SyncBatchNorm3d(SyncBatchNorm, nn.BatchNorm3d):
    """BatchNorm3d over the samples of all ranks."""


_SYNCHRONOUS: dict[type[BatchNorm], type[SyncBatchNorm]] = {
    nn.BatchNorm1d: SyncBatchNorm1d,
    nn.BatchNorm2d: SyncBatchNorm2d,
    nn.BatchNorm3d: SyncBatchNorm3d,
}


class FoldedBatchNorm2d(SyncBatchNorm, nn.BatchNorm2d):
    """BatchNorm2d over its own rank's samples, by the kernels of `cpu_kernels`."""


def fold(model: nn.Module) -> nn.Module:
    """Return `model` with each BatchNorm2d that torch computes slowly on a CPU with channels_last made a folded one.

    Those are the ones whose channels fill no cache line (see `cpu_kernels`). The mathematics, parameters, buffers and
    their names do not change.
    """

    def is_slow(module: BatchNorm) -> bool:
        return type(module) is nn.BatchNorm2d and module.num_features % cpu_kernels.FOLD != 0

    return _replace(model, lambda norm: FoldedBatchNorm2d.of(norm, World.alone()), is_slow, {})


def is_folded(model: nn.Module) -> bool:
    """Return whether `fold` has found something to do in `model`."""
    return any(isinstance(module, FoldedBatchNorm2d) for module in model.modules())


def _replaceable(module: BatchNorm) -> bool:
    """Return whether `module` is a BatchNorm of torch's own that, made synchronous, is no other layer."""
    return type(module) in _PLAIN or (type(module) is nn.SyncBatchNorm and module.process_group is None)


def _replace(
    module: nn.Module,
    make: Callable[[BatchNorm], SyncBatchNorm],
    chosen: Callable[[BatchNorm], bool],
    made: dict[nn.Module, SyncBatchNorm],
) -> nn.Module:
    """Return `module` with the chosen BatchNorms made others; `made` keeps a layer used in two places one layer."""
    if isinstance(module, BatchNorm) and chosen(module):
        if module not in made:
            made[module] = make(module)
        return made[module]
    # Not named_children(), which names a layer that the module holds twice only once.
    for name, child in module._modules.items():
        if child is not None:
            setattr(module, name, _replace(child, make, chosen, made))
    return module
